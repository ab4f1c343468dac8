"""An environment of tests, and where it is played."""

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.environments.environment import Declaration
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


@pytest.fixture
def tokenizer(qwen_like):
    return qwen_like


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """A folder of modules that worker processes find too."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "adder.py").write_text(ADDER, encoding="utf-8")
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
