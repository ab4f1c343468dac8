"""A `Task` is one call of a function. Its `Verdict` is a score within bounds, a JSON object, or the kind of error."""

import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal

KINDS = ("timeout", "crash", "memory", "error", "value", "forbidden", "unreachable", "status")
"""The kinds of failure of a verdict. error: the function raised. value: it returned no score, see `checked_score`.

unreachable: a judge's server did not answer, or the function raised an OSError, as it does where it finds no server.
status: the server answered with an error of HTTP, or in a form that nobody asked for."""
CHANCE = frozenset({"timeout", "crash", "memory", "unreachable", "status"})
"""The kinds that machinery may cause. The same call may succeed another time, so nothing is known of the completion.

Under other kinds a completion is wrong: its text made the function raise, return no score or do what is forbidden."""
LARGEST = 1e6  # the largest |score|: sums over a group and their squares stay far inside float32
LARGEST_OBJECT = 2**20  # bytes of an object's JSON
_FIRST_PROBLEMS = 16  # of fewer, all may by chance be unreadable for a verifier or an environment


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of `function`: "module:function", or "module:Class.method" of an object that a worker process has made.
    `arguments` are positional, `options` keywords, all JSON. It `returns` a number ("score") or a dict ("object")."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    returns: Literal["score", "object"] = "score"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a task: one of `score`, `value` and `error` is set, and the others are None. `score` is a finite
    number within ±1e6, `value` a dict of plain JSON, `error` one of `KINDS`, and `detail` says more about it."""

    score: float | None
    error: str | None = None
    detail: str = ""
    value: dict[str, Any] | None = None


def failure(error: BaseException) -> Verdict:
    """Returns the verdict of a function that raised `error`. The kind is "value" for BadScore, "memory" for
    MemoryError, "timeout" for TimeoutError, "unreachable" for another OSError, else "error". The detail is one line of
    at most 200 characters: the class of the error and its message, which a class of one's own may fail to write."""
    try:
        said = " ".join(str(error).split())
    except (Exception, SystemExit):
        said = "its message cannot be read"
    kinds = {BadScore: "value", MemoryError: "memory", TimeoutError: "timeout", OSError: "unreachable"}
    kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), "error")
    return Verdict(None, kind, (said if kind == "value" else f"{type(error).__name__}: {said}")[:200])


class FirstFailures:
    """Notices that a reward or an environment fails: on everything, or on some. Several threads may use it. In the
    messages `what` names the reward or environment, and `unit` what one verdict judges: "completion" or "turn"."""

    def __init__(self, what: str, unit: str):
        self._what, self._unit = what, unit
        self._failed: set[Hashable] | None = set()
        self._noted = False

    def look(self, problems: Iterable[Hashable], verdicts: Sequence[Verdict]) -> None:
        """Notes verdicts, and the keys of the problems that they belong to. A success is a verdict without an error.
        Raises ValueError if at least 16 distinct problems were seen without a success. Once there is a success, prints
        the next failure on stderr, and no further failure."""
        failures = [verdict for verdict in verdicts if verdict.error is not None]
        if len(failures) < len(verdicts):
            self._failed = None
        if not failures or self._noted:
            return
        said, failed = f"{failures[0].error} ({failures[0].detail})".removesuffix(" ()"), self._failed
        if failed is None:
            self._noted = True
            print(f"note: {self._what} has failed on a {self._unit}: {said}; others are only counted", file=sys.stderr)
            return
        failed.update(problems)
        if len(failed) >= _FIRST_PROBLEMS:
            every = f"every {self._unit} of its first {len(failed)} problems"
            raise ValueError(f"{self._what} has failed on {every}: {said}")


REWARD = ("completion", "answer", "prompt")
"""The names of the arguments of a user's reward, in their order."""


class BadScore(ValueError):
    """A function returned something else than the score or the object that the task asks for."""


def checked(returns: Literal["score", "object"], value: Any) -> Verdict:
    """Returns the verdict of a function that returned `value`. Raises BadScore if `value` is not what `returns` asks
    for: "score", a finite number within ±1e6, or "object", a dict of plain JSON of at most 1 MiB."""
    return Verdict(checked_score(value)) if returns == "score" else Verdict(None, value=checked_object(value))


def checked_score(value: Any) -> float:
    """Returns the score as a float. Raises BadScore for anything but one number, for NaN, and beyond ±1e6."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise BadScore(f"a score is a number, got {type(value).__name__}")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several numbers, a whole number of 400 digits
        raise BadScore(f"a score is one number: {error}") from error
    if not (math.isfinite(score) and abs(score) <= LARGEST):
        raise BadScore(f"a score is within ±{LARGEST:g}, got {score}")
    return score


def checked_object(value: Any) -> dict[str, Any]:
    """Returns `value` itself. Raises BadScore if `value` is no dict, or no JSON of at most 1 MiB. NaN is not JSON."""
    if not isinstance(value, dict):
        raise BadScore(f"an object is a dict, got {type(value).__name__}")
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadScore(f"an object is plain JSON: {error}") from error
    if size > LARGEST_OBJECT:
        raise BadScore(f"an object has at most {LARGEST_OBJECT} bytes of JSON, got {size}")
    return value


def check_call(function: Callable[..., Any], path: str, arguments: Sequence[str]) -> int:
    """Returns how many of `arguments`, counted from the first, a call of `function` gets.

    `arguments` are the names of the positional arguments that a call offers. All are given, with one exception. If they
    are completion, answer and prompt, a function without *args does not get the prompt if it has two positional
    arguments, or if its third has a default and another name than "prompt". Keyword-only arguments do not count.
    A function without a signature, as some builtin functions are, gets all. `path`, "module:function", is for messages.

    Raises ValueError if the function cannot be called so, if its `completion` or `prompt` stands in another place, or
    if it would get a text as `completions` or `prompts`: it would expect lists, as TRL's rewards do.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtin functions have none
        return len(arguments)
    given = signature.parameters.values()
    options = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
    is_reward, asked = tuple(arguments) == REWARD, arguments
    if is_reward and not any(p.kind is p.VAR_POSITIONAL for p in given):
        third = [p for p in given if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD][2:3]
        needs_prompt = third and (third[0].default is inspect.Parameter.empty or third[0].name == REWARD[2])
        asked = arguments if needs_prompt else arguments[:2]
    try:
        for own, gets in zip(signature.bind(*asked, **options).arguments, asked, strict=False):
            if own != gets and own.removesuffix("s") in ("completion", "prompt"):
                raise TypeError(f"its {own!r} would be the {gets}")
        return len(asked)
    except TypeError as error:
        name = path.partition(":")[2]
        called = f"{name}({', '.join(arguments)})" + f" or {name}({', '.join(REWARD[:2])})" * is_reward
        raise ValueError(f"{path} is called as {called}, with strings, and is {name}{signature}: {error}") from error
