"""The verifiers by name, rewards for the form of a completion, and the checks of a reward's parts.

A new task is one file in this folder and one line in `VERIFIERS`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rpg_jax.rewards.callables import NOTHING, Handed, load
from rpg_jax.rewards.judge import Server
from rpg_jax.rewards.verdicts import LARGEST, REWARD, check_call


def _answer_line(text: str) -> bool:
    last = text.rstrip().rpartition("\n")[2]
    return last.startswith("Answer:") and len(last) > len("Answer:")


def _number(text: str) -> bool:
    before, mark, after = text.partition("#")
    return (after if mark else before).strip().removeprefix("-").removesuffix("-").isdecimal()


def _think(text: str) -> bool:
    before, _, after = text.partition("</think>")
    return before.startswith("<think>") and not (after == "" or after.isspace())


# Whether a whole completion has the form; each takes time linear in its length.
FORMATS: dict[str, Callable[[str], bool]] = {
    "answer_line": _answer_line,
    "boxed": lambda text: "\\boxed{" in text,
    "number": _number,
    "think": _think,
}


def format_match(completion: str, *, pattern: str = "answer_line") -> float:
    """Returns 1.0 if the completion has the form named `pattern`, else 0.0. "answer_line": the last line begins with
    "Answer:", and text follows. "boxed": the completion contains "\\boxed{". "number": the completion, or what follows
    its first "#", is a whole number, with or without a "-" before or after it. "think": the completion begins with
    "<think>", and text follows the first "</think>". Raises ValueError if the pattern is unknown."""
    if pattern not in FORMATS:
        raise ValueError(f"unknown format {pattern!r}; known: {', '.join(FORMATS)}")
    return float(FORMATS[pattern](completion))


def length_penalty(lengths: np.ndarray, *, limit: int) -> np.ndarray:
    """Returns -n / limit, f32[N]: from 0 to -1 within the limit of tokens, below -1 beyond. `lengths`, i32[N], has the
    number n of tokens of each completion. Raises ValueError if `limit` is below 1."""
    if limit < 1:
        raise ValueError(f"length limit must be >= 1 token, got {limit}")
    return -np.asarray(lengths, np.float32) / np.float32(limit)


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """Returns DAPO's soft overlong punishment, min(-(n - (L_max - B)) / B, 0) for a completion of n tokens, f32[N].

    It is 0 up to `limit - buffer` tokens, then falls linearly to -1 at `limit` tokens, and further beyond.

    Args:
      lengths: i32[N], tokens of N completions, stop token included.
      limit: L_max, tokens.
      buffer: B, tokens.

    Raises ValueError if the buffer is empty or longer than the limit.

    Source: arXiv:2503.14476 eq. 13; B = 512 at L_max = 2048 in arXiv:2505.17508.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer must be in [1, limit={limit}] tokens, got {buffer}")
    excess = np.asarray(lengths, np.float32) - np.float32(limit - buffer)
    return np.minimum(-excess / np.float32(buffer), np.float32(0))


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A function (completion, answer) -> score, or what takes its place, and how it is called.

    Attributes:
      path: "module:function".
      pooled: the function runs in processes that can be killed, because its code may hang, exhaust memory or execute
        its input. This package's other functions compare strings, in a time that the length of their input bounds.
      wrong: score of a wrong answer, and of an answer on which the verifier fails.
      sees_prompt: the function is offered the prompt, as its third argument.
      read, equal: "module:function" of two functions of the pool, which majority votes need where equal answers have no
        normal form. `read` takes a completion and returns {"answer": text or None}. `equal` takes two completions, and
        returns 1 if their answers are equal, else 0. "": `extraction.extract_answer` writes equal answers alike.
      function: the function that a Python program handed over under the name `path`; None: it is loaded from `path`.
    """

    path: str
    pooled: bool = False
    wrong: float = 0.0
    sees_prompt: bool = False
    read: str = ""
    equal: str = ""
    function: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that the function is offered: completion, answer and, if `sees_prompt`, prompt."""
        return REWARD if self.sees_prompt else REWARD[:2]

    def load(self) -> Callable[..., Any]:
        """Returns `function` if there is one, else the function imported from `path`. Raises as `callables.load`."""
        return load(self.path, "reward") if self.function is None else self.function


JUDGE, ENVIRONMENT = "judge", "environment"
"""The two verifiers of which no function is called. The judge asks a server, and its options are the fields of
`judge.Server`. Its scores say how good, so it needs `rewards.right_above` to decide accuracy. The environment's score
is the sum of its rewards for the turns."""
VERIFIERS = {
    "exact": Verifier("rpg_jax.rewards.extraction:exact"),
    "math_dapo": Verifier("rpg_jax.rewards.extraction:math_dapo", wrong=-1.0),
    "boxed": Verifier("rpg_jax.rewards.extraction:boxed"),
    "math_verify": Verifier(
        "rpg_jax.rewards.math_verify:math_verify",
        pooled=True,
        read="rpg_jax.rewards.math_verify:read",
        equal="rpg_jax.rewards.math_verify:equal",
    ),
    "gsm8k": Verifier("rpg_jax.rewards.extraction:gsm8k"),
    "countdown": Verifier("rpg_jax.rewards.expression:countdown"),
    JUDGE: Verifier("rpg_jax.rewards.judge:Judge", sees_prompt=True),
    ENVIRONMENT: Verifier("rpg_jax.rewards.scorer:total_reward", sees_prompt=True),
}

BY_SOURCE = "by_source"
"""The reward that takes the verifier of each problem from `SOURCES`, by `Problem.source`."""
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
FORMS: dict[str, Callable[..., float]] = {"format": format_match}
"""Shaping terms of a completion's text: text -> score."""
LENGTHS: dict[str, Callable[..., np.ndarray]] = {"length": length_penalty, "overlong": overlong_penalty}
"""Shaping terms of the lengths of completions: i32[N] -> f32[N]."""
RIGHT_ABOVE = (
    "add --config.rewards.right_above=0.5 (a score above 0.5 is right), or --config.rewards.accuracy=PART, a part that "
    "says right or wrong"
)


def resolve(name: str, handed: Handed = NOTHING) -> Verifier | None:
    """Returns the verifier called `name`, or that of a user's own "module:function"; None if `name` is neither.

    A user's function is called with the strings (completion, answer, prompt), or (completion, answer) if it takes two,
    and with its options as keywords. It returns a number: 1 is right, 0 and -1 are wrong, other numbers are grades. A
    function named by "module:function" is not imported here. It runs in a worker process, where it cannot write files,
    start processes or use the network. A function in `handed` runs in the Python program that handed the function
    over, and may do all of this. Raises ValueError if a function in `handed` takes other arguments.
    """
    if name in handed:
        function = handed[name]
        return Verifier(name, sees_prompt=check_call(function, name, REWARD) == len(REWARD), function=function)
    if ":" in name:
        return Verifier(name, pooled=True, sees_prompt=True)
    return VERIFIERS.get(name)


def paths(names: Iterable[str]) -> list[str]:
    """Returns the "module:function" of each verifier among the reward's parts `names`, sorted and without repetition.
    "by_source" stands for all of `VERIFIERS`. Shaping terms ("format", …) and unknown names are left out."""
    found = {v for name in names for v in (VERIFIERS.values() if name == BY_SOURCE else [resolve(name)]) if v}
    return sorted(verifier.path for verifier in found)


def name_for_source(source: str) -> str:
    """Returns the name of the verifier for problems of the data set or task `source`; "exact" for "reasoning_gym/…".
    Raises ValueError if the source is unknown."""
    if source.startswith("reasoning_gym/"):
        return "exact"
    if source not in SOURCES:
        raise ValueError(f"no verifier is known for source {source!r}; name one instead of 'by_source': {[*VERIFIERS]}")
    return SOURCES[source]


def check(
    weights: Mapping[str, float],
    options: Mapping[str, Mapping[str, Any]],
    *,
    accuracy: str | None = None,
    right_above: float | None = None,
) -> None:
    """Checks the parts of a reward before a `Scorer` is made. Starts no process, and imports no user's function.

    `weights` and `options` (keywords) are by the part's name. `accuracy` is the part that decides whether a completion
    is right (None: the first verifier): if its score is above `right_above` (None: at least 1). Raises ValueError if a
    part is unknown, an option is unknown, missing, out of its range or for a part without a weight, a weight is not
    within ±1e6, no part is a verifier, `accuracy` is not a verifier among the parts, or the judge decides accuracy
    without `right_above`. The values of the judge's options other than `url` and `prompt`, and the options of
    "math_verify" and "module:function", are not checked.
    """
    for name in {**weights, **options}:
        if name not in weights:
            raise ValueError(f"options for {name!r}, which is not among the rewards {list(weights)}")
        given = options.get(name, {})
        _check_options(name, given)
        if name in FORMS:
            FORMS[name]("", **given)
        if name in LENGTHS:
            LENGTHS[name](np.ones(1, np.int32), **given)
    for name, weight in weights.items():
        if not abs(weight) <= LARGEST:
            raise ValueError(f"the weight of the reward {name!r} must be a number within ±{LARGEST:g}, got {weight}")
    if not any(map(is_verifier, weights)):
        raise ValueError(f"no verifier among {list(weights)}, so nothing measures accuracy: add one of {[*VERIFIERS]}")
    if accuracy is not None and (accuracy not in weights or not is_verifier(accuracy)):
        raise ValueError(f"rewards.accuracy={accuracy!r} must be a verifier among the rewards {[*weights]}")
    if right_above is None and deciding_part(weights, accuracy) == JUDGE:
        raise ValueError(f"the reward {JUDGE!r} decides accuracy, and grades: {RIGHT_ABOVE}")


def deciding_part(weights: Mapping[str, float], accuracy: str | None) -> str:
    """Returns the part that decides accuracy: `accuracy`, or if None the first verifier; "" if there is none."""
    return accuracy or next(filter(is_verifier, weights), "")


def needs_answers(weights: Mapping[str, float]) -> bool:
    """Tells whether a part is sure to need reference answers: "by_source", or one of `VERIFIERS` other than "judge" and
    "environment". A user's "module:function" does not count: it may do without an answer."""
    verifiers = {name: resolve(name) for name in weights if is_verifier(name)}
    return any(verifier is None or not verifier.sees_prompt for verifier in verifiers.values())


def is_verifier(name: str) -> bool:
    """Tells whether `name` is "by_source", in `VERIFIERS`, or has the form "module:function". Imports nothing."""
    return name == BY_SOURCE or resolve(name) is not None


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    known = {**FORMS, **LENGTHS, BY_SOURCE: lambda: None}
    verifier = resolve(name)
    if name not in known and verifier is None:
        names = ", ".join([*VERIFIERS, *known, "module:function"])
        raise ValueError(f"unknown reward {name!r}; known: {names}")
    if verifier and verifier.pooled:
        return  # only an import of foreign code can tell
    function = Server if name == JUDGE else verifier.load() if verifier else known[name]
    parameters = inspect.signature(function).parameters.values()
    accepted = {p.name: p.default is p.empty for p in parameters if name == JUDGE or p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(given) - set(accepted))
    missing = sorted(k for k, required in accepted.items() if required and k not in given)
    if unknown or missing:
        raise ValueError(f"reward {name!r}: unknown options {unknown}, missing {missing}; it takes {sorted(accepted)}")
    if name == JUDGE:
        Server(**given)
