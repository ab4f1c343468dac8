"""The reward of a completion: a weighted sum of verifiers and shaping terms, with the accuracy kept apart."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rpg_jax.rewards.extraction import extract_answer
from rpg_jax.rewards.math_dapo import normalise
from rpg_jax.rewards.pool import WorkerPool
from rpg_jax.rewards.shaping import format_match, length_penalty, overlong_penalty
from rpg_jax.rewards.verdicts import LARGEST, BadScore, Task, Verdict, checked_score
from rpg_jax.rewards.verifiers import BY_SOURCE, VERIFIERS, Verifier, name_for_source, resolve

FORMS: dict[str, Callable[..., float]] = {"format": format_match}  # completion -> score
LENGTHS: dict[str, Callable[..., np.ndarray]] = {"length": length_penalty, "overlong": overlong_penalty}  # of i32[N]

# With fewer problems, all may happen to have reference answers that a verifier cannot read.
_FIRST_PROBLEMS = 16


class Scorable(Protocol):
    """The fields of a problem that a scorer reads."""

    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of N completions in the order given.

    Attributes:
      rewards: f32[N], Σ weight · part; advantages are computed from them.
      accuracy: f32[N], 1 where the verifier found the answer right, else 0; dynamic sampling and evaluation read it.
      parts: f32[N] by part name, unweighted.
      errors: number of failed verdicts by kind (one of `verdicts.KINDS`); they count as wrong.
      failures: N, the kind of error of the verdict that decides accuracy, or None.
    """

    rewards: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    errors: dict[str, int]
    failures: Sequence[str | None] = ()


def make_scorer(
    reward: str | Mapping[str, float],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    workers: int | None = None,
    deadline_s: float = 10.0,
) -> Scorer:
    """The scorer for one part name, or for {part name: weight}.

    Parts are the verifiers, "by_source" (each problem's own), "module:function" (a user's own), "format", "length"
    and "overlong". The first verifier named decides accuracy.

    Args:
      reward: the part or parts.
      options: keyword arguments by part, e.g. {"overlong": {"limit": 2048, "buffer": 512}}.
      workers: number of processes for the verifiers that need them; by default one per CPU, at most 8.
      deadline_s: seconds such a verifier may take for one completion.

    Raises:
      ValueError: a part or an option is unknown, an option is missing or out of its range, there is no verifier, or a
        function cannot be imported or cannot be called as `verifiers.resolve` says.
    """
    weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
    check(weights, options or {})
    return Scorer(weights, options or {}, workers=workers, deadline_s=deadline_s)


def check(weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises as `make_scorer` does, but starts no process and therefore does not check a user's own functions."""
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
    if not any(map(_is_verifier, weights)):
        raise ValueError(f"no verifier among {list(weights)}, so nothing measures accuracy: add one of {[*VERIFIERS]}")


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """Scores completions; made by `make_scorer`. Close it, or use it as a context, to end its worker processes."""

    def __init__(self, weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]], *, workers, deadline_s):
        self._weights = dict(weights)
        self._options = {name: dict(options.get(name, {})) for name in weights}
        verifiers = [*filter(_is_verifier, weights)]
        self._accuracy = verifiers[0]
        self._failed: dict[str, set[tuple[str, str]]] = {name: set() for name in verifiers}  # until a success
        self._pool_arguments = {"size": workers, "deadline_s": deadline_s}
        self._pool: WorkerPool | None = None
        if any(v.pooled for v in map(resolve, weights) if v):
            self._start_pool().wait_ready()

    def __call__(
        self, problems: Sequence[Scorable], texts: Sequence[str], finish_reasons: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Scores N completions.

        Args:
          problems: N, the problem of each completion (repeated within its group).
          texts: N decoded completions, without special tokens.
          finish_reasons: N, "stop" or "length".
          lengths: i32[N] completion tokens, stop token included.

        Raises:
          ValueError: the four arguments differ in length, "by_source" meets an unknown source, or a verifier has failed
            on all completions of its first problems.
        """
        sizes = [len(x) for x in (problems, texts, finish_reasons, lengths)]
        if len(set(sizes)) > 1:
            raise ValueError(f"problems, texts, finish reasons and lengths must be of one length, got {sizes}")
        failures: dict[str, list[str | None]] = {}
        parts = {
            name: self._part(name, problems, texts, np.asarray(lengths), failures.setdefault(name, []))
            for name in self._weights
        }
        errors = collections.Counter(kind for kinds in failures.values() for kind in kinds if kind)
        rewards = np.zeros(len(texts), np.float32)
        for name, weight in self._weights.items():
            rewards += np.float32(weight) * parts[name]
        accuracy = (parts[self._accuracy] > 0).astype(np.float32)
        return Scores(rewards, accuracy, parts, dict(errors), failures[self._accuracy])

    def answers(self, problems: Sequence[Scorable], texts: Sequence[str], right: Sequence[bool]) -> list[str | None]:
        """The answers of N completions, as the verifier that decides accuracy compares them; None if it finds none.

        Under `math_verify`, all right answers to a problem count as one answer, however they are written.
        """
        found = []
        for problem, text, is_right in zip(problems, texts, right, strict=True):
            name = name_for_source(problem.source) if self._accuracy == BY_SOURCE else self._accuracy
            same = is_right and name == "math_verify"
            found.append(normalise(problem.answer) if same else extract_answer(text, name))
        return found

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _part(self, name: str, problems, texts, lengths: np.ndarray, failures: list) -> np.ndarray:
        options = self._options[name]
        if name in LENGTHS:
            return LENGTHS[name](lengths, **options)
        if name in FORMS:
            return np.array([FORMS[name](text, **options) for text in texts], np.float32)
        named = resolve(name)
        verifiers = [named or VERIFIERS[name_for_source(p.source)] for p in problems]
        verdicts = self._verdicts(verifiers, problems, texts, options)
        self._expect_success(name, problems, verdicts)
        failures += [v.error for v in verdicts]
        scores = [f.wrong if v.score is None else v.score for f, v in zip(verifiers, verdicts, strict=True)]
        return np.array(scores, np.float32)

    def _expect_success(self, name: str, problems: Sequence[Scorable], verdicts: Sequence[Verdict]) -> None:
        """Raises a ValueError if a part has failed on every completion of its first `_FIRST_PROBLEMS` problems."""
        failed = self._failed.get(name)
        if failed is None:
            return
        if any(v.error is None for v in verdicts):
            del self._failed[name]
            return
        failed |= {(p.prompt, p.answer) for p in problems}
        if len(failed) >= _FIRST_PROBLEMS:
            first = verdicts[0]
            raise ValueError(
                f"the reward {name!r} has failed on every completion of its first {len(failed)} problems: "
                f"{first.error}{f' ({first.detail})' if first.detail else ''}"
            )

    def _verdicts(self, verifiers: Sequence[Verifier], problems, texts, options) -> list[Verdict]:
        tasks = [
            Task(f.path, (text, p.answer, p.prompt) if f.sees_prompt else (text, p.answer), options)
            for f, p, text in zip(verifiers, problems, texts, strict=True)
        ]
        pooled = [i for i, f in enumerate(verifiers) if f.pooled]
        verdicts = dict(zip(pooled, self._start_pool().run([tasks[i] for i in pooled]), strict=True)) if pooled else {}
        functions = {f.path: f.load() for f in set(verifiers) if not f.pooled}
        for i, task in enumerate(tasks):
            if i not in verdicts:
                verdicts[i] = _inline(functions[task.function], task)
        return [verdicts[i] for i in range(len(tasks))]

    def _start_pool(self) -> WorkerPool:
        if self._pool is None:
            named = [f for f in map(resolve, self._weights) if f]
            by_source = VERIFIERS.values() if BY_SOURCE in self._weights else ()
            functions = {f.path: f.arguments for f in (*named, *by_source) if f.pooled}
            self._pool = WorkerPool(functions, **self._pool_arguments)
        return self._pool


def _inline(function: Callable[..., float], task: Task) -> Verdict:
    try:
        return Verdict(checked_score(function(*task.arguments, **task.options)))
    except BadScore as error:
        return Verdict(None, "value", str(error))
    except Exception as error:  # a reference answer that the verifier cannot read
        return Verdict(None, "error", f"{type(error).__name__}: {error}")


def needs_answers(weights: Mapping[str, float]) -> bool:
    """Whether a part compares completions with reference answers. A part that sees the prompt may do without."""
    verifiers = {name: resolve(name) for name in weights if _is_verifier(name)}
    return any(verifier is None or not verifier.sees_prompt for verifier in verifiers.values())


def _is_verifier(name: str) -> bool:
    return name == BY_SOURCE or resolve(name) is not None


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    known = {**FORMS, **LENGTHS, BY_SOURCE: lambda: None}
    verifier = resolve(name)
    if name not in known and verifier is None:
        names = ", ".join([*VERIFIERS, *known, "module:function"])
        raise ValueError(f"unknown reward {name!r}; known: {names}")
    if verifier and verifier.pooled:
        return  # only an import of foreign code can tell
    parameters = inspect.signature(verifier.load() if verifier else known[name]).parameters.values()
    accepted = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(given) - set(accepted))
    missing = sorted(k for k, required in accepted.items() if required and k not in given)
    if unknown or missing:
        raise ValueError(f"reward {name!r}: unknown options {unknown}, missing {missing}; it takes {sorted(accepted)}")
