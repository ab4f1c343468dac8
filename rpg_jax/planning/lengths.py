"""Lengths of prompts and completions, and what follows from their spread."""

import dataclasses
import math
import statistics


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes:
      prompt: of a mean prompt, p.
      mean: of a mean completion, m.
      spread: coefficient of variation of completions, c.
      limit: of the longest completion.
    """

    prompt: float
    mean: float
    spread: float
    limit: float

    @property
    def mean_square(self) -> float:
        """E[n²] = m² (1 + c²)."""
        return self.mean**2 * (1 + self.spread**2)

    @property
    def attended(self) -> float:
        """Cached tokens that a decoded token attends to, in the mean over all decoded tokens.

        A completion of n tokens reads p, p + 1, …, p + n - 1 of them. So it is p + (E[n²] / E[n] - 1) / 2.
        """
        return self.prompt + (self.mean_square / self.mean - 1) / 2

    @property
    def attended_in_training(self) -> float:
        """The same over all tokens of prompts and completions, each attending to its past: E[(p + n)²] / 2(p + m)."""
        square = self.prompt**2 + 2 * self.prompt * self.mean + self.mean_square
        return square / (2 * (self.prompt + self.mean))

    @property
    def longest(self) -> float:
        """The longest of many completions: four standard deviations above the mean, at most the limit."""
        return min(self.limit, self.mean * (1 + 4 * self.spread))


def decode_steps(completions: float, lengths: Lengths, slots: float) -> float:
    """Decode steps until `completions` have passed through `slots`, of which each is refilled as soon as it is free.

    Slots free themselves at a rate of slots / m a step, and the last completion starts when completions - slots have
    ended. It may be the longest: m (completions - slots) / slots + longest.
    """
    return lengths.mean * max(0.0, completions - slots) / slots + lengths.longest


def imbalance(hosts: int, prompts: float, group: int, slots: float, spread: float, correlation: float) -> float:
    """The work of the host that ends last, over the mean work: `hosts` take groups from one list, as they have room.

    A completion's work goes with the square of its length, whose coefficient of variation is about 2c. P groups of G
    completions then have 2c √((ρ + (1 - ρ) / G) / P). The largest of H normal sums is Φ⁻¹((H - 0.375) / (H + 0.25))
    standard deviations above the mean (Blom, 1958). When the list is empty, a host has what is in its slots, groups
    that are slots / GP of its work: what it began before evens out.

    Args:
      hosts: H, decoding meshes.
      prompts: P, groups of a host in the mean.
      slots: of a host.
      correlation: ρ, between the work of completions of a group.
    """
    if hosts == 1:
        return 1.0
    last = min(prompts, slots / group)
    deviation = 2 * spread * math.sqrt((correlation + (1 - correlation) / group) / last)
    return 1 + last / prompts * deviation * statistics.NormalDist().inv_cdf((hosts - 0.375) / (hosts + 0.25))
