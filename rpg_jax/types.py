"""The values that cross package borders: sampling parameters, completions and the update batch.

Token log-probabilities are natural logarithms (nats), f32, of the distribution that the sampling temperature
defines. Axis letters: `B` rows, `T` model positions of a row, `C` completion tokens of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.struct
import jax
import numpy as np

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    `temperature` 0 means greedy; `top_p` 1, `top_k` 0 and `min_p` 0 switch the truncations off; `max_tokens` counts the
    stop token, which is kept in the completion.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 switches it off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] (0 switches it off), got {self.min_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 switches it off), got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion, in token ids; never re-tokenised.

    Attributes:
      tokens: i32[n], the stop token included where one was drawn.
      logprobs: f32[n], of the distribution actually sampled from, as the rollout engine computed it.
      finish_reason: "stop" when the last token is a stop token, else "length".
      weight_version: version of the weights that sampled it, or began to.
      token_versions: i32[n], where the weights changed on the way: the version that sampled each token.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_version: int
    token_versions: np.ndarray | None = None

    @property
    def versions(self) -> np.ndarray:
        """i32[n], the version of the weights that sampled each token."""
        if self.token_versions is not None:
            return self.token_versions
        return np.full(len(self.tokens), self.weight_version, np.int32)


@flax.struct.dataclass
class Batch:
    """Rows for one forward pass, padded or packed, and the completion tokens that are trained.

    The model reads `tokens`, `positions` and `segment_ids` [B, T]; segment id 0 is padding, positions restart in
    every segment. The loss reads the [B, C] arrays: entry c of row b is the token `targets[b, c]`, predicted by the
    hidden state at `predictors[b, c]` (the position before it), and belongs to the completion
    `completion_ids[b, c]` of that row (1, 2, ...; 0 is padding).

    Attributes:
      tokens: i32[B, T].
      positions: i32[B, T].
      segment_ids: i32[B, T].
      predictors: i32[B, C], indices into the T axis.
      targets: i32[B, C].
      completion_ids: i32[B, C].
      mask: f32[B, C], 1 where the token is trained.
      advantages: f32[B, C].
      sampler_logprobs: f32[B, C], as the rollout engine reported them.
      behaviour_logprobs: f32[B, C], recomputed by the trainer before the first update.
      ref_logprobs: f32[B, C], under the reference policy; equal to `behaviour_logprobs` where the two coincide.
      values: f32[B, C], of a learned baseline before the first update; None without one.
      returns: f32[B, C], what it is to predict; None without one.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    predictors: jax.Array
    targets: jax.Array
    completion_ids: jax.Array
    mask: jax.Array
    advantages: jax.Array
    sampler_logprobs: jax.Array
    behaviour_logprobs: jax.Array
    ref_logprobs: jax.Array
    values: jax.Array | None = None
    returns: jax.Array | None = None
