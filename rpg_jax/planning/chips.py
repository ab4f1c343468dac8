"""TPU chips: their peaks, prices and slices, and the shares of the peaks that a run is expected to reach.

No share is measured: this code has not run on a TPU. The public figures behind a share stand beside it. `docs/plan.md`
compares plans at these rates with reported runs. The launcher imports this file: it needs only the standard library.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_GIB = 2**30
PRICES_AS_OF = "US list price of 2025"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of what JAX shows as one device: a chip, or on v7x one of the two TensorCores of a chip.

    Attributes:
      hbm: bytes of memory that programs can use, as the compiler reports it.
      flops: bf16 operations per second.
      hbm_bandwidth: bytes per second.
      ici_bandwidth: bytes per second into a device, over all its links to other chips of the slice.
      dimensions: dimensions of the torus.
      one_host: chips of the largest slice on one host; larger slices have four chips per host.
      price: US dollars per chip and hour on demand, for orientation (see PRICES_AS_OF); None if not known.
      cores: JAX's devices per chip.
    """

    hbm: float
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dimensions: int
    one_host: int
    price: float | None = None
    cores: int = 1

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes of slices that a plan knows, in chips, as "2x4" or "2x2x1", the smallest first."""
        return _SHAPES[self.dimensions]


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # Peaks: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e. ICI: jax-ml.github.io/scaling-book/tpus has bytes per
        # second of one link, one way; a 3D torus has 6 links per chip, a 2D torus 4.
        "v4": Chip(32 * _GIB, 275e12, 1.228e12, 6 * 45e9, 3, 4, 3.22),
        "v5e": Chip(15.75 * _GIB, 197e12, 0.819e12, 4 * 45e9, 2, 8, 1.20),
        "v5p": Chip(95.74 * _GIB, 459e12, 2.765e12, 6 * 90e9, 3, 4, 4.20),
        "v6e": Chip(31.25 * _GIB, 918e12, 1.640e12, 4 * 90e9, 2, 8, 2.70),
        # Halves of the chip in docs.cloud.google.com/tpu/docs/tpu7x; HBM's bandwidth as in JAX's tpu_info.py. Its links
        # are taken to be those of v5p. No price was found.
        "v7x": Chip(94.75 * _GIB, 2307e12 / 2, 7.40e12 / 2, 6 * 90e9 / 2, 3, 4, None, 2),
    }
)

_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}

HBM_BAND = (0.35, 0.6)
"""The least and the most share of HBM's bandwidth (`Rates.hbm`) that a plan considers. 0.35 is somewhat below the
slowest published row with a large batch. On TPU7x ragged paged attention alone reaches 0.86 (arXiv:2604.15464)."""

PACKING = 0.98
"""Share of a packed row that is filled. Simulated: first-fit decreasing over 512 completions of a gamma distribution
(coefficient of variation 0.6, cut at the limit, twice its mean) fills 0.978 to 0.993 of rows of 4,096 to 10,240."""

PROMPT_TOKENS = 300
"""Tokens of a mean prompt with its template; about that of DAPO-Math-17k."""

SPREAD = 0.6
"""Coefficient of variation of the lengths of completions."""

EXCHANGED_BYTES = 16
"""Bytes that a sampled token takes between hosts: the token id, the weights' version, the log-probability, the text."""


class Rates(NamedTuple):
    """Rates at which a step is planned; the defaults are the rates that a run is expected to reach.

    Attributes:
      hbm: share of HBM's bandwidth while decoding, and in other programs. Published engines reach 0.38 to 0.51 of it in
        whole decode steps: sglang-jax with Qwen3-8B on v6e-4 (docs/plan.md has its rows), and tpu-inference about 0.49
        with Qwen3-32B in fp8 on TPU7x (its pull request 1961).
      flops: share of peak FLOP/s in matrix products, recomputation counted as work. MaxText reports 0.44 to 0.50 of
        dense models on v6e, and on v5p 0.53 of Mixtral 8x7B and 0.65 of Llama 2 70B, without recomputation
        (maxtext.readthedocs.io, models tiering).
      ici: share of the bandwidth of a chip's links. A collective over some axes uses only the links of these axes.
      host: bytes per second that a host takes from other hosts or from a folder of weights, and copies or writes.
        Assumed: the network of hosts of four or eight chips is faster; what Python does with the bytes is not measured.
      collective_seconds: latency of one collective in any program, with the small programs between two collectives. It
        is set by one reported device time: Levanter decodes eight completions of Qwen3-8B on v6e-8 at 4.9 ms a step
        (marin-community/marin#6229). The bytes take 2.9 ms at half of HBM's bandwidth; 74 collectives share the rest.
      dispatch_seconds: seconds between two dispatches of decode steps, while tokens reach the host and slots are
        filled. Levanter's engine spends 1.4 ms of host time on a decode step in the same report.
    """

    hbm: float = 0.5
    flops: float = 0.5
    ici: float = 0.6
    host: float = 1e9
    collective_seconds: float = 27e-6
    dispatch_seconds: float = 3e-3


EXPECTED = Rates()
PEAKS = Rates(1.0, 1.0, 1.0, math.inf, 0.0, 0.0)
