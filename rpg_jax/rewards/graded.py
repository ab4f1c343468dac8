"""Says when the reward that decides accuracy is no verdict of right or wrong."""

import sys
from collections.abc import Iterable

LOOKED_AT = 64  # scores


class Graded:
    """Watches the scores of a user's function or of a judge: accuracy counts those above `above` as right.

    It notes once, after `LOOKED_AT` scores of which none was exactly 0 or 1, that the accuracy may mean little.
    """

    def __init__(self, name: str, above: float):
        self._name, self._above, self._scores = name, above, list[float]()
        self._watching = True

    def look(self, scores: Iterable[float]) -> None:
        """Looks at more scores."""
        if not self._watching:
            return
        self._scores += map(float, scores)
        if any(score in (0.0, 1.0) for score in self._scores):
            self._watching = False
        elif len(self._scores) >= LOOKED_AT:
            self._watching = False
            right = sum(score > self._above for score in self._scores) / len(self._scores)
            print(
                f"note: none of the first {len(self._scores)} scores of the reward {self._name!r} is exactly 0 or 1 "
                f"({min(self._scores):.3g} to {max(self._scores):.3g}). Accuracy counts a score above "
                f"rewards.right_above={self._above:g} as right, which is {right:.0%} of them: set it, or name the part "
                "that says right or wrong in rewards.accuracy",
                file=sys.stderr,
            )
