"""Stop texts: a completion ends where the first of them begins, however its tokens and dispatches cut it."""

from collections.abc import Sequence


class StopText:
    """Passes a growing text on, up to the stop text that is complete first; holds back what may be one's beginning."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop text has ended it."""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, begin = min(found)
            certain, self._held = self._held[:begin], ""
            return certain, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, False

    def flush(self) -> str:
        """The rest, where the completion has ended without a stop text."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper beginning of `stop` at the end of `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
