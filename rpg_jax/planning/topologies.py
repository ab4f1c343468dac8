"""TPU slices by name, the peaks of their chips, and devices to compile for without a TPU."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

from rpg_jax.planning import tpu_compiler

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of what JAX shows as one device: a chip, or on v7x one of the two TensorCores of a chip.

    Attributes:
      hbm: bytes of memory that programs can use, as the compiler reports it.
      flops: bf16 operations per second.
      hbm_bandwidth: bytes per second.
      ici_bandwidth: bytes per second into a chip, over all its links to other chips of the slice.
      dimensions: dimensions of the torus.
      one_host: chips of the largest slice on one host; larger slices have four chips per host.
      price: US dollars per chip and hour on demand, list price of 2025 for orientation; None if not known.
      cores: devices of a chip.
    """

    hbm: float
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dimensions: int
    one_host: int
    price: float | None = None
    cores: int = 1


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


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice or several equal ones: `v5p:2x2x2` is a v5p of shape (2, 2, 2), `v5p:2x2x2*3` three such slices."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")

    @property
    def chips(self) -> int:
        """Devices as JAX shows them: chips, or on v7x TensorCores."""
        return math.prod(self.shape) * self.slices * self.chip.cores

    @property
    def hourly(self) -> float | None:
        """US dollars of an hour on demand; None if not known."""
        return None if self.chip.price is None else self.chips / self.chip.cores * self.chip.price

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def hosts(self) -> int:
        return self.chips // self.host.chips

    @property
    def host(self) -> Topology:
        """The part of this slice that is on one host, as a slice of its own. A small slice is whole on one host."""
        shape = self.shape if math.prod(self.shape) <= self.chip.one_host else (2, 2, 1)[: self.chip.dimensions]
        return Topology(self.kind, shape)

    def devices(self) -> list[jax.Device]:
        """Devices to compile for, without a TPU.

        Raises:
          ValueError: libtpu, which holds the compiler, is not installed.
        """
        library = tpu_compiler.library()
        if library is None:
            raise ValueError(f"{self.name} needs the compiler for TPUs (0.7 GB of disk): {tpu_compiler.GET}")
        os.environ.update(_QUIET)
        if library.is_relative_to(tpu_compiler.folder()):
            os.environ["TPU_LIBRARY_PATH"] = str(library)
            jax.config.update("jax_platforms", "cpu")  # JAX would look for a TPU now
        one = dataclasses.replace(self, slices=1)
        options: dict[str, object] = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(self.shape) == 1 else {}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if self.kind == "v4":
            options["chip_config_name"] = "megacore"  # one device per chip, as JAX has it on real hardware
        name = one.name.replace("v7x", "tpu7x")
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


# Without these, libtpu asks a Cloud machine's metadata server for the machine's type, and allows one process only.
_QUIET = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def known(kind: str | None = None) -> list[str]:
    """Names of all slices, or of the slices of one kind, by size."""
    kinds = CHIPS if kind is None else [kind]
    return [f"{k}:{shape}" for k in kinds for shape in _SHAPES[CHIPS[k].dimensions]]


def parse(name: str) -> Topology:
    """Parses the name of a slice or of several slices.

    Raises:
      ValueError: an unknown slice; the message lists the known slices.
    """
    match = re.fullmatch(r"([^*]+)(?:\*([1-9]\d*))?", name)
    if not match or match[1] not in known():
        listed = "; ".join(f"{kind}: {' '.join(_SHAPES[chip.dimensions])}" for kind, chip in CHIPS.items())
        raise ValueError(f"unknown topology {name!r}, expected KIND:SHAPE or KIND:SHAPE*SLICES. Known: {listed}")
    kind, shape = match[1].split(":")
    return Topology(kind, tuple(map(int, shape.split("x"))), int(match[2] or 1))
