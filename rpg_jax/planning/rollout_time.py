"""Seconds of a rollout on one decoding mesh: what its hardware allows, and what is expected.

Worked by hand for Qwen3-4B with completions of 8,192 tokens on v5p:4x4x4. There are 1,536 prompts of 300 tokens and
24,576 completions of 4,096 tokens in the mean with a coefficient of variation of 0.6, in 2,560 slots. Each host of four
chips has one copy of the weights.

  a token's keys and values    36 layers × 2 × 8 heads × 128 × 2 bytes           = 147,456 bytes
  attended in the mean         300 + (4096 × 1.36 - 1) / 2                       = 3,085 tokens
  cache that is read           24,576 × 4,096 × 3,085 × 147,456 bytes            = 4.58e16 bytes
    over 64 chips              / (64 × 2.765e12 bytes/s)                         = 259 s
  steps                        24,576 × 4,096 / 2,560                            = 39,322
  weights that are read        39,322 × 8.04e9 bytes / 4 chips / 2.765e12        = 29 s

With 128 slots the same weights are read 786,432 times, which takes 572 s.
"""

import dataclasses

from rpg_jax.planning import efficiency
from rpg_jax.planning.lengths import Lengths, decode_steps
from rpg_jax.planning.topologies import Chip


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One decode step of all slots of a mesh, on one of its chips.

    Attributes:
      slots: of the mesh.
      fixed: bytes to and from HBM at every step: weights, activations, logits.
      cached: bytes of the cache for one attended token of every slot.
      products: operations of matrix products.
      scores: operations of attention for one attended token of every slot.
      network: bytes that collectives bring.
      collectives: their number.
      steps_per_dispatch: steps between two looks by the host.
      reading: expected share of HBM's bandwidth while attention reads the cache.
    """

    slots: float
    fixed: float
    cached: float
    products: float
    scores: float
    network: float = 0.0
    collectives: float = 0.0
    steps_per_dispatch: int = 16
    reading: float = efficiency.HBM


def decode_bound(step: DecodeStep, completions: float, lengths: Lengths, chip: Chip) -> dict[str, float]:
    """Seconds that each resource takes at its peak for `completions` of the mesh: no run with such lengths is faster.

    All slots are busy until the end, or one completion has the longest length; the cache is read where it is filled.
    """
    tokens = completions * lengths.mean
    steps, positions = max(tokens / step.slots, lengths.longest), tokens / step.slots * lengths.attended
    return {
        "compute": (tokens / step.slots * step.products + positions * step.scores) / chip.flops,
        "HBM": (steps * step.fixed + positions * step.cached) / chip.hbm_bandwidth,
        "ICI": steps * step.network / chip.ici_bandwidth,
    }


def decode_expected(step: DecodeStep, completions: float, lengths: Lengths, chip: Chip) -> dict[str, float]:
    """Seconds of the parts of decoding at the efficiencies of `efficiency`, one after the other.

    weights: every step reads them and multiplies all slots with them, idle ones too. cache: attention. latency:
    collectives. host: between dispatches. The slots empty one by one in the end.
    """
    tokens = completions * lengths.mean
    steps, positions = decode_steps(completions, lengths, step.slots), tokens / step.slots * lengths.attended
    bandwidth, flops = efficiency.HBM * chip.hbm_bandwidth, efficiency.FLOPS * chip.flops
    network = step.network / (efficiency.ICI * chip.ici_bandwidth)
    return {
        "weights": steps * max(step.fixed / bandwidth, step.products / flops),
        "cache": positions * max(step.cached / (step.reading * chip.hbm_bandwidth), step.scores / flops),
        "latency": steps * (network + step.collectives * efficiency.COLLECTIVE_SECONDS),
        "host": steps / step.steps_per_dispatch * efficiency.DISPATCH_SECONDS,
    }
