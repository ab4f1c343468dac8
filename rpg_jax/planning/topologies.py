"""TPU slices by name, what a chip of each kind can do, and the compiler's picture of a slice that is not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

_GIB = 2**30
_INSTALL = "python3 launch/install.py --requirements=requirements-tpu.txt"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip.

    Attributes:
      hbm: bytes of memory that programs can use, as the compiler reports it.
      flops: bf16 operations a second.
      hbm_bandwidth: bytes a second.
      ici_bandwidth: bytes a second into a chip, over all its links to other chips of the slice.
      dimensions: of the torus.
      pod: chips of the largest slice.
      one_host: chips of the largest slice that one machine has; larger ones have four on each.
    """

    hbm: float
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dimensions: int
    pod: int
    one_host: int


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e: peaks; jax-ml.github.io/scaling-book/tpus: bytes a second and
        # link, one way, times 6 links of a 3D or 4 of a 2D torus.
        "v4": Chip(32 * _GIB, 275e12, 1.228e12, 6 * 45e9, 3, 4096, 4),
        "v5e": Chip(15.75 * _GIB, 197e12, 0.819e12, 4 * 45e9, 2, 256, 8),
        "v5p": Chip(95.74 * _GIB, 459e12, 2.765e12, 6 * 90e9, 3, 8960, 4),
        "v6e": Chip(31.25 * _GIB, 918e12, 1.640e12, 4 * 90e9, 2, 256, 8),
    }
)

_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several alike: `v5p:2x2x2` is the kind v5p and the shape (2, 2, 2), `v5p:2x2x2*3` three of them."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def hosts(self) -> int:
        return self.chips // self.host.chips

    @property
    def host(self) -> Topology:
        """The part of the slice that one machine has, itself where that is all; a compiler sees it as a slice."""
        shape = self.shape if math.prod(self.shape) <= self.chip.one_host else (2, 2, 1)[: self.chip.dimensions]
        return Topology(self.kind, shape)

    def larger(self) -> Topology | None:
        """The next slice of its kind, as many times; None for the largest."""
        slices = [dataclasses.replace(parse(name), slices=self.slices) for name in known(self.kind)]
        return next((t for t in slices if t.chips > self.chips), None)

    def devices(self) -> list[jax.Device]:
        """Devices to compile for, without a TPU.

        Raises:
          ValueError: libtpu, which holds the compiler, is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError(f"{self.name} needs the TPU compiler, libtpu, which is not installed: {_INSTALL}")
        os.environ.update(_QUIET)
        one = dataclasses.replace(self, slices=1)
        options: dict[str, object] = {"chips_per_host_bounds": (1, 1, 1)} if one.chips == 1 else {}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if self.kind == "v4":
            options["chip_config_name"] = "megacore"  # one device a chip, as jax shows it on a real one
        return list(topologies.get_topology_desc(platform="tpu", topology_name=one.name, **options).devices)


# libtpu asks the metadata server of a Cloud machine who it is, unless it is told, and allows one process.
_QUIET = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def known(kind: str | None = None) -> list[str]:
    """Names of all slices, or of those of one kind, by size."""
    kinds = CHIPS if kind is None else [kind]
    return [f"{k}:{shape}" for k in kinds for shape in _SHAPES[CHIPS[k].dimensions]]


def parse(name: str) -> Topology:
    """The slice or slices that `name` names.

    Raises:
      ValueError: no such slice; the message lists the known ones.
    """
    match = re.fullmatch(r"([^*]+)(?:\*([1-9]\d*))?", name)
    if not match or match[1] not in known():
        listed = "; ".join(f"{kind}: {' '.join(_SHAPES[chip.dimensions])}" for kind, chip in CHIPS.items())
        raise ValueError(f"unknown topology {name!r}, expected KIND:SHAPE or KIND:SHAPE*SLICES. Known: {listed}")
    kind, shape = match[1].split(":")
    return Topology(kind, tuple(map(int, shape.split("x"))), int(match[2] or 1))
