"""Compiles a program for devices that need not be there, and keeps the compiler's figures."""

import dataclasses
import re
import time
from typing import Any

import jax

from rpg_jax.planning import efficiency, hlo
from rpg_jax.planning.topologies import Chip

_NEEDED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm")
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """The needs of one program on each chip; memory is in bytes.

    Attributes:
      arguments, temporaries, outputs, alias: HBM, from the compiler's memory analysis. `alias` are arguments that
        outputs overwrite. On a TPU the temporaries count fragmentation twice: they can exceed those at the peak.
      resident: HBM that holds other arrays meanwhile.
      costs: operations and traffic; see `hlo.Costs`.
      model_flops: operations of the mathematics, the share of one chip.
      seconds: of compilation.
      refused: the compiler's reason if it found no room; the other numbers are then its estimate, or 0.
      peak: HBM of the buffers that the compiler assigned, arguments included; 0 if it does not say.
      host: host memory for each chip, from remat=offload and the arrays that `offload` names.
    """

    name: str
    arguments: float
    temporaries: float
    outputs: float
    alias: float
    resident: float
    costs: hlo.Costs
    model_flops: float
    seconds: float
    refused: str = ""
    peak: float = 0.0
    host: float = 0.0

    @property
    def hbm(self) -> float:
        """Bytes of HBM at the peak."""
        own = self.arguments + self.temporaries + self.outputs - self.alias
        return (self.peak or own) + self.resident

    def fits(self, chip: Chip) -> bool:
        return not self.refused and self.hbm <= chip.hbm

    def limits(self, chip: Chip) -> dict[str, float]:
        """Seconds that each resource alone would take at its peak rate."""
        return {
            "compute": max(self.costs.flops, self.model_flops) / chip.flops,
            "HBM": self.costs.bytes / chip.hbm_bandwidth,
            "ICI": sum(self.costs.collectives.values()) / chip.ici_bandwidth,
        }

    def bound(self, chip: Chip) -> tuple[str, float]:
        """The resource that limits the program, and its seconds: no run is faster."""
        limits = self.limits(chip)
        name = max(limits, key=limits.__getitem__)
        return name, limits[name]

    def expected(self, chip: Chip) -> float:
        """Seconds at the efficiencies of `efficiency`, with the latency of every collective."""
        rates = {"compute": efficiency.FLOPS, "HBM": efficiency.HBM, "ICI": efficiency.ICI}
        slowest = max(seconds / rates[name] for name, seconds in self.limits(chip).items())
        return slowest + self.costs.launches * efficiency.COLLECTIVE_SECONDS


def compile_program(
    name: str, lowered: Any, *, model_flops: float = 0.0, resident: float = 0.0, cheapest: bool = False
) -> Program:
    """Compiles the result of `jax.jit(...).lower(...)`. A program that finds no room is a result, not an error.

    `cheapest` counts the cheapest branch of its conditions.
    """
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds, needed = time.perf_counter() - start, needed_bytes(str(error))
        reason = next(line for line in str(error).splitlines() if line.strip())
        return Program(name, 0, needed, 0, 0, resident, hlo.Costs(), model_flops, seconds, reason[:300])
    seconds = time.perf_counter() - start
    m, costs = compiled.memory_analysis(), hlo.count(compiled.as_text(), cheapest=cheapest)
    sizes = m.argument_size_in_bytes, m.temp_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
    host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
    return Program(name, *sizes, resident, costs, model_flops, seconds, peak=m.peak_memory_in_bytes, host=host)


def needed_bytes(message: str) -> float:
    """Bytes of HBM that a program wanted, from the compiler's refusal; 0 if it does not say."""
    match = _NEEDED.search(message)
    return float(match[1]) * _UNIT[match[2]] if match else 0.0
