"""How completions are decoded: slots, devices, and the shapes of prefill and cache. `planning` uses this file too."""

import dataclasses
from typing import Any

import jax

from rpg_jax import parallel

PREFILL_TOKENS = 2048
_SMALLEST_BUCKET = 16
_SMALLEST_ATTENTION = 128


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How a rollout decodes, with any driver.

    Attributes:
      slots: completions decoded together (S).
      threads: threads that decode, each its share of the slots, on one device. A program of XLA's for CPUs seldom uses
        two cores at a time; two programs do.
      capacity: tokens of a slot, prompt and completion together (C); see `capacity`.
      steps_per_dispatch: most decode steps between two looks by the host (K).
      prefill_tokens: tokens of one prefill, padding included.
      refill: a dispatch ends early once this fraction of the slots is idle while completions wait.
      patience_s: seconds that a completion keeps its slot while its environment replies and others wait for a slot.
        After that it gives the slot away, and is prefilled again.
      dtype: the dtype of the decoding weights; None for the trainer's dtype.
      int8: round the matrices of the decoding weights' layers to eight bits; see `models.weights.quantized`.
      int8_kv: keep keys and values in eight bits, with one scale per token and head.
      record_experts: completions carry the experts of every token, see `types.Completion`; for a mixture only.
      mesh: the devices that decode; None for JAX's default device. Slots and key-value heads are spread over them, and
        results are replicated.
      rules: from logical axes to axes of `mesh`.
      shardings: the shardings of the decoding weights on `mesh`; None for the trainer's shardings. `mesh` may have
        other devices than the trainer's mesh.

    Raises ValueError for a size below 1, and for threads that do not divide the slots or are on several devices.
    """

    slots: int
    capacity: int
    threads: int = 1
    steps_per_dispatch: int = 16
    prefill_tokens: int = PREFILL_TOKENS
    refill: float = 1 / 16
    patience_s: float = 0.25
    dtype: Any = None
    int8: bool = False
    int8_kv: bool = False
    record_experts: bool = False
    mesh: jax.sharding.Mesh | None = None
    rules: parallel.Rules = dataclasses.field(default_factory=lambda: parallel.RULES)
    shardings: Any = None

    def __post_init__(self):
        for name in ("slots", "capacity", "threads", "steps_per_dispatch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.slots % self.threads:
            raise ValueError(f"{self.threads} threads must divide the {self.slots} slots")
        if self.threads > 1 and self.mesh is not None and self.mesh.size > 1:
            raise ValueError(
                f"{self.threads} threads decode on one device, and the mesh has {self.mesh.size}; give one thread"
            )


def capacity(max_prompt_tokens: int, max_tokens: int) -> int:
    """The tokens of a slot for the longest prompt and completion, rounded up to a multiple of 16."""
    return -(-(max_prompt_tokens + max_tokens) // 16) * 16


def prompt_bucket(length: int, capacity: int) -> int:
    """The length to which a prompt is padded: a power of two, or `capacity` if `capacity` is smaller."""
    return min(max(_SMALLEST_BUCKET, power_of_two(length)), capacity)


def attention_bucket(length: int, capacity: int) -> int:
    """The positions of the cache that are read when no slot is longer than `length`: a power of two, or all."""
    return min(max(_SMALLEST_ATTENTION, power_of_two(length)), capacity)


def prompts_per_prefill(bucket: int, prefill_tokens: int = PREFILL_TOKENS) -> int:
    """The most prompts of a bucket that one prefill takes."""
    return max(1, prefill_tokens // bucket)


def prefill_shape(max_prompt_tokens: int, capacity: int, prefill_tokens: int = PREFILL_TOKENS) -> tuple[int, int]:
    """(prompts, tokens) of the largest prefill of prompts that have `max_prompt_tokens`, padding included."""
    bucket = prompt_bucket(max_prompt_tokens, capacity)
    return power_of_two(prompts_per_prefill(bucket, prefill_tokens)), bucket


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()
