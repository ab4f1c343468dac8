"""TPU slices by Google's accelerator types; `rpg_jax.planning.chips` has their chips, shapes and prices.

Sources: cloud.google.com/tpu/docs on v4, v5e, v5p, v6e and on runtime versions. As of November 2026.
"""

import dataclasses
import math

from cloud.errors import LaunchError
from rpg_jax.planning.chips import CHIPS, Chip

RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
COUNTS_CORES = ("v4", "v5p")  # their types count TensorCores, two a chip: v5p-16 has 8 chips


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class Slice:
    """One accelerator type: `v5p-16` has 8 v5p chips on 2 hosts, wired as 2x2x2."""

    prefix: str
    topology: str

    @property
    def generation(self) -> str:
        return "v5e" if self.prefix == "v5litepod" else self.prefix

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.topology.split("x")))

    @property
    def type(self) -> str:
        return f"{self.prefix}-{self.chips * (2 if self.prefix in COUNTS_CORES else 1)}"

    @property
    def hosts(self) -> int:
        return 1 if self.chips <= self.chip.one_host else self.chips // 4

    def __str__(self) -> str:
        return f"{self.type} ({count(self.chips, 'chip')} {self.topology}, {count(self.hosts, 'host')})"


SLICES = {
    one.type: one
    for prefix in RUNTIMES
    for shape in Slice(prefix, "").chip.shapes
    if (one := Slice(prefix, shape)) and shape != "1x1x1"
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
    known = [name for name, one in SLICES.items() if one.prefix == prefix] or list(SLICES)
    raise LaunchError(f"no accelerator type {accelerator_type!r}", f"use --type={'|'.join(known)}")
