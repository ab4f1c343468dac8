"""How many prompts a step draws until enough of their groups are informative."""

import dataclasses
import math

UNKNOWN_SHARE = 0.5
"""The share of informative groups that is assumed before a run has generated any."""

_DEVIATIONS = 2.0  # a batch that is just large enough in the mean is too small every second time
_LARGEST = 10  # in units of prompts_per_step; a small share of informative groups is not known well


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Generates batches until enough groups are informative (DAPO, arXiv:2503.14476, section 3.2).

    Attributes:
      oversample: prompts of a batch, in units of prompts_per_step. 0: as many as should fill the step (`batch_size`).
      max_batches: the most generation batches a step may take.
      surplus: what to do with informative groups that the step does not need. "drop" forgets them. "carry" hands as
        many as one step needs to the next step, which trains them first. So no trained group is older than one step.
    """

    oversample: int = 1
    max_batches: int = 20
    surplus: str = "drop"

    def __post_init__(self):
        if self.oversample < 0 or self.max_batches < 1:
            raise ValueError(
                f"dynamic sampling needs oversample >= 0 and max_batches >= 1, got {self.oversample} and "
                f"{self.max_batches}"
            )
        if self.surplus not in ("drop", "carry"):
            raise ValueError(f"dynamic sampling needs surplus 'drop' or 'carry', got {self.surplus!r}")

    def batch_size(self, prompts_per_step: int, *, missing: int, share: float) -> int:
        """Prompts of the next batch, of whose groups the share p in (0, 1] should be informative.

        With `oversample` 0 it is ceil((m + 2 sqrt(m (1 - p))) / p) for m missing groups: the need in the mean, and two
        standard deviations of the number of informative groups. At most 10 prompts_per_step.
        """
        if self.oversample:
            return self.oversample * prompts_per_step
        wanted = (missing + _DEVIATIONS * math.sqrt(missing * (1 - share))) / share
        return math.ceil(min(wanted, _LARGEST * prompts_per_step))
