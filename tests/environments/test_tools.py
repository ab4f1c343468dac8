"""Tool calls in Qwen's form. The texts of prompts and results are those of Qwen3-8B's own template, rendered once."""

import pytest

from rpg_jax.data import Problem
from rpg_jax.data.chat import ChatTemplate
from rpg_jax.data.prompts import rendered
from rpg_jax.environments import Posed
from rpg_jax.environments.player import Observations
from rpg_jax.environments.tools import ToolUse, answer, make_tool, parse

POSED = Posed("What is 17*(2+3)?", "85", "What is 17*(2+3)?")
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == "system" %}{{ messages[0].content + "\n\n" }}{% endif %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}

</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
{{- "\n<tool_response>\n" + m.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- elif m.role != "system" or not tools %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROMPT = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "calculator", "description": "Works out an expression of numbers with '
    '+ - * / and parentheses, exactly.", "parameters": {"type": "object", "properties": {"expression": {"type": '
    '"string"}}, "required": ["expression"]}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nWhat is 17*(2+3)?<|im_end|>\n<|im_start|>assistant\n"
)
RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n85\n</tool_response>\n<tool_response>\nerror: division by zero\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def call(expression):
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def test_tools_stand_in_the_system_turn_and_results_in_the_users(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat", ChatTemplate(TEMPLATE))
    tools = ToolUse()
    system = Posed(POSED.prompt, "85", POSED.question, system="Be brief.")
    problem = Problem(0, POSED.prompt, "85", "t", messages=tuple(tools.reset(system)))
    assert rendered(problem, tokenizer) == PROMPT
    turn = tools.step(POSED, problem.opening, f"First.\n{call('17*(2+3)')}\n{call('1/0')}")
    read = Observations(tokenizer, thinking=True).encode(turn.observation)
    assert tokenizer._model.decode(read.tolist(), skip_special_tokens=False) == RESULTS


def test_the_turn_without_a_call_is_the_answer_and_calls_cost():
    tools = ToolUse(cost=0.25)
    assert tools.step(POSED, [], call("1")).reward == -0.25 and not tools.step(POSED, [], call("1")).done
    turns = [tools.step(POSED, [], text) for text in ("<think>\n8\n</think>\n\n85", "Answer: 85", "58")]
    assert [(turn.reward, turn.done) for turn in turns] == [(1.0, True), (1.0, True), (0.0, True)]
    assert ToolUse(verifier="gsm8k").step(POSED, [], "so it is #### 85.0").reward == 1.0
    with pytest.raises(ValueError, match="unknown verifier 'judge'"):
        ToolUse(verifier="judge")


@pytest.mark.parametrize(
    ("completion", "text", "answers"),
    [
        ("85", "85", []),
        (call("1+1"), "", ["2"]),
        (f"a{call('1')}b{call('2')}", "ab", ["1", "2"]),
        (f"<think>{call('1')}</think>\n\n85", "85", []),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "3"}}', "", ["3"]),
        ('<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', "", ['error: a call is {"name": ..., ']),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', "", ["error: name is a text, and arguments is an o"]),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", ["error: this is not JSON: NaN is no"]),
        ('<tool_call>{"name": "f"} {}</tool_call>', "", ["error: this is not JSON"]),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "", ["error: this is not JSON"]),
        ("<tool_call></tool_call>", "", ["error: this is not JSON"]),
    ],
)
def test_calls_are_read_and_answered_exactly(completion, text, answers):
    outside, calls = parse(completion)
    assert outside == text and len(calls) == len(answers)
    for one, expected in zip(calls, answers, strict=True):
        found = answer({"calculator": make_tool("calculator", {})}, one)
        assert found.startswith(expected) if expected.startswith("error") else found == expected


def test_a_wrong_call_is_a_result_that_says_how():
    tools = ToolUse()
    written = {
        '{"name": "compute", "arguments": {}}': "error: there is no tool 'compute'; there are calculator",
        '{"name": "calculator", "arguments": {}}': "error: calculator needs expression",
        '{"name": "calculator", "arguments": {"x": 1}}': "error: calculator takes expression, not x",
        '{"name": "calculator", "arguments": {"expression": 1}}': "error: expression must be of the type string",
        '{"name": "calculator", "arguments": {"expression": "2.5*-(1+3)/3"}}': "-3.33333333333",
        '{"name": "calculator", "arguments": {"expression": "__import__(1)"}}': "error: not an expression of numbers",
    }
    turn = tools.step(POSED, [], "".join(f"<tool_call>{text}</tool_call>" for text in written))
    for message, expected in zip(turn.observation, written.values(), strict=True):
        assert message["role"] == "tool" and message["content"].startswith(expected)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("call_me", "must annotate x as str"),
        ("several", "must annotate x as str, .* and take it by keyword"),
        ("first", "must annotate x as str, .* and take it by keyword"),
        ("nowhere", "name 'Nowhere' is not defined"),
        ("later", "is async: write a plain function"),
    ],
)
def test_a_tool_that_no_call_would_fit_is_refused(name, said):
    with pytest.raises(ValueError, match=f"the tool 'tests.environments.test_tools:{name}' .*{said}"):
        make_tool(f"tests.environments.test_tools:{name}", {})


def call_me(x):
    return x


def several(*x: str):
    return x


def first(x: str, /):
    return x


def nowhere(x: "Nowhere"):  # noqa: F821
    return x


async def later(x: str):
    return x


@pytest.mark.parametrize("options", [{"x": 1}, {"expression": "1+1"}])
def test_options_that_make_no_tool_are_named(options):
    with pytest.raises(ValueError, match="the tool 'calculator' with the options {'"):
        make_tool("calculator", options)


async def waits(completion, answer):
    return 1.0


@pytest.mark.parametrize(
    ("name", "said"), [("waits", "is async: hand the function"), ("missing", "no function or class")]
)
def test_a_verifier_that_cannot_be_called_is_named_when_the_environment_is_made(name, said):
    with pytest.raises(ValueError, match=said):
        ToolUse(verifier=f"tests.environments.test_tools:{name}")


def test_a_verifier_of_ones_own_may_leave_the_prompt_out():
    for name in ("two", "three"):
        assert ToolUse(verifier=f"tests.environments.test_tools:{name}").step(POSED, [], "85").reward == 1.0


def two(completion, answer):
    return completion == answer


def three(completion, answer, prompt):
    return prompt == POSED.prompt and completion == answer
