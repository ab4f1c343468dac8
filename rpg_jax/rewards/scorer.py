"""The reward of a completion: a weighted sum of parts. Accuracy, whether the answer is right, is kept apart."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rpg_jax.rewards import verifiers
from rpg_jax.rewards.callables import NOTHING, Handed, InProcess
from rpg_jax.rewards.extraction import extract_answer, merge_equal_answers
from rpg_jax.rewards.judge import Judge, Server
from rpg_jax.rewards.pool import WorkerPool
from rpg_jax.rewards.verdicts import CHANCE, FirstFailures, Task, Verdict

if TYPE_CHECKING:
    from rpg_jax.types import Turns  # loads JAX

_VOTES = 16  # problems whose answers are read and compared at once
_FIRST_SCORES = 1000  # a part of the first step of a large run, the first steps of a small one


class Scorable(Protocol):
    """The parts of a problem that a scorer reads: prompt, reference answer, and the name of the data set or task."""

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
      unshaped: f32[N], the same sum without the shaping terms (form and length); dynamic sampling reads it.
      accuracy: f32[N], 1 where the deciding part found the answer right, else 0; evaluation reads it.
      parts: f32[N] by part name, unweighted.
      errors: number of failed verdicts by kind of error, as "timeout" (all: `verdicts.KINDS`). The part of a failed
        verdict is a wrong answer's score. Failures of an environment are not counted here.
      failures: N items, the kind of error of the verdict that decides accuracy; None without an error.
      failed: N items, the kind of error if the machinery failed on a part or on the conversation (`verdicts.CHANCE`:
        "timeout", "crash", "memory", "unreachable", "status"); else None. The update trains on completions with None.
    """

    rewards: np.ndarray
    unshaped: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    errors: dict[str, int]
    failures: Sequence[str | None] = ()
    failed: Sequence[str | None] = ()


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """Scores completions. Close the scorer, or use it as a context, to end its worker processes and threads.

    Parts that judge an answer: "exact", "math_dapo", "boxed", "math_verify", "gsm8k", "countdown", "judge", "by_source"
    (the verifier of each problem's data set), "module:function" (a user's own), and "environment" (the sum that an
    environment has paid for the turns). Shaping terms: "format", "length" and "overlong".

    Args:
      reward: one part, or {part: weight}.
      options: keyword arguments by part, e.g. {"overlong": {"limit": 2048, "buffer": 512}}.
      workers: number of processes for verifiers that need processes; None: one per CPU, at most 8.
      deadline_s: seconds that a verifier in a process, or an async function, may take for one completion.
      accuracy: the part that decides accuracy; None: the first verifier.
      right_above: a completion is right if the deciding score is above this number; None: if the score is at least 1.
      begins: without `right_above`, a grade (neither 1, 0 nor -1) among the first 1,000 scores is an error. False, for
        a run that goes on: the grade is noted once on standard error, and a score below 1 counts as wrong.
      handed: plain or async functions that run in this process, by part name, which has the form "module:function".
        Without an entry here, a part of this form is imported and runs in the worker processes.

    Raises:
      ValueError: as `verifiers.check` does; and if a function cannot be imported, or cannot be called with the strings
        (completion, answer, prompt) or (completion, answer).
      ChildProcessError: as `pool.WorkerPool.run` does.
    """

    def __init__(
        self,
        reward: str | Mapping[str, float],
        *,
        options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        workers: int | None = None,
        deadline_s: float = 10.0,
        accuracy: str | None = None,
        right_above: float | None = None,
        begins: bool = True,
        handed: Handed = NOTHING,
    ):
        weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        verifiers.check(weights, options, accuracy=accuracy, right_above=right_above)
        self._weights = weights
        self._options = {name: dict(options.get(name, {})) for name in weights}
        self._accuracy, self._right_above = verifiers.deciding_part(weights, accuracy), right_above
        self._grades_refused = _FIRST_SCORES if begins else 0  # scores to come among which a grade is an error
        self._grade_noted = False
        self._judge = Judge(Server(**self._options[verifiers.JUDGE])) if verifiers.JUDGE in weights else None
        judging = [*filter(verifiers.is_verifier, weights)]
        self._first = {name: FirstFailures(f"the reward {name!r}", "completion") for name in judging}
        self._named = {name: verifiers.resolve(name, handed) for name in weights}
        by_source = verifiers.VERIFIERS.values() if verifiers.BY_SOURCE in weights else ()
        known = [f for f in (*self._named.values(), *by_source) if f]
        pooled = [f for f in known if f.pooled]
        functions = {f.path: f.arguments for f in pooled}
        functions |= {f.read: ("completion",) for f in pooled if f.read}
        functions |= {f.equal: ("one", "other") for f in pooled if f.equal}
        self._pool = WorkerPool(functions, size=workers, deadline_s=deadline_s)
        self._in_process = InProcess({f.path: f.load() for f in known if not f.pooled}, deadline_s)
        if any(f.pooled for f in self._named.values() if f):
            self._pool.wait_ready()

    def __call__(
        self,
        problems: Sequence[Scorable],
        texts: Sequence[str],
        lengths: Sequence[int],
        turns: Sequence[Turns | None] | None = None,
    ) -> Scores:
        """Scores N completions, and waits for the verdicts.

        Args:
          problems: N, the problem of each completion; completions of one prompt repeat it.
          texts: N decoded completions, without special tokens; of a conversation the policy's last turn.
          lengths: i32[N] tokens that the policy has sampled, stop tokens included.
          turns: N items, what an environment answered to the turns; None without an environment.

        Raises:
          ValueError: the arguments differ in length, "by_source" meets an unknown source, "environment" a completion
            without turns, a verifier has failed on all completions of its first 16 problems, or a grade (neither 1, 0
            nor -1) is among the first 1,000 scores that decide accuracy, without `right_above` and with `begins`.
          ChildProcessError: as `pool.WorkerPool.run` does.
        """
        sizes = [len(x) for x in (problems, texts, lengths, turns) if x is not None]
        if len(set(sizes)) > 1:
            raise ValueError(f"problems, texts, lengths and turns must be of one length, got {sizes}")
        failures: dict[str, list[str | None]] = {}
        parts = {}
        for name in self._weights:
            parts[name], failures[name] = self._part(name, problems, texts, np.asarray(lengths), turns)
        own = (kinds for name, kinds in failures.items() if name != verifiers.ENVIRONMENT)
        errors = collections.Counter(kind for kinds in own for kind in kinds if kind)
        rewards, unshaped = np.zeros((2, len(texts)), np.float32)
        for name, weight in self._weights.items():
            rewards += np.float32(weight) * parts[name]
            if verifiers.is_verifier(name):
                unshaped += np.float32(weight) * parts[name]
        if self._right_above is None:
            verdicts = zip(parts[self._accuracy], failures[self._accuracy], strict=True)
            self._check_for_grades([score for score, kind in verdicts if not kind])
        deciding, above = parts[self._accuracy], self._right_above
        right = deciding >= 1 if above is None else deciding > above
        right[[kind is not None for kind in failures[self._accuracy]]] = False
        played = [turns and turns.error for turns in turns or [None] * len(texts)]
        kinds = zip(played, *filter(None, failures.values()), strict=True)
        failed = [next((kind for kind in own if kind in CHANCE), None) for own in kinds]
        accuracy = right.astype(np.float32)
        return Scores(rewards, unshaped, accuracy, parts, dict(errors), failures[self._accuracy], failed)

    def answers(self, problems: Sequence[Scorable], texts: Sequence[Sequence[str]]) -> list[list[str | None]]:
        """Returns the answers in the completions of P problems, for majority votes. Reads no reference answer.
        `texts` has for each problem the texts of its completions. The result has an answer in the place of each text,
        or None where none is found. The verifier that decides accuracy says how answers are read (`extract_answer`; for
        "math_verify", worker processes read and compare them, which takes time). Equal answers to a problem are the
        same text. Raises ValueError if "by_source" meets an unknown source; ChildProcessError as the pool does."""
        by_source = self._accuracy == verifiers.BY_SOURCE
        names = [verifiers.name_for_source(p.source) if by_source else self._accuracy for p in problems]
        threads = ThreadPoolExecutor(_VOTES)
        try:
            return list(threads.map(self._answers, names, texts))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Ends the worker processes, the event loop and the requests to a judge."""
        self._pool.close()
        if self._judge is not None:
            self._judge.close()
        self._in_process.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _part(
        self, name: str, problems, texts, lengths: np.ndarray, turns: Sequence[Turns | None] | None
    ) -> tuple[np.ndarray, list[str | None]]:
        """Returns a part's scores f32[N], and the kind of failure of each verdict; [] for shaping terms."""
        options = self._options[name]
        if name in verifiers.LENGTHS:
            return verifiers.LENGTHS[name](lengths, **options), []
        if name in verifiers.FORMS:
            return np.array([verifiers.FORMS[name](text, **options) for text in texts], np.float32), []
        if name == verifiers.ENVIRONMENT:
            played = [each for each in turns or () if each is not None]
            if len(played) < len(texts):
                raise ValueError(
                    "the reward 'environment' needs completions that an environment played: set environment.name"
                )
            return np.array([total_reward(each) for each in played], np.float32), [each.error for each in played]
        named = self._named[name]
        chosen = [named or verifiers.VERIFIERS[verifiers.name_for_source(p.source)] for p in problems]
        if name == verifiers.JUDGE:
            assert self._judge is not None
            verdicts = self._judge.run([(text, p.answer, p.prompt) for p, text in zip(problems, texts, strict=True)])
        else:
            verdicts = self._verdicts(chosen, problems, texts, options)
        self._first[name].look(((p.prompt, p.answer) for p in problems), verdicts)
        scores = [f.wrong if v.score is None else v.score for f, v in zip(chosen, verdicts, strict=True)]
        return np.array(scores, np.float32), [v.error for v in verdicts]

    def _verdicts(self, chosen: Sequence[verifiers.Verifier], problems, texts, options) -> list[Verdict]:
        tasks = [
            Task(f.path, (text, p.answer, p.prompt) if f.sees_prompt else (text, p.answer), options)
            for f, p, text in zip(chosen, problems, texts, strict=True)
        ]
        pooled = iter(self._pool.run([task for f, task in zip(chosen, tasks, strict=True) if f.pooled]))
        own = iter(self._in_process.run([task for f, task in zip(chosen, tasks, strict=True) if not f.pooled]))
        return [next(pooled if f.pooled else own) for f in chosen]

    def _answers(self, name: str, texts: Sequence[str]) -> list[str | None]:
        """Returns the answers that a verifier reads in a problem's completions. Equal answers have one spelling."""
        verifier = verifiers.VERIFIERS.get(name)
        if verifier is None or not verifier.equal:
            return [extract_answer(text, name) for text in texts]
        found = self._pool.run([Task(verifier.read, (text,), returns="object") for text in texts])
        answers = [(verdict.value or {}).get("answer") or None for verdict in found]

        def equal(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
            verdicts = self._pool.run([Task(verifier.equal, pair) for pair in pairs])
            return [None if verdict.score is None else verdict.score == 1 for verdict in verdicts]

        return merge_equal_answers(answers, texts, equal)

    def _check_for_grades(self, scores: Sequence[float]) -> None:
        """Looks for grades, which are neither right nor wrong without `right_above`. A grade among the first scores
        raises ValueError. A later one is noted once: a run does not end for one rare score after hundreds of steps."""
        grade = next((score for score in scores if score not in (-1, 0, 1)), None)
        if grade is None or self._grade_noted:
            self._grades_refused -= len(scores)
            return
        part = f"the reward {self._accuracy!r} decides accuracy, and its score {grade:.3g}"
        found = f"{part} is neither right (1) nor wrong (0, -1)"
        if self._grades_refused > 0:
            raise ValueError(f"{found}: {verifiers.RIGHT_ABOVE}")
        self._grade_noted = True
        fix = f"A score below 1 counts as wrong; in another run {verifiers.RIGHT_ABOVE}"
        print(f"note: {found}. {fix}", file=sys.stderr)


def total_reward(turns: Turns) -> float:
    """Returns the sum of the turns' rewards, at most 0 if the environment has failed: failing never pays."""
    paid = float(np.sum(turns.rewards, dtype=np.float64))
    return paid if turns.error is None else min(paid, 0.0)
