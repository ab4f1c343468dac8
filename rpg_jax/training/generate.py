"""From problems to scored groups: completed groups are decoded and scored while the rollout generates others."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from rpg_jax.data import Group, Problem
from rpg_jax.data.groups import groups_from_bytes, groups_to_bytes, last_turn, shown, unscored
from rpg_jax.environments.player import Player
from rpg_jax.parallel import hosts
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rollout import GroupJournal, Request, Rollout, Split, Start
from rpg_jax.training.heartbeat import beat
from rpg_jax.types import Completion, Sampling

_BETWEEN_DRAWS = 0x9E3779B1  # far from the small numbers that people choose as seeds


@dataclasses.dataclass(frozen=True)
class Part:
    """The share of one call in a group that several steps draw.

    Attributes:
      group: without scores, with its completions so far.
      step, draw: choose the random numbers: the step that trains the group, and how often it had the problem before.
      max_tokens: the most tokens of a completion after the call; 0 before the call is known.
      index: the number of the completion that goes on. None: the group begins.
    """

    group: Group
    step: int
    draw: int
    max_tokens: int = 0
    index: int | None = None

    @property
    def begun(self) -> Completion | None:
        """The completion that goes on; None where the group begins."""
        return None if self.index is None else self.group.completions[self.index]

    @property
    def tokens(self) -> np.ndarray:
        """i32[n], the tokens of `begun`; empty where the group begins."""
        return np.zeros(0, np.int32) if self.begun is None else self.begun.tokens

    def followed_by(self, drawn: list[Completion]) -> list[Completion]:
        """Returns `drawn`, the completions of a call, with the tokens of `begun` in front if a completion goes on."""
        return drawn if self.begun is None else [self.begun.followed_by(one) for one in drawn]


class GroupGenerator:
    """Generates and scores one group a problem.

    A completion's random numbers depend on (seed, step, draw, prompt, index) only. So a prompt that occurs twice in a
    step needs two draws.

    Processes divide the prompts as the rollout says (`Split`). A process scores the groups that it samples, or every
    n-th group if all n sample together. All processes get all groups, in order. A complete or scored group is a
    heartbeat. `encode` makes a problem's prompt, i32[n]; `decode` makes text of token ids. `play` makes the environment
    of a request from its problems. Groups that `journal` has are not sampled again, but scored again.
    `by_length`: the prompts whose completions were longest in earlier calls begin first. `rollout` and `scorer` are
    attributes too.
    """

    def __init__(
        self,
        rollout: Rollout,
        encode: Callable[[Problem], np.ndarray],
        decode: Callable[[Sequence[int]], str],
        scorer: Scorer,
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        play: Callable[[Sequence[Problem]], Player] | None = None,
        journal: GroupJournal | None = None,
        by_length: bool = True,
    ):
        self._play, self._journal, self._by_length = play, journal, by_length
        self.rollout, self.encode, self._decode, self.scorer = rollout, encode, decode, scorer
        self._group_size, self._sampling, self._seed = group_size, sampling, seed
        self._errors: collections.Counter[str] = collections.Counter()
        self._lengths: dict[int, float] = {}  # tokens of a mean completion, by prompt_id: the same on all hosts

    def __call__(
        self, problems: Sequence[Problem], *, step: int, draw: int = 0, group_size: int | None = None
    ) -> list[Group]:
        """The scored group of each problem, in order, on every process; blocks. All processes give the same problems.

        `step` and `draw` choose the random numbers. `group_size` None: the generator's. Raises the errors of
        `Rollout.generate`, of the scorer, and of an environment that cannot be made or always fails.
        """
        split = self.rollout.split
        places: Sequence[int] = range(len(problems))
        if split is Split.SHARE:
            places = hosts.share(places)
        asked = [problems[place] for place in places]
        prompts = [self.encode(p) for p in asked]
        scored = hosts.share(range(len(asked))) if split is Split.TOGETHER else range(len(asked))
        player = self._play(asked) if self._play else None
        with _Scoring(self, asked, prompts, set(scored)) as scoring:
            request = Request(
                prompts,
                prompt_ids=[p.prompt_id for p in asked],
                group_size=group_size or self._group_size,
                sampling=self._sampling,
                seed=self._seed_of(draw),
                step=step,
                on_group=scoring.add,
                expected=[self._lengths.get(p.prompt_id) for p in asked],
                environment=player,
            )
            self.rollout.generate(request, self._journal)
            if player is not None:
                player.check()
        made, errors = scoring.result()
        return self._noted(self._joined({places[i]: group for i, group in made.items()}, errors))

    def draw(self, parts: Sequence[Part], *, step: int) -> list[list[Completion]]:
        """Draws the next tokens of each part. Returns each part's completions, with the tokens of earlier calls: all of
        a group that begins, or the one that goes on. `step` is the present step: the journal keeps the groups of a step
        together. Blocks; all processes call it with the same parts. Raises the errors of `Rollout.generate`."""
        split, places = self.rollout.split, list(range(len(parts)))
        places = hosts.share(places) if split is Split.SHARE else places
        own = [parts[place] for place in places]
        lengths = [self._lengths.get(part.group.problem.prompt_id) for part in own]
        request = Request(
            [np.concatenate([part.group.prompt, part.tokens]) for part in own],
            prompt_ids=[part.group.problem.prompt_id for part in own],
            group_size=self._group_size,
            sampling=self._sampling,
            seed=self._seed,
            step=step,
            on_group=lambda *_: beat(),
            expected=[n and max(n - len(part.tokens), 1.0) for n, part in zip(lengths, own, strict=True)],
            starts=[
                Start(self._seed_of(part.draw), part.step, part.max_tokens, part.index, len(part.tokens))
                for part in own
            ],
        )
        drawn = zip(places, own, self.rollout.generate(request, self._journal), strict=True)
        made = {place: unscored(part.group.problem, part.group.prompt, new) for place, part, new in drawn if new}
        groups = [*made.values()] if split is Split.TOGETHER else self._joined(made, {})
        return [part.followed_by(group.completions) for part, group in zip(parts, groups, strict=True)]

    def judge(self, groups: Sequence[Group]) -> list[Group]:
        """Returns `groups` with scores. All processes call it with the same groups, and all get all scores. Blocks."""
        own = hosts.share(range(len(groups)))
        with _Scoring(self, [g.problem for g in groups], [g.prompt for g in groups], set(own)) as scoring:
            for place in own:
                scoring.add(place, groups[place].completions)
        return self._noted(self._joined(*scoring.result()))

    def _noted(self, groups: list[Group]) -> list[Group]:
        """Notes the groups' mean lengths, by which later calls order their prompts; returns the groups."""
        for group in groups if self._by_length else ():
            self._lengths[group.problem.prompt_id] = float(np.mean([len(c.tokens) for c in group.completions]))
        return groups

    def _seed_of(self, draw: int) -> int:
        return (self._seed + draw * _BETWEEN_DRAWS) % 2**32

    def _joined(self, own: dict[int, Group], errors: dict[str, int]) -> list[Group]:
        """Counts the failed verdicts `errors` of all processes, and returns their groups in the order of the problems.
        `own` are this process's groups by the places of their problems, in order. All processes call it."""
        if jax.process_count() == 1:
            self._errors.update(errors)
            return [*own.values()]
        places = list[int]()
        for said in self.rollout.exchange(json.dumps([errors, [*own]]).encode()):
            counted, at = json.loads(said)
            self._errors.update(counted)
            places += at
        parts = [groups_from_bytes(packed) for packed in self.rollout.exchange(groups_to_bytes([*own.values()]))]
        groups = zip(places, itertools.chain.from_iterable(parts), strict=True)
        return [group for _, group in sorted(groups, key=operator.itemgetter(0))]

    def score(
        self, problems: Sequence[Problem], prompts: Sequence[np.ndarray], completions: Sequence[list[Completion]]
    ) -> tuple[list[Group], dict[str, int]]:
        """Scores the completions of each problem in this process. `prompts` are token ids, i32[n] each. Returns (groups
        in order, number of failed verdicts by kind). Raises the errors of the scorer."""
        flat = [c for group in completions for c in group]
        texts = [shown(c, self._decode) for c in flat]
        scores = self.scorer(
            [p for p, group in zip(problems, completions, strict=True) for _ in group],
            [last_turn(c, self._decode) if c.turns else text for c, text in zip(flat, texts, strict=True)],
            [int(c.sampled.sum()) for c in flat],
            [c.turns for c in flat],
        )
        rewards = np.asarray(scores.rewards, np.float32)
        unshaped = np.asarray(scores.unshaped, np.float32)
        accuracy = np.asarray(scores.accuracy, np.float32)
        parts = np.stack([*scores.parts.values()], -1)
        scored, first = [], 0
        for problem, prompt, group in zip(problems, prompts, completions, strict=True):
            own = slice(first, first := first + len(group))
            known = scores.failures[own], parts[own], unshaped[own], scores.failed[own]
            scored.append(Group(problem, prompt, group, texts[own], rewards[own], accuracy[own], None, *known))
        return scored, dict(scores.errors)

    def take_errors(self) -> dict[str, int]:
        """Returns the number of failed verdicts by kind, of all processes, since the last call. Not a collective."""
        taken, self._errors = dict(self._errors), collections.Counter()
        return taken


class _Scoring(contextlib.AbstractContextManager["_Scoring"]):
    """Scores the groups of one call in a thread, all complete groups at a time. Leaving the context waits for scores.
    While a verifier hangs, the rollout goes on, and the groups that become complete are the next batch of scores. If a
    verdict has failed by chance, the verifier is asked once more, after all other verdicts. Only groups at the places
    `mine` are scored."""

    def __init__(
        self, generator: GroupGenerator, problems: Sequence[Problem], prompts: Sequence[np.ndarray], mine: set[int]
    ):
        self._generator, self._problems, self._prompts, self._mine = generator, problems, prompts, mine
        self._complete: collections.deque[tuple[int, list[Completion]]] = collections.deque()
        self._thread = ThreadPoolExecutor(1, "scoring")
        self._looks: list[Future[None]] = []
        self._groups: dict[int, Group] = {}
        self._errors: collections.Counter[str] = collections.Counter()

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)

    def add(self, place: int, completions: list[Completion]) -> None:
        beat()
        if place in self._mine:
            self._complete.append((place, completions))
            self._looks.append(self._thread.submit(self._score_complete))

    def result(self) -> tuple[dict[int, Group], dict[str, int]]:
        """Scored groups by the places of their problems, in order, and the number of failed verdicts by kind. Called
        once, after the context. Raises the error that scoring raised. A verdict that has failed twice counts twice."""
        for look in self._looks:
            look.result()
        self._ask_again()
        return dict(sorted(self._groups.items())), dict(self._errors)

    def _ask_again(self) -> None:
        """Scores completions once more if a verifier or a judge has failed on them by chance. A conversation that
        failed is left out: its environment was asked twice (see `Stage.step`), its rollout is over."""
        failed = {
            place: np.flatnonzero(~group.judged & [c.turns is None or c.turns.error is None for c in group.completions])
            for place, group in self._groups.items()
        }
        places = [place for place, members in sorted(failed.items()) if members.size]
        if not places:
            return
        completions = [[self._groups[place].completions[i] for i in failed[place]] for place in places]
        again = self._scored(places, completions)
        self._groups |= {place: self._groups[place].rescored(failed[place], group) for place, group in again.items()}

    def _score_complete(self) -> None:
        batch = [self._complete.popleft() for _ in range(len(self._complete))]
        if not batch:
            return
        places, completions = zip(*batch, strict=True)
        self._groups |= self._scored(places, completions)

    def _scored(self, places: Sequence[int], completions: Sequence[list[Completion]]) -> dict[int, Group]:
        problems, prompts = [self._problems[i] for i in places], [self._prompts[i] for i in places]
        scored, errors = self._generator.score(problems, prompts, completions)
        self._errors.update(errors)
        beat()
        return dict(zip(places, scored, strict=True))
