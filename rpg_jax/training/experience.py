"""From prompts to scored groups: the sampling half of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rpg_jax.data import Problem, PromptStream
from rpg_jax.rewards import Scorer
from rpg_jax.rollout import Rollout
from rpg_jax.types import Completion, Sampling


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its G completions and what they earned.

    Attributes:
      problem: the prompt as text, with its answer.
      prompt: i32[n] token ids.
      completions: G of them.
      texts: decoded, for scoring and for people.
      rewards: f32[G], shaped.
      accuracy: f32[G], raw, in [0, 1].
    """

    problem: Problem
    prompt: np.ndarray
    completions: list[Completion]
    texts: list[str]
    rewards: np.ndarray
    accuracy: np.ndarray

    @property
    def informative(self) -> bool:
        """Whether raw accuracy is not the same for all completions."""
        return bool(self.accuracy.min() < self.accuracy.max())


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Keep generating until enough groups are informative (DAPO, arXiv:2503.14476, section 3.2).

    Attributes:
      max_batches: generation batches per step.
      on_shortage: "smaller" trains on what was kept, "error" stops the run.
    """

    max_batches: int = 20
    on_shortage: str = "smaller"

    def __post_init__(self):
        if self.max_batches < 1 or self.on_shortage not in ("smaller", "error"):
            raise ValueError(
                "dynamic sampling needs max_batches >= 1 and on_shortage 'smaller' or 'error', got "
                f"{self.max_batches} and {self.on_shortage!r}"
            )


class Sampler(Protocol):
    """Prompts in, scored groups out; see `GroupSampler`."""

    def __call__(self, problems: Sequence[Problem], *, step: int) -> list[Group]: ...


class GroupSampler:
    """Samples and scores one group per problem; the completions depend on (seed, step, prompt, index) only."""

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
    ):
        self._rollout, self._encode, self._decode, self._scorer = rollout, encode, decode, scorer
        self._group_size, self._sampling, self._seed = group_size, sampling, seed

    def __call__(self, problems: Sequence[Problem], *, step: int) -> list[Group]:
        prompts = [self._encode(p) for p in problems]
        groups = self._rollout.generate(
            prompts,
            prompt_ids=[p.prompt_id for p in problems],
            group_size=self._group_size,
            sampling=self._sampling,
            seed=self._seed,
            step=step,
        )
        flat = [c for group in groups for c in group]
        texts = [self._decode(_without_stop(c)) for c in flat]
        scores = self._scorer(
            [p for p in problems for _ in range(self._group_size)],
            texts,
            [c.finish_reason for c in flat],
            [len(c.tokens) for c in flat],
        )
        rewards = np.asarray(scores.rewards, np.float32).reshape(len(problems), -1)
        accuracy = np.asarray(scores.accuracy, np.float32).reshape(len(problems), -1)
        g = self._group_size
        return [
            Group(p, prompts[i], groups[i], texts[i * g : (i + 1) * g], rewards[i], accuracy[i])
            for i, p in enumerate(problems)
        ]


def collect(
    stream: PromptStream,
    sample: Sampler,
    *,
    prompts_per_step: int,
    step: int,
    dynamic: DynamicSampling | None,
    on_batch: Callable[[int], None] = lambda kept: None,
) -> tuple[list[Group], list[Group]]:
    """Returns (the groups to train on, every group generated).

    Without dynamic sampling both are the groups of the stream's next batch. With it, batches are
    generated until that many groups are informative; the surplus of the last batch is dropped. A prompt that the
    stream repeats within the step is generated once: its completions would be the same again.

    Raises:
      ValueError: no group was informative after `max_batches`, or too few with on_shortage = "error".
    """
    if dynamic is None:
        groups = sample(next(stream), step=step)
        return groups, groups
    kept: list[Group] = []
    generated: list[Group] = []
    seen: set[int] = set()
    for _ in range(dynamic.max_batches):
        fresh = [p for p in next(stream) if p.prompt_id not in seen]
        seen.update(p.prompt_id for p in fresh)
        if fresh:
            groups = sample(fresh, step=step)
            generated += groups
            kept += [g for g in groups if g.informative]
            on_batch(len(kept))
        if len(kept) >= prompts_per_step:
            return kept[:prompts_per_step], generated
    if not kept or dynamic.on_shortage == "error":
        accuracy = float(np.mean([g.accuracy.mean() for g in generated]))
        raise ValueError(
            f"step {step}: dynamic sampling kept {len(kept)} of {prompts_per_step} groups after {dynamic.max_batches} "
            f"batches ({len(generated)} groups, mean accuracy {accuracy:.3f}): the problems are too easy or too hard. "
            "Change the task, raise dynamic_sampling.max_batches, or set dynamic_sampling.enabled=False"
        )
    return kept, generated


def _without_stop(completion: Completion) -> list[int]:
    tokens = completion.tokens.tolist()
    return tokens[:-1] if completion.finish_reason == "stop" else tokens
