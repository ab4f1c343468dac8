"""One server as the trainer knows it: how many calls it gets at once, and when it rests after a failure."""

import asyncio
import dataclasses
import math

from rpg_jax.rollout.served.calls import Caller, Unavailable

STRIKES = 3  # incidents without an answer between them, at a server that says that it is healthy
_LONGEST_REST, _DOUBLINGS = 30.0, 10  # seconds; a rest doubles no more often
_FEWER, _SHARE = 0.75, 16  # of the limit after a refusal; a round of answers adds one, or a sixteenth of the limit


@dataclasses.dataclass(eq=False)
class Server:
    """One server. All times are seconds of the balance's clock.

    Failures of calls that were under way together are one incident, and so are refusals for want of room.

    Attributes:
      caller: posts to it.
      most: calls at once, if it has room for them.
      rest: seconds after the first incident, and between health calls that fail.
      limit: the most calls under way. It falls when the server has no room, and rises while it answers.
      calls: under way.
      label: of the weights that it has loaded; "" if that is not known.
      read: the label of the weights that it was asked to read ahead, by the task `reading`.
      heard: when it answered last, or the first call under way began.
      idle: when it had a call last, or no request waited.
      refused: when it had no room, of the last such incident.
      failed: when it failed, of the last incident.
      failures: incidents since its last answer to a call.
      gone: its address is no longer found.
      resting: it has not said that it is healthy since the incident, or at all.
      until: nothing is asked before.
      said: at its last failure.
    """

    caller: Caller
    most: int
    rest: float
    limit: float = dataclasses.field(init=False)
    calls: int = 0
    label: str = ""
    read: str = ""
    reading: asyncio.Task[None] | None = None
    heard: float = 0.0
    idle: float = 0.0
    refused: float = -math.inf
    failed: float = -math.inf
    failures: int = 0
    gone: bool = False
    resting: bool = True
    until: float = -math.inf
    said: str = "not reached yet"

    def __post_init__(self):
        self.limit = self.most

    @property
    def is_sound(self) -> bool:
        """Whether it has answered since it failed last."""
        return not (self.resting or self.failures)

    def is_free(self, label: str, now: float) -> bool:
        """Whether it can have one more call for these weights. The one that loads them is alone."""
        return now >= self.until and self.calls < (int(self.limit) if self.label == label else 1)

    def is_due(self, quiet: float, now: float) -> bool:
        """Whether to ask for its health: after a rest, or if it says nothing for `quiet` seconds of calls under way."""
        return now >= self.until if self.resting else self.calls > 0 and now - self.heard >= quiet

    def note_answer(self) -> None:
        """Notes that a call was answered."""
        self.failures, self.limit = 0, min(self.most, self.limit + 1 / min(self.limit, _SHARE))

    def note_refusal(self, error: Unavailable, begun: float, now: float) -> None:
        """Notes that it had no room for a call. It pauses only if it asks for that, or if no call of ours fills it."""
        if begun > self.refused:
            self.refused, self.limit = now, max(1, self.limit * _FEWER)
            self.until = now + min(max(error.after, 0.0 if self.calls else self.rest), _LONGEST_REST)

    def note_failure(self, error: Unavailable, begun: float, now: float) -> bool:
        """Notes that a call failed; returns whether this is a new incident, after which it rests."""
        if begun < self.failed:
            return False
        rest = self.rest * 2 ** min(self.failures, _DOUBLINGS)
        self.until = now + min(max(error.after, rest), _LONGEST_REST)
        self.failed, self.failures, self.resting, self.said = now, self.failures + 1, True, str(error)
        self.label = self.read = ""
        return True

    def note_health(self, error: Unavailable | None, now: float) -> None:
        """Notes what a health call of a rest has found; without an error the rest is over."""
        self.resting = error is not None
        if error is not None:
            self.until, self.said = now + self.rest, str(error)
