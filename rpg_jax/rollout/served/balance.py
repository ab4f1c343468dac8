"""Several servers of one policy: who is asked next, who rests after a failure, and who must load the weights first."""

import dataclasses
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rpg_jax.rollout.served.answers import Aborted, Unusable
from rpg_jax.rollout.served.calls import Batch, Caller, Refused, Superseded, Unavailable
from rpg_jax.rollout.served.kinds import Kind
from rpg_jax.rollout.weights import RolloutError

_MOST_FAULTS = 4  # of one request: then it is the request, or the servers' program
_LONGEST_REST = 30.0  # seconds
_SAY_AFTER, _SAY_EVERY = 5.0, 60.0  # seconds without a server

T = TypeVar("T")


class Stopped(Exception):
    """The batch of a call has ended: nobody wants the answer."""


@dataclasses.dataclass(frozen=True)
class Loadable:
    """Weights that servers load: the folder that they read, its label, and the checksum of the trainer's."""

    folder: str
    label: str
    checksum: int


@dataclasses.dataclass(eq=False)
class Server:
    """One server as the trainer knows it.

    Attributes:
      caller: posts to it.
      calls: under way.
      label: of the weights that it has loaded; "" if that is not known.
      failures: in a row; while there are any, it is asked one thing at a time.
      rests_until: it is not asked before.
      said: at its last failure.
    """

    caller: Caller
    calls: int = 0
    label: str = ""
    failures: int = 0
    rests_until: float = 0.0
    said: str = ""


class Balance:
    """Sends each request to the server with the fewest, of those that answer and have the present weights.

    A server that fails rests, twice as long each time. Before it is asked again it loads the weights: it may have been
    started anew. What it had not answered goes to the others. Any thread may call the methods.

    Args:
      parallel: most calls under way at one server.
      patience: seconds without any server that answers, after which a call fails.
      rest: seconds after the first failure.
    """

    def __init__(
        self,
        callers: Sequence[Caller],
        kind: Kind,
        *,
        parallel: int,
        patience: float,
        rest: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._servers, self._kind = [Server(caller) for caller in callers], kind
        self._parallel, self._patience, self._rest, self._clock = parallel, patience, rest, clock
        self._changed = threading.Condition()
        self._weights: Loadable | None = None
        self._answered = self._said = clock()
        self._counts: Counter[str] = Counter()

    @property
    def room(self) -> int:
        """Calls that may be under way at once."""
        return self._parallel * len(self._servers)

    def use(self, weights: Loadable) -> None:
        """Every server loads these weights before the next call that it gets."""
        with self._changed:
            self._weights = weights

    def begin(self) -> None:
        """The time without a server counts from now on."""
        with self._changed:
            self._answered = self._said = self._clock()

    def end(self, batch: Batch) -> None:
        """Ends the calls of a batch."""
        batch.stop()
        with self._changed:
            self._changed.notify_all()

    def ask(self, body: Mapping[str, Any], read: Callable[[Any], T], batch: Batch) -> T:
        """The answer to a request for completions, as `read` understands it.

        Raises:
          RolloutError: a server refuses or answers what cannot be used, or no server has answered for long.
          Stopped: the batch has ended.
        """
        faults = 0
        while True:
            server, weights = self._take(batch)
            how: Unavailable | Superseded | None = None
            try:
                self._load(server, weights, batch)
                answer = server.caller.post("/v1/completions", body, batch, functools.partial(_has, server, weights))
                self._check_weights(server, answer, weights)
                return read(answer)
            except (Unavailable, Superseded) as error:
                how = error
            except Aborted as error:
                how = Unavailable(f"{server.caller.url}: {error}", fault=True)
            except (Refused, Unusable) as error:
                at = "" if isinstance(error, Refused) else f"{server.caller.url} returned no usable completion: "
                raise RolloutError(f"{at}{error}") from None
            finally:
                self._return(server, how, batch)
            if batch.stopped:
                raise Stopped
            faults += isinstance(how, Unavailable) and how.fault
            if faults >= _MOST_FAULTS:
                raise RolloutError(f"a request has failed {faults} times, the last time so: {how}")

    def counts(self) -> dict[str, float]:
        """Servers that answer, and what happened since the last call."""
        with self._changed:
            taken, self._counts = self._counts, Counter()
            alive = sum(not server.failures for server in self._servers)
            return {"answering": alive, **{name: taken[name] for name in ("requests", "failures", "loads")}}

    def _take(self, batch: Batch) -> tuple[Server, Loadable]:
        """The server to ask next, with the call counted. Waits for one; raises RolloutError if none answers."""
        with self._changed:
            while True:
                if batch.stopped:
                    raise Stopped
                weights, now = self._weights, self._clock()
                assert weights is not None, "weights are synced before anything is sampled"
                if free := [server for server in self._servers if self._is_free(server, weights, now)]:
                    server = min(free, key=lambda server: server.calls)
                    server.calls += 1
                    return server, weights
                self._look(now)
                self._changed.wait(0.1 if any(server.failures for server in self._servers) else 1.0)

    def _is_free(self, server: Server, weights: Loadable, now: float) -> bool:
        alone = server.failures or not _has(server, weights)
        return now >= server.rests_until and server.calls < (1 if alone else self._parallel)

    def _look(self, now: float) -> None:
        """Says that no server answers, and raises RolloutError in the end."""
        if not all(server.failures for server in self._servers):
            return
        said = "; ".join(server.said for server in self._servers)
        if now - self._answered > self._patience:
            raise RolloutError(f"no server has answered for {self._patience:g} s (servers.patience_seconds): {said}")
        if now - self._answered > _SAY_AFTER and now - self._said > (_SAY_EVERY if self._said > self._answered else 0):
            self._said = now
            print(f"waiting for servers since {now - self._answered:.0f} s: {said}", file=sys.stderr, flush=True)

    def _return(self, server: Server, error: Unavailable | Superseded | None, batch: Batch) -> None:
        with self._changed:
            server.calls -= 1
            now = self._clock()
            if error is None:
                self._counts["requests"] += 1
                server.failures, self._answered = 0, now
            elif not batch.stopped and isinstance(error, Unavailable):
                self._counts["failures"] += 1
                server.failures, server.said = server.failures + 1, str(error)
                rest = max(error.after, min(self._rest * 2 ** (server.failures - 1), _LONGEST_REST))
                server.rests_until = max(server.rests_until, now + rest)
                if error.busy:
                    self._answered = now
                else:
                    server.label = ""
            self._changed.notify_all()

    def _load(self, server: Server, weights: Loadable, batch: Batch) -> None:
        """Makes a server load the weights if it has not; nothing else is under way there then."""
        if _has(server, weights):
            return
        for path, body in self._kind.loads(weights.folder, weights.label):
            try:
                answer = server.caller.post(path, body, batch)
            except Refused as error:
                raise Refused(f"{error} ({self._kind.needs})") from None
            if isinstance(answer, Mapping) and answer.get("success") is False:
                raise Refused(f"{server.caller.url}{path} has not loaded {weights.folder}: {answer.get('message')}")
        self._check_weights(server, answer, weights)
        with self._changed:
            self._counts["loads"] += 1
            server.label = weights.label

    def _check_weights(self, server: Server, answer: Any, weights: Loadable) -> None:
        """Raises Unavailable if the answer is not from these weights, where the kind of server says from which."""
        if not self._kind.counters:
            return
        found = answer.get("weights") if isinstance(answer, Mapping) else None
        if found != f"{weights.checksum:016x}":
            raise Unavailable(
                f"{server.caller.url} has the weights {found}, and the trainer {weights.checksum:016x}", fault=True
            )


def _has(server: Server, weights: Loadable) -> bool:
    """Whether a server has the weights. Once it has failed, a new process with others may accept connections."""
    return server.label == weights.label
