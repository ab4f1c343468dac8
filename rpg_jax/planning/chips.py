"""TPU chips with their peaks and prices, and the shapes of slices. Standard library only: the launcher reads it too."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

_GIB = 2**30
PRICES_AS_OF = "US list price of 2025"


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
      price: US dollars per chip and hour on demand, for orientation (see PRICES_AS_OF); None if not known.
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

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes of slices, by size."""
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
