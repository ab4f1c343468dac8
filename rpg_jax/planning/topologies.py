"""TPU slices by name, and devices to compile for without a TPU."""

from __future__ import annotations

import dataclasses
import math
import os
import re

import jax
from jax.experimental import topologies

from rpg_jax.planning import tpu_compiler
from rpg_jax.planning.chips import CHIPS, Chip


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

        Raises ValueError if libtpu, which holds the compiler, is not installed.
        """
        library = tpu_compiler.library()
        if library is None:
            raise ValueError(f"{self.name} needs the compiler for TPUs (0.7 GB of disk): {tpu_compiler.GET}")
        os.environ.update(_QUIET)
        if library.is_relative_to(tpu_compiler.folder()):
            os.environ["TPU_LIBRARY_PATH"] = str(library)
            jax.config.update("jax_platforms", "cpu")  # JAX would look for a TPU now
        options: dict[str, object] = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(self.shape) == 1 else {}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if self.kind == "v4":
            options["chip_config_name"] = "megacore"  # one device per chip, as JAX has it on real hardware
        name = dataclasses.replace(self, slices=1).name.replace("v7x", "tpu7x")
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


# Without these, libtpu asks a Cloud machine's metadata server for the machine's type, and allows one process only.
_QUIET = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def parse(name: str) -> Topology:
    """Parses the name of a slice or of several slices.

    Raises ValueError for an unknown slice; the message lists the known slices.
    """
    match = re.fullmatch(r"(\w+):([\dx]+)(?:\*([1-9]\d*))?", name)
    if not match or match[1] not in CHIPS or match[2] not in CHIPS[match[1]].shapes:
        listed = "; ".join(f"{kind}: {' '.join(chip.shapes)}" for kind, chip in CHIPS.items())
        raise ValueError(f"unknown topology {name!r}, expected KIND:SHAPE or KIND:SHAPE*SLICES. Known: {listed}")
    return Topology(match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 1))
