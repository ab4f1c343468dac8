"""TPU slices by name, and the compiler for TPUs, libtpu, which describes their devices where there is no TPU.

Where Python can import libtpu, every command of a machine without a TPU looks for a TPU first and complains. So the
compiler gets a folder of its own, which only `plan` knows. On a TPU's machine libtpu is installed for Python.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rpg_jax.planning.chips import CHIPS, Chip

if TYPE_CHECKING:
    import jax

GET_COMPILER = "python -m rpg_jax.plan --get_compiler"


@dataclasses.dataclass(frozen=True)
class Topology:
    """One TPU slice or several equal slices: `v5p:2x2x2*3` has kind "v5p", shape (2, 2, 2) in chips, and slices 3."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """The name that `parse` reads, as "v5p:2x2x2*3"."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")

    @property
    def chips(self) -> int:
        """Devices of all slices as JAX shows them: chips, or on v7x TensorCores."""
        return math.prod(self.shape) * self.slices * self.chip.cores

    @property
    def hourly(self) -> float | None:
        """US dollars of all slices for an hour on demand; None if the chip's price is not known."""
        return None if self.chip.price is None else self.chips / self.chip.cores * self.chip.price

    @property
    def chip(self) -> Chip:
        """The peaks and the price of the chip `kind`."""
        return CHIPS[self.kind]

    @property
    def hosts(self) -> int:
        """The number of hosts of all slices together."""
        return self.chips // self.host.chips

    @property
    def host(self) -> Topology:
        """The part of one slice that is on one host, as a slice of its own. A small slice is whole on one host."""
        shape = self.shape if math.prod(self.shape) <= self.chip.one_host else (2, 2, 1)[: self.chip.dimensions]
        return Topology(self.kind, shape)

    def devices(self) -> list[jax.Device]:
        """The devices of all slices to compile for, without a TPU. Sets environment variables that libtpu reads. If the
        compiler is in `compiler_folder`, JAX's platform in this process becomes the CPU. Raises ValueError if libtpu,
        which holds the compiler, is not installed."""
        import jax  # a launcher and --get_compiler ask for the compiler alone, and need not wait for JAX
        from jax.experimental.topologies import get_topology_desc

        library = compiler_library()
        if library is None:
            raise ValueError(f"{self.name} needs the compiler for TPUs (0.7 GB of disk): {GET_COMPILER}")
        os.environ.update(_QUIET)
        if library.is_relative_to(compiler_folder()):
            os.environ["TPU_LIBRARY_PATH"] = str(library)
            jax.config.update("jax_platforms", "cpu")  # JAX would look for a TPU now
        options: dict[str, object] = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(self.shape) == 1 else {}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if self.kind == "v4":
            options["chip_config_name"] = "megacore"  # one device per chip, as JAX has it on real hardware
        name = dataclasses.replace(self, slices=1).name.replace("v7x", "tpu7x")
        return list(get_topology_desc(platform="tpu", topology_name=name, **options).devices)


# Without these, libtpu asks a Cloud machine's metadata server for the machine's type, and allows one process only.
_QUIET = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def parse(name: str) -> Topology:
    """Reads a name KIND:SHAPE or KIND:SHAPE*SLICES, as "v5p:2x2x2*3". Raises ValueError for an unknown slice; the
    message lists the known slices."""
    match = re.fullmatch(r"(\w+):([\dx]+)(?:\*([1-9]\d*))?", name)
    if not match or match[1] not in CHIPS or match[2] not in CHIPS[match[1]].shapes:
        listed = "; ".join(f"{kind}: {' '.join(chip.shapes)}" for kind, chip in CHIPS.items())
        raise ValueError(f"unknown topology {name!r}, expected KIND:SHAPE or KIND:SHAPE*SLICES. Known: {listed}")
    return Topology(match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 1))


def compiler_folder() -> Path:
    """The folder, made or not, where `get_compiler` puts the compiler for this Python environment's version of JAX."""
    return Path(sys.prefix) / "tpu_compiler" / importlib.metadata.version("jax")


def compiler_library() -> Path | None:
    """Path of libtpu.so: of the libtpu that Python can import, or else in `compiler_folder`. None: neither is there."""
    if found := importlib.util.find_spec("libtpu"):
        return Path(found.origin or "").with_name("libtpu.so")
    own = compiler_folder() / "libtpu" / "libtpu.so"
    return own if own.is_file() else None


def get_compiler() -> str:
    """Installs the compiler into `compiler_folder` by pip, which takes minutes, and then deletes compilers for other
    versions of JAX. Does nothing if `compiler_library` finds a compiler. Returns a line for people that names the
    place. Raises ValueError if pip fails; pip prints why."""
    if found := compiler_library():
        return f"the compiler for TPUs is there: {found}"
    home, needed = compiler_folder(), importlib.metadata.requires("jax") or []
    # With the versions that the installed JAX takes, as pip reads them: libtpu==0.0.42.*
    libtpu = next(line.partition(";")[0].strip() for line in needed if line.startswith("libtpu"))
    part = home.with_name(f"{home.name}.part")  # an interrupted download leaves no folder that looks whole
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    shutil.rmtree(part, ignore_errors=True)
    if subprocess.run([*pip, f"--target={part}", libtpu]).returncode:
        raise ValueError(f"{libtpu} cannot be installed into {home}: pip says why above")
    for old in home.parent.iterdir():  # compilers for other versions of JAX
        if old != part:
            shutil.rmtree(old)
    part.rename(home)
    return f"the compiler for TPUs, {libtpu}, is in {home}; only plan uses it"
