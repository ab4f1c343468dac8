"""A request that workers sample: which of its groups wait, are lent or are complete, and what a valid group is."""

import collections
from collections.abc import Sequence

from rpg_jax.rollout.interface import Request
from rpg_jax.types import Completion


class Job:
    """A request in progress; the hub's lock guards it.

    Attributes:
      number: counts the requests of this process.
      checksum: of the weights that sample it; `version` is their version.
      wanted: groups that end it. `taken` of them were handed to the caller.
      waiting: places to lend, in order.
      lent: for each place the workers that have it.
    """

    def __init__(self, number: int, request: Request, checksum: int, version: int):
        self.number, self.request, self.checksum, self.version = number, request, checksum, version
        places = [place for place in request.order if place not in request.done]
        self.wanted = len(places) if request.enough is None else request.enough
        self.taken = 0
        self.waiting = collections.deque(places)
        self.lent: dict[int, set[str]] = {}
        self._complete: dict[int, list[Completion]] = {}
        self._faults: dict[int, list[tuple[str, str]]] = {}

    @property
    def has_news(self) -> bool:
        """Whether groups were completed since the last `take`."""
        return len(self._complete) > self.taken

    def lend(self, worker: str, count: int) -> list[int]:
        """The next places for a worker, at most `count`."""
        places = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        for place in places:
            self.lent.setdefault(place, set()).add(worker)
        return places

    def returned(self, worker: str, place: int) -> bool:
        """Notes that a worker no longer has a place; returns whether it had it."""
        had = worker in self.lent.get(place, ())
        if had:
            self.lent[place].discard(worker)
        return had

    def wait(self, place: int) -> bool:
        """Makes a place wait again, first in line, if nobody samples it any more; returns whether it does."""
        waits = place not in self._complete and not self.lent.get(place) and place not in self.waiting
        if waits:
            self.waiting.appendleft(place)
        return waits

    def keep(self, place: int, group: Sequence[Completion]) -> bool:
        """Keeps the first group of a place; returns whether it is the first."""
        if place in self._complete:
            return False
        if place in self.waiting:  # it was taken from this worker, and nobody has it yet
            self.waiting.remove(place)
        self._complete[place] = list(group)
        return True

    def differs(self, place: int, group: Sequence[Completion]) -> bool:
        """Whether a group has other tokens than the one that is kept."""
        kept = self._complete[place]
        return any(list(a.tokens) != list(b.tokens) for a, b in zip(kept, group, strict=True))

    def take(self) -> list[tuple[int, list[Completion]]]:
        """Places and groups, up to those wanted, that were completed since the last call."""
        found = list(self._complete.items())[self.taken : self.wanted]
        self.taken += len(found)
        return found

    def failed(self, worker: str, place: int, fault: str) -> None:
        """Notes that a worker could not sample a place."""
        self._faults.setdefault(place, []).append((worker, fault))

    def fault(self, *, workers: int) -> str:
        """Why the request fails: a group that failed twice, at two workers where there are two; "" if it does not."""
        for place, faults in self._faults.items():
            at = {worker for worker, _ in faults}
            if len(faults) >= 2 and len(at) >= min(2, workers) and place not in self._complete:
                prompt_id, step = self.request.prompt_ids[place], self.request.step
                return f"prompt {prompt_id} of step {step} failed {len(faults)} times: {faults[-1][1]}"
        return ""


def fault_of(group: Sequence[Completion], request: Request, vocab_size: int) -> str:
    """Why completions are no group of a request; "" if they are one."""
    sampling = request.sampling
    if len(group) != request.group_size:
        return f"{len(group)} completions, not {request.group_size}"
    for one in group:
        tokens, logprobs = one.tokens, one.logprobs
        if not 1 <= len(tokens) <= sampling.max_tokens or len(logprobs) != len(tokens):
            return f"a completion of {len(tokens)} tokens; the limit is {sampling.max_tokens}"
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            return f"tokens from {tokens.min()} to {tokens.max()}; the vocabulary has {vocab_size}"
        if not (logprobs <= 0).all() or not (logprobs > float("-inf")).all():
            return "log-probabilities that are positive or not finite"
        if one.turns is not None:
            return "several turns, and a fleet has no environments"
        stopped = int(tokens[-1]) in sampling.stop_token_ids
        ended = stopped if one.finish_reason == "stop" else len(tokens) == sampling.max_tokens and not stopped
        if not ended or one.finish_reason not in ("stop", "length"):
            return f"a completion of {len(tokens)} tokens that ends with {one.finish_reason!r} and did not"
    return ""
