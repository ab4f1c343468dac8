"""An environment of tests, a tokenizer with a chat template, and a rollout that only asks."""

import json

import numpy as np
import pytest
import tokenizers

from rpg_jax.data import Problem, load_tokenizer
from rpg_jax.environments.registry import Declaration
from rpg_jax.environments.stage import Stage

# It adds what the policy says. "code: …" is run, as a bad environment would.
ADDER = """
from rpg_jax.environments import Turn

class Adder:
    def __init__(self, *, goal=6):
        self.goal = goal

    def reset(self, problem):
        return [{"role": "user", "content": f"{problem.prompt} to {self.goal}"}]

    def step(self, problem, messages, completion):
        if completion.startswith("code: "):
            return eval(completion.removeprefix("code: "))
        before = [m["sum"] for m in messages if "sum" in m]
        total = (before or [0])[-1] + int(completion)
        if total >= self.goal:
            return Turn("", float(total == self.goal), True)
        return Turn([{"role": "user", "content": f"{self.goal - total} left", "sum": total}], -0.5)


class Patient(Adder):
    async def step(self, problem, messages, completion):
        import asyncio
        await asyncio.sleep(1000 if completion == "7" else 0)
        return Adder.step(self, problem, messages, completion)
"""

TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer.json with Qwen's special tokens and a template of its form."""
    folder = tmp_path_factory.mktemp("qwen")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    model.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """A folder of modules that worker processes find too."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "adder.py").write_text(ADDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def pooled(modules):
    """Plays in a worker process."""
    with Stage(Declaration("adder:Adder"), {"goal": 6}, workers=1, deadline_s=1.0) as stage:
        yield stage


@pytest.fixture(scope="session")
def stage(modules):
    """Plays in this process."""
    with Stage(Declaration("adder:Adder", pooled=False), {"goal": 6}, deadline_s=5.0) as stage:
        yield stage


@pytest.fixture
def problems():
    return [Problem(i, f"Count {i}", "", "t") for i in range(2)]


def say(tokenizer, text, stop=True):
    """The tokens of a turn."""
    return np.array([*tokenizer.encode(text), *([tokenizer.eos_id] if stop else [])], np.int32)
