from __future__ import annotations

import pytest

from rpg_jax.data.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def test_templates_see_the_messages_and_special_tokens():
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"})
    assert template(MESSAGES) == "<s>hi"


def test_templates_see_the_tools_of_the_first_message_and_no_keys_of_an_environment():
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.keys() | list }}{% endfor %}")
    assert template([{**MESSAGES[0], "tools": [1], "sum": 2}]) == "[1]['role', 'content']"
    assert template(MESSAGES) == "None['role', 'content']"


def test_the_default_of_several_templates_is_taken():
    assert ChatTemplate([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])(MESSAGES) == "d"
    with pytest.raises(ValueError, match="'tools'.*no 'default'"):
        ChatTemplate([{"name": "tools", "template": "t"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(attack)(MESSAGES)


def test_template_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(ValueError, match="only user turns"):
        ChatTemplate("{{ raise_exception('only user turns') }}")(MESSAGES)


FAILING = {
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "OverflowError": "{{ range(10 ** 30) }}",
    "RecursionError": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "TypeError": "{{ messages + 1 }}",
    "ValueError": "{{ '%d' | format('x') }}",
    "no attribute": "{{ messages[0].content.nothing.more }}",
}
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": "{% set l = range(1000) | list %}" + "{% for a in l %}" * 5 + "{% endfor %}" * 5,
    "two calls each": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a long text": "{{ 'x' * 10 ** 12 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a long output": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "many slices": "{{ [1] | slice(10 ** 9) | list }}",
    "an indent": "{{ [[1]] | tojson(indent=10 ** 8) }}",
    "words": "{{ lipsum(n=9, max=10 ** 9) }}",
    "doubling by a filter": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}"
    "{% for i in range(99) %}{% set n.x = f(n.x) %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "constants": "{% for a in [1] * 999999 %}{% for b in 'x' * 999999 %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("attack", FAILING)
def test_a_template_that_fails_is_one_line(attack):
    with pytest.raises(ValueError, match=r"^the chat template (failed|cannot be compiled): \w+"):
        ChatTemplate(FAILING[attack])(MESSAGES)


@pytest.mark.parametrize("attack", ENDLESS)
def test_a_template_without_end_is_ended(attack):
    with pytest.raises(ValueError, match=r"^the chat template (failed|cannot be compiled): "):
        ChatTemplate(ENDLESS[attack])(MESSAGES)


def test_the_budget_is_of_a_rendering_and_loops_keep_their_words():
    text = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role ~ ':' ~ none }}{{ loop.last }}{% endfor %}"
    )
    template = ChatTemplate(text + "{% for i in range(200) %}{% for j in range(200) %}{% endfor %}{% endfor %}")
    for _ in range(4):  # together more than one budget
        assert template(MESSAGES).startswith("1/") and ":None" in template(MESSAGES)
    reversed_and_filtered = "{% for m in messages[::-1] if m.content %}{{ m.content }}{% else %}none{% endfor %}"
    assert ChatTemplate(reversed_and_filtered)([]) == "none"
