"""Refuses to call a score right or wrong where it is neither, and nobody has said from where on it is right."""

import sys
from collections.abc import Iterable

VERDICTS = (-1.0, 0.0, 1.0)
"""Wrong, wrong and right: the scores that need no threshold."""
FIRST = 1000  # scores: a part of the first step of a large run, the first steps of a small one
REMEDY = (
    "add --config.rewards.right_above=0.5 (a score above 0.5 is right), or --config.rewards.accuracy=PART, a part that "
    "says right or wrong"
)


class Graded:
    """Looks at the scores of the part that decides accuracy where `rewards.right_above` is unset. Right is 1 then.

    Args:
      name: the part.
      refuses: whether a score that is none of `VERDICTS` is an error, among the first 1,000. Later it is noted, once: a
        run does not end for one rare score after hundreds of steps.
    """

    def __init__(self, name: str, *, refuses: bool):
        self._name, self._left = name, FIRST if refuses else 0
        self._noted = False

    def look(self, scores: Iterable[float]) -> None:
        """Looks at more scores. Raises ValueError, which says the remedy, for a grade among the first."""
        looked = list(scores)
        grade = next((score for score in looked if score not in VERDICTS), None)
        if grade is None or self._noted:
            self._left -= len(looked)
            return
        what = f"the reward {self._name!r} decides accuracy, and its score {grade:.3g}"
        found = f"{what} is neither right (1) nor wrong (0, -1)"
        if self._left > 0:
            raise ValueError(f"{found}: {REMEDY}")
        self._noted = True
        print(f"note: {found}. A score below 1 counts as wrong; in another run {REMEDY}", file=sys.stderr)
