"""How far training has led from the policy before the first step, measured on the completions of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rpg_jax.data import Group, RolloutBatch
from rpg_jax.report.scores import clustered_standard_error
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.types import Rows


@dataclasses.dataclass
class Drift:
    """The entropy of a policy, and its KL to the initial policy: KL(π_θ‖π_initial) of completions, not of tokens.

    The estimate of the KL is the mean over completions x ~ π_θ of Σ_t log π_θ(x_t) − log π_initial(x_t). It is unbiased
    where the completions are drawn at the temperature of `logprobs`. It can be negative by chance.

    Attributes:
      snapshots: hold the initial policy as number 0.
      like: shapes, dtypes and shardings of the weights.
      pack: groups -> micro-batches.
      logprobs: (weights, rows) -> log-probs and entropies f32[B, C].
    """

    snapshots: Snapshots
    like: Any
    pack: Callable[[Sequence[Group]], RolloutBatch[Group]]
    logprobs: Callable[[Any, Rows], tuple[jax.Array, jax.Array, Any]]

    def begin(self, params: Any) -> None:
        """Keeps the initial policy."""
        self.snapshots.save(0, params)

    def metrics(self, groups: Sequence[Group], params: Any) -> dict[str, float]:
        """Of groups that `params` completed: entropy in nats per token; KL in nats per completion, standard error.

        The standard error is clustered by prompt.

        Raises:
          Refused: the snapshot of the initial policy is missing or damaged.
        """
        batch, initial = self.pack(groups), self.snapshots.restore(0, self.like)
        present, entropies = zip(*(self.logprobs(params, b.rows)[:2] for b in batch.batches), strict=True)
        before = (self.logprobs(initial, b.rows)[0] for b in batch.batches)
        ratios = [new - old for new, old in zip(present, before, strict=True)]
        kl = [np.mean([x.sum() for x in group]) for group in batch.of_sampled(ratios)]
        tokens = [x for group in batch.of_sampled(entropies) for x in group]
        return {
            "entropy": float(np.concatenate(tokens).mean()),
            "initial_kl": float(np.mean(kl)),
            "initial_kl_error": clustered_standard_error(np.array(kl)),
        }
