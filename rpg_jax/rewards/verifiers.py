"""The verifiers by name, and the verifier of each data source. A new task is one file here and one line."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rpg_jax.rewards.loading import load


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A function (completion, answer) -> score. Right is 1, or where it is set a score above `rewards.right_above`.

    Attributes:
      path: "module:function".
      pooled: it runs in processes that can be killed, because its code may hang, exhaust memory or execute its input.
        Other verifiers only compare strings, in a time that the length of their input bounds.
      wrong: score of a wrong answer, and of an answer on which the verifier fails.
      sees_prompt: the function also takes the prompt, as its third argument.
      remote: a server is asked, see `judge.Judge`; its options are the fields of `judge.Server`.
      graded: its scores say how good, not right or wrong: to decide accuracy it needs `rewards.right_above`.
      played: nothing is called: an environment has paid for the turns of the completion, see `played`.
      read, equal: where equality has no normal form, "module:function" of two more functions of the pool: the answer
        of a completion as {"answer": text or None}, and 1 if two completions have equal answers, else 0.
      function: what a Python program handed over under the name `path`; None is loaded from `path`.
    """

    path: str
    pooled: bool = False
    wrong: float = 0.0
    sees_prompt: bool = False
    remote: bool = False
    graded: bool = False
    played: bool = False
    read: str = ""
    equal: str = ""
    function: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the function's arguments, all strings."""
        return ("completion", "answer", "prompt") if self.sees_prompt else ("completion", "answer")

    def load(self) -> Callable[..., Any]:
        return load(self.path, "reward") if self.function is None else self.function


JUDGE, ENVIRONMENT = "judge", "environment"
VERIFIERS = {
    "exact": Verifier("rpg_jax.rewards.exact:exact"),
    "math_dapo": Verifier("rpg_jax.rewards.math_dapo:math_dapo", wrong=-1.0),
    "boxed": Verifier("rpg_jax.rewards.boxed:boxed"),
    "math_verify": Verifier(
        "rpg_jax.rewards.math_verify:math_verify",
        pooled=True,
        read="rpg_jax.rewards.math_verify:read",
        equal="rpg_jax.rewards.math_verify:equal",
    ),
    "gsm8k": Verifier("rpg_jax.rewards.gsm8k:gsm8k"),
    "countdown": Verifier("rpg_jax.rewards.expression:countdown"),
    JUDGE: Verifier("rpg_jax.rewards.judge:Judge", sees_prompt=True, remote=True, graded=True),
    ENVIRONMENT: Verifier("rpg_jax.rewards.played:total", sees_prompt=True, played=True),
}

# The reward that takes each problem's verifier from this table, by `Problem.source`.
BY_SOURCE = "by_source"
SOURCES = {
    "arithmetic": "exact",
    "chains": "exact",
    "math_dapo": "math_dapo",
    "math-dapo": "math_dapo",
    "aime2024": "math_dapo",
    "aime2025": "math_dapo",
    "amc_23": "math_dapo",
    "math500": "math_verify",
    "minerva": "math_verify",
    "olympiadbench": "math_verify",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "countdown": "countdown",
}


Functions = Mapping[str, Callable[..., Any]]
NO_FUNCTIONS: Functions = MappingProxyType({})


def resolve(name: str, functions: Functions = NO_FUNCTIONS) -> Verifier | None:
    """The verifier called `name`, or a user's own function "module:function"; None if it is neither.

    A user's function gets (completion, answer, prompt) as strings and its options as keywords, and returns a number
    as `Verifier` says. It runs in the worker pool: no files written, no processes, no network. One of
    `functions`, which a Python program handed over under its name, runs in that program and may do all of this.
    """
    if name in functions:
        return Verifier(name, sees_prompt=True, function=functions[name])
    if ":" in name:
        return Verifier(name, pooled=True, sees_prompt=True)
    return VERIFIERS.get(name)


def name_for_source(source: str) -> str:
    """The name of the verifier for problems of `source`; reasoning-gym's tasks ("reasoning_gym/…") compare exactly.

    Raises:
      ValueError: the source is unknown.
    """
    if source.startswith("reasoning_gym/"):
        return "exact"
    if source not in SOURCES:
        raise ValueError(f"no verifier is known for source {source!r}; name one instead of 'by_source': {[*VERIFIERS]}")
    return SOURCES[source]
