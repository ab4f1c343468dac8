"""The values that cross package borders: sampling parameters, completions, rows and batches.

Token log-probabilities are natural logarithms (nats), f32, at the sampling temperature. Axis letters: `B` rows, `T`
positions of a row, `C` completion tokens of a row, `L` layers.
"""

import dataclasses
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import flax.struct
import jax
import numpy as np

BRANCH = 1 << 16
"""The distance between the segment ids of a prompt's completions that share the prompt's tokens, see `Rows`."""

FinishReason = Literal["stop", "length", "turns"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are drawn. A number out of its range raises ValueError.

    Attributes:
      temperature: >= 0, finite in float32; logits are divided by the temperature. 0 takes the most probable token.
      top_p: in (0, 1]; tokens are drawn from the fewest most probable tokens that together have at least this share of
        the probability that `top_k` leaves. 1 is no limit.
      top_k: >= 0; tokens are drawn from the `top_k` most probable tokens and their equals. 0 is no limit.
      max_tokens: >= 1, the most tokens of a completion. The stop tokens and an environment's tokens count.
      stop_token_ids: the tokens that end a completion, or a turn of a conversation. A drawn stop token is kept.
      min_p: in [0, 1]; only tokens with at least `min_p` times the largest probability are drawn. 0 is no limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0

    def __post_init__(self):
        if not 0 <= self.temperature <= 3e38:
            raise ValueError(f"temperature must be >= 0 and finite in float32 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 switches it off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] (0 switches it off), got {self.min_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 switches it off), got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclasses.dataclass(frozen=True)
class Count:
    """A number of steps or of updates; a step trains on one rollout batch, by one or more updates."""

    number: int
    unit: Literal["steps", "updates"]

    @classmethod
    def parse(cls, text: str, name: str = "a count") -> Self:
        """Reads a text such as "10 steps" or "16updates". Raises ValueError, which names `name`, for another text."""
        found = re.fullmatch(r"(\d+) ?(step|update)s?", text)
        if found is None:
            raise ValueError(
                f"{name}={text!r} must be a number with its unit: '10 steps' (rollout batches) or '10 updates' (of the "
                "optimizer)"
            )
        return cls(int(found[1]), "steps" if found[2] == "step" else "updates")

    def __str__(self) -> str:
        return f"{self.number} {self.unit[:-1] if self.number == 1 else self.unit}"


@dataclasses.dataclass(frozen=True)
class Turns:
    """How an environment has answered the policy within a completion of n tokens and k turns.

    Attributes:
      observed: bool[n], True at tokens that the environment wrote; the policy reads them and is never trained on them.
      rewards: f32[k], the environment's reward for each turn.
      error: the kind of failure that ended the conversation, one of `rewards.verdicts.KINDS`; None without a failure.
    """

    observed: np.ndarray
    rewards: np.ndarray
    error: str | None = None

    @property
    def numbers(self) -> np.ndarray:
        """i32[n], the number of each token's turn, from 0. An environment's token has the number of the turn before."""
        begins = np.diff((~self.observed).astype(np.int8), prepend=0) == 1
        return np.maximum(np.cumsum(begins) - 1, 0).astype(np.int32)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, end) of each run of tokens that the environment wrote; `end` is the index after its last token."""
        edges = np.flatnonzero(np.diff(self.observed.astype(np.int8), prepend=0, append=0)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def record(self) -> dict[str, Any]:
        """The arguments `spans`, `rewards` and `error` of `Turns.of`, by name, ready for JSON; no number is rounded."""
        return {"spans": self.spans, "rewards": self.rewards.tolist(), "error": self.error}

    @classmethod
    def of(
        cls, spans: Iterable[tuple[int, int]], rewards: Sequence[float], error: str | None = None, *, length: int
    ) -> Self:
        """Makes the turns of a completion of `length` tokens; `rewards` and `error` become the attributes of `Turns`.
        For each (first, end) in `spans` the environment wrote the tokens first, …, end − 1. Raises ValueError if a span
        is empty, or not within the completion."""
        observed = np.zeros(length, bool)
        for first, end in spans:
            if not 0 <= first < end <= length:
                raise ValueError(f"an observation from token {first} to {end} is not in a completion of {length}")
            observed[first:end] = True
        return cls(observed, np.array(rewards, np.float32), error)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion in token ids, as they were sampled. With an environment: all turns of a conversation.

    Attributes:
      tokens: i32[n], with the stop token if one was drawn.
      logprobs: f32[n], of the distribution actually sampled from, as the rollout engine computed it; 0 at tokens that
        the environment wrote.
      finish_reason: "stop": the last token is a stop token, and no limit ended the completion. "length": a limit of
        tokens cut the completion or its last turn off, or left no room for an observation. "turns": the limit of turns
        ended a conversation that the environment would have continued.
      weight_version: version of the weights that sampled the completion; with `versions`, of its last tokens.
      turns: the turns of a conversation with an environment; None without an environment.
      experts: [m + n, L, k], unsigned integers: the k experts in each of L layers to which the sampler's routers sent
        each of the prompt's m tokens and the completion's n tokens; None if the sampler did not record the experts.
      versions: i32[n], for each token the version of the weights that sampled it; None: `weight_version` for all.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_version: int
    turns: Turns | None = None
    experts: np.ndarray | None = None
    versions: np.ndarray | None = None

    @property
    def token_versions(self) -> np.ndarray:
        """i32[n], for each token the version of the weights that sampled it; `weight_version` without `versions`."""
        return np.full(len(self.tokens), self.weight_version, np.int32) if self.versions is None else self.versions

    def followed_by(self, rest: "Completion") -> "Completion":
        """Returns `rest`, which continues this completion, with this completion's tokens, log-probs and versions in
        front. All other fields are of `rest`. Neither completion may have `turns`."""
        both = [(getattr(self, name), getattr(rest, name)) for name in ("tokens", "logprobs", "token_versions")]
        tokens, logprobs, versions = map(np.concatenate, both)
        return dataclasses.replace(rest, tokens=tokens, logprobs=logprobs, versions=versions)

    @property
    def digest(self) -> int:
        """CRC-32 of the token ids as little-endian i32. It shows whether a text encodes to the sampled tokens."""
        return zlib.crc32(self.tokens.astype("<i4").tobytes())

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens or of turns ended the completion (`finish_reason` is not "stop")."""
        return self.finish_reason != "stop"

    @property
    def sampled(self) -> np.ndarray:
        """bool[n], True for tokens that the policy sampled, False for tokens that an environment wrote."""
        return np.ones(len(self.tokens), bool) if self.turns is None else ~self.turns.observed

    @property
    def turn_numbers(self) -> np.ndarray:
        """i32[n], the number of each token's turn, from 0; see `Turns.numbers`. All 0 without an environment."""
        return np.zeros(len(self.tokens), np.int32) if self.turns is None else self.turns.numbers


@flax.struct.dataclass
class Rows:
    """The input of a forward pass: prompts and completions in rows, padded or packed.

    Segment id 0 is padding. A token attends to itself and to the earlier tokens of its segment. A prompt's completions
    in one row may share the prompt's tokens: the prompt has the id s, and the completions have s + `BRANCH`, s + 2 ·
    `BRANCH`, …. Then a token of a completion also attends to the prompt. Positions count from 0 in a segment, and
    from the length of the prompt in a completion that shares the prompt.

    Entry c of row b is the completion token `targets[b, c]`. The hidden state at the position `predictors[b, c]`
    predicts this token: it is the position of the token before, or of the prompt's last token. The token belongs to the
    completion `completion_ids[b, c]` of its row (1, 2, …; 0 is padding).

    Attributes:
      tokens: i32[B, T].
      positions: i32[B, T].
      segment_ids: i32[B, T].
      predictors: i32[B, C], indices into the T axis.
      targets: i32[B, C].
      completion_ids: i32[B, C].
      mask: f32[B, C], 1 at a token that the update trains on.
      experts: [B, T, L, k], the experts of each token in each layer of the policy, as the sampler chose them; 0 at
        padding. None: the routers of the model choose.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    predictors: jax.Array
    targets: jax.Array
    completion_ids: jax.Array
    mask: jax.Array
    experts: jax.Array | None = None

    @property
    def unrouted(self) -> Self:
        """The rows with `experts` None, for a model that is not the policy and therefore chooses its own experts."""
        return dataclasses.replace(self, experts=None)


@flax.struct.dataclass
class Batch:
    """Rows, and columns of numbers for their completion tokens. A column that is not computed yet is None.

    Attributes:
      rows: the model's input.
      sampler_logprobs: f32[B, C], log π_s as the rollout engine reported it.
      behaviour_logprobs: f32[B, C], log π_old. Tokens that earlier weights sampled may have numbers that an earlier
        step stored; all others are computed before the first update. None if the update itself computes log π_old.
      ref_logprobs: f32[B, C], log π_ref. None if the update itself computes log π_ref. Where π_ref is π_old: equal to
        `behaviour_logprobs`, or None.
      advantages: f32[B, C].
      kl_baseline: f32[B, C], the part of `advantages` that is the KL's own baseline; None without a baseline of the KL.
      ref_hidden: [B, C, E], the reference's hidden states that predict the tokens. Only a loss that sums the KL over
        the vocabulary reads these states, and an update adds them to one micro-batch at a time.
      prefix_kl: `losses.PrefixKL`, the KL summed over the vocabulary at each token; only an update adds this column.
      rewards: f32[B, C], the reward of each token; a learned baseline reads the rewards.
      values: f32[B, C], the values of a learned baseline before the first update.
      returns: f32[B, C], the targets of the learned baseline.
    """

    rows: Rows
    sampler_logprobs: jax.Array
    behaviour_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None
    advantages: jax.Array | None = None
    kl_baseline: jax.Array | None = None
    ref_hidden: jax.Array | None = None
    prefix_kl: Any = None
    rewards: jax.Array | None = None
    values: jax.Array | None = None
    returns: jax.Array | None = None

    def known(self, column: str) -> jax.Array:
        """The array of the column `column`, a field of `Batch`. Raises ValueError if the column is None."""
        array = getattr(self, column)
        if array is None:
            raise ValueError(f"the batch has no {column} yet: add the column before the program that reads it")
        return array

    @property
    def mask(self) -> jax.Array:
        """f32[B, C], 1 at a completion token that the update trains on."""
        return self.rows.mask

    @property
    def completion_ids(self) -> jax.Array:
        """i32[B, C], the completion of each token in its row: 1, 2, …; 0 is padding."""
        return self.rows.completion_ids

    @property
    def loss_inputs(self) -> dict[str, Any]:
        """The arrays that `losses.policy_loss` takes, by the argument's name, without `logprobs` and `group_ids`.
        Raises ValueError if `behaviour_logprobs` or `advantages` is None; other columns may be None."""
        return {
            "behaviour_logprobs": self.known("behaviour_logprobs"),
            "advantages": self.known("advantages"),
            "mask": self.mask,
            "ref_logprobs": self.ref_logprobs,
            "sampler_logprobs": self.sampler_logprobs,
            "completion_ids": self.completion_ids,
            "prefix_kl": self.prefix_kl,
        }
