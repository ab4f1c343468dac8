"""TPU generations of Google Cloud, their slices and prices.

Sources: cloud.google.com/tpu/docs on v4, v5e, v5p, v6e (chips, HBM, topologies), runtime versions. As of November 2026.
"""

import dataclasses
import math

from cloud.errors import LaunchError

PRICES_AS_OF = "US list price of 2025"


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation; an accelerator type is its `prefix` with a number of chips or cores.

    Attributes:
      cores_per_chip: 2 where the number in the type counts TensorCores (v4, v5p), 1 where it counts chips.
      hbm_gb: memory of a chip.
      one_host: chips of the largest slice on one host; larger slices have 4 chips per host.
      list_price: approximate US dollars per chip and hour on demand; see PRICES_AS_OF.
    """

    name: str
    prefix: str
    cores_per_chip: int
    hbm_gb: int
    one_host: int
    runtime: str
    topologies: tuple[str, ...]
    list_price: float


_TORUS_2D = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TORUS_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

GENERATIONS = (
    Generation("v4", "v4", 2, 32, 4, "tpu-ubuntu2204-base", _TORUS_3D, 3.22),
    Generation("v5e", "v5litepod", 1, 16, 8, "v2-alpha-tpuv5-lite", ("1x1", *_TORUS_2D), 1.20),
    Generation("v5p", "v5p", 2, 95, 4, "v2-alpha-tpuv5", _TORUS_3D, 4.20),
    Generation("v6e", "v6e", 1, 32, 8, "v2-alpha-tpuv6e", ("1x1", *_TORUS_2D), 2.70),
)


@dataclasses.dataclass(frozen=True)
class Slice:
    """One accelerator type: `v5p-16` has 8 v5p chips on 2 hosts, wired as 2x2x2."""

    generation: Generation
    chips: int
    topology: str

    @property
    def type(self) -> str:
        return f"{self.generation.prefix}-{self.chips * self.generation.cores_per_chip}"

    @property
    def hosts(self) -> int:
        return 1 if self.chips <= self.generation.one_host else self.chips // 4

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)}"
        return f"{self.type} ({self.chips} chips {self.topology}, {hosts}, {self.generation.hbm_gb} GB HBM a chip)"


SLICES = {
    s.type: s
    for generation in GENERATIONS
    for topology in generation.topologies
    if (s := Slice(generation, math.prod(map(int, topology.split("x"))), topology))
}


def find(accelerator_type: str) -> Slice:
    """The slice of an accelerator type; for an unknown type raises LaunchError with the generation's types."""
    if accelerator_type in SLICES:
        return SLICES[accelerator_type]
    prefix = accelerator_type.rpartition("-")[0]
    if prefix.startswith(("v7", "tpu7")):
        served = "Google serves TPU7x by GKE and Compute Engine, not as TPU VMs, and launch/xpk does not know its types"
        raise LaunchError(f"--type={accelerator_type}: {served}", "take v6e or v5p (docs/cloud.md)")
    prefix = "v5litepod" if prefix == "v5e" else prefix
    known = [name for name in SLICES if name.rpartition("-")[0] == prefix] or list(SLICES)
    raise LaunchError(f"no accelerator type {accelerator_type!r}", f"use --type={'|'.join(known)}")


def table() -> str:
    """Every type with its chips, hosts, memory, image and price, for `launch/tpu types`."""
    head = ("type", "chips", "topology", "hosts", "HBM GB", "runtime image", "$/h")
    rows = [
        (s.type, s.chips, s.topology, s.hosts, s.chips * s.generation.hbm_gb, s.generation.runtime,
         f"{s.chips * s.generation.list_price:.2f}")
        for s in SLICES.values()
    ]  # fmt: skip
    widths = [max(len(str(row[column])) for row in (head, *rows)) for column in range(len(head))]
    lines = ("  ".join(str(cell).rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join([*lines, f"$/h: on demand, {PRICES_AS_OF}, for orientation only; --chip-price replaces it."])
