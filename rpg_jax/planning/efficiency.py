"""The shares of a chip's peaks that a run is expected to reach. No value is measured: this code has not run on a TPU.

The public figures behind a value stand beside it. `docs/plan.md` compares plans at these rates with reported runs.
"""

import math
from typing import NamedTuple

HBM_BAND = (0.35, 0.6)
"""The least and the most that a plan considers. 0.35 is somewhat below the slowest published row with a large batch.
The kernel of ragged paged attention alone reaches up to 0.86 on TPU7x (arXiv:2604.15464), a whole step less."""

PACKING = 0.98
"""Share of a packed row that is filled. Simulated: first-fit decreasing over 512 completions of a gamma distribution
(coefficient of variation 0.6, cut at the limit, twice its mean) fills 0.978 to 0.993 of rows of 4,096 to 10,240."""

PROMPT_TOKENS = 300
"""Tokens of a mean prompt with its template; about that of DAPO-Math-17k."""

SPREAD = 0.6
"""Coefficient of variation of the lengths of completions."""

EXCHANGED_BYTES = 16
"""Bytes of a sampled token between hosts: its number, the version of its weights, its log-probability, and its text."""


class Rates(NamedTuple):
    """Rates at which a step is planned; the defaults are expected.

    Attributes:
      hbm: share of HBM's bandwidth while decoding, and in other programs. Published engines reach 0.38 to 0.51 of it in
        whole decode steps: sglang-jax with Qwen3-8B on v6e-4 (docs/plan.md has its rows), and tpu-inference about 0.49
        with Qwen3-32B in fp8 on TPU7x (its pull request 1961).
      flops: share of peak FLOP/s in matrix products, recomputation counted as work. MaxText reports 0.44 to 0.50 of
        dense models on v6e, and on v5p 0.53 of Mixtral 8x7B and 0.65 of Llama 2 70B, without recomputation
        (maxtext.readthedocs.io, models tiering).
      ici: share of the bandwidth of a chip's links. A collective over some axes of the torus uses only their links.
      host: bytes per second that a host takes from other hosts or from a folder of weights, and copies or writes.
        Assumed: the network of hosts of four or eight chips is faster; what Python does with the bytes is not measured.
      collective_seconds: latency of one collective of a decode step, with the small programs between two of them. It is
        set by one reported device time: Levanter decodes eight completions of Qwen3-8B on v6e-8 at 4.9 ms a step
        (marin-community/marin#6229). The bytes take 2.9 ms at half of HBM's bandwidth; 74 collectives share the rest.
        The hops alone take some microseconds.
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
