"""Several servers of one policy: who is asked next, who rests after a failure, and who must load the weights first."""

import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rpg_jax.rollout.served.answers import Aborted, Unusable
from rpg_jax.rollout.served.calls import Batch, Caller, Refused, ServerError, Superseded, Unavailable
from rpg_jax.rollout.served.kinds import Kind
from rpg_jax.rollout.served.standing import STRIKES, Server

_MOST_FAULTS = 4  # of one request, at servers that were in order: then it is the request, or the servers' program
_HEALTH_SECONDS = 5.0  # the longest wait for an answer about its health, of a server that rests or must load
_QUIET_SECONDS = 30.0  # without an answer: then a server is asked for its health, and has as long for the answer
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


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a server, begun at a time, for weights; `sound`: the server had answered since it failed last."""

    server: Server
    weights: Loadable
    begun: float
    sound: bool

    def is_wanted(self) -> bool:
        """Whether the server has not failed since: a new process with other weights may accept the connection."""
        return self.server.failed < self.begun


class Balance:
    """Sends each request to the server with the fewest, of those that answer and have the present weights.

    A server that fails rests until its health is good again, longer each time that calls fail although it is. Then it
    loads the weights: it may have been started anew. What it had not answered goes to the others, and comes back to it
    only if no other lives. A server without room (429) gets fewer calls at once, and one more after each round.
    Failures and refusals of calls that were under way together count once. Any thread may call the methods.

    Args:
      parallel: most calls under way at one server.
      patience: seconds without any server that answers, after which a call fails.
      rest: seconds after the first failure, and between health calls.
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
        self._servers, self._kind = [Server(caller, parallel, rest) for caller in callers], kind
        self._parallel, self._patience, self._clock = parallel, patience, clock
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._weights: Loadable | None = None
        self._answered = self._said = clock()
        self._counts: Counter[str] = Counter()
        for server in self._servers:
            threading.Thread(target=self._watch, args=(server,), name="rpg-health", daemon=True).start()

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

    def close(self) -> None:
        """Ends the health calls."""
        self._closed.set()

    def ask(self, body: Mapping[str, Any], read: Callable[[Any], T], batch: Batch) -> T:
        """The answer to a request for completions, as `read` understands it.

        Raises:
          ServerError: a server refuses or answers what cannot be used, no server has answered for long, or the request
            has failed at several that were in order.
          Stopped: the batch has ended.
        """
        failed, faults = set[Server](), 0
        while True:
            call = self._take(batch, failed)
            how: Unavailable | Superseded | None = None
            try:
                self._load(call, batch)
                answer = call.server.caller.post("/v1/completions", body, batch, call.is_wanted)
                self._check_weights(call, answer, several=True)
                return read(answer)
            except (Unavailable, Superseded) as error:
                how = error
            except Aborted as error:
                how = Unavailable(f"{call.server.caller.url}: {error}", fault=True)
            except Refused as error:
                models = "; servers.model must name one of GET /v1/models" if error.status == 404 else ""
                raise ServerError(f"{error}{models}") from None
            except Unusable as error:
                raise ServerError(f"{call.server.caller.url} returned no usable completion: {error}") from None
            finally:
                self._return(call, how, batch)
            if batch.stopped:
                raise Stopped
            if isinstance(how, Unavailable) and not how.busy:
                failed.add(call.server)
                faults += how.fault and call.sound
                if faults == _MOST_FAULTS:
                    raise ServerError(f"a request has failed {faults} times, the last time so: {how}")

    def counts(self) -> dict[str, float]:
        """Servers that answer, and what happened since the last call."""
        with self._changed:
            taken, self._counts = self._counts, Counter()
            alive = sum(server.is_sound for server in self._servers)
            return {"answering": alive, **{name: taken[name] for name in ("requests", "refused", "failures", "loads")}}

    def _take(self, batch: Batch, failed: set[Server]) -> Call:
        """The next call, counted. Waits for a server; raises ServerError if none answers."""
        with self._changed:
            while True:
                if batch.stopped:
                    raise Stopped
                weights, now = self._weights, self._clock()
                assert weights is not None, "weights are synced before anything is sampled"
                living = [server for server in self._servers if not server.resting]
                others = [server for server in living if server not in failed] or living
                if free := [server for server in others if server.is_free(weights.label, now)]:
                    server = min(free, key=lambda server: server.calls)
                    if not server.calls:
                        server.heard = now
                    server.calls += 1
                    return Call(server, weights, now, server.is_sound)
                self._say(now)
                self._changed.wait(0.1 if any(server.until > now for server in self._servers) else 1.0)

    def _say(self, now: float) -> None:
        """Says that no server answers, and raises ServerError in the end."""
        if any(not server.resting and (server.calls or not server.failures) for server in self._servers):
            return
        said = "; ".join(server.said for server in self._servers)
        if now - self._answered > self._patience:
            raise ServerError(f"no server has answered for {self._patience:g} s (servers.patience_seconds): {said}")
        if now - self._answered > _SAY_AFTER and now - self._said > (_SAY_EVERY if self._said > self._answered else 0):
            self._said = now
            print(f"waiting for servers since {now - self._answered:.0f} s: {said}", file=sys.stderr, flush=True)

    def _return(self, call: Call, error: Unavailable | Superseded | None, batch: Batch) -> None:
        server = call.server
        with self._changed:
            server.calls -= 1
            server.heard = now = self._clock()
            if error is None:
                self._counts["requests"] += 1
                self._answered = now
                server.note_answer()
                self._changed.notify(2)  # its place, and the one that the limit may have got; thousands may wait
            elif isinstance(error, Unavailable) and error.busy:
                self._counts["refused"] += 1
                self._answered = now
                server.note_refusal(error, call.begun, now)
            else:
                if isinstance(error, Unavailable) and not batch.stopped:
                    self._fail(server, error, call.begun)
                self._changed.notify_all()

    def _fail(self, server: Server, error: Unavailable, begun: float) -> None:
        """Notes the failure of a call. A server that is healthy, and fails its calls all the same, is named."""
        if not server.note_failure(error, begun, self._clock()):
            return
        self._counts["failures"] += 1
        if server.failures == STRIKES:
            healthy = f"{server.caller.url} says that it is healthy, and its last {STRIKES} calls have failed"
            print(f"{healthy}; it rests, longer after each: {error}", file=sys.stderr, flush=True)

    def _watch(self, server: Server) -> None:
        """Asks for the health of a server that rests, or that is quiet while calls are under way."""
        while not self._closed.is_set():
            with self._changed:
                begun, rests = self._clock(), server.resting
                due = server.is_due(_QUIET_SECONDS, begun)
            if not due:
                self._closed.wait(server.rest / 4)
                continue
            how: Unavailable | None = None
            try:
                server.caller.look(_HEALTH_SECONDS if rests else _QUIET_SECONDS)
            except Unavailable as error:
                how = error
            with self._changed:
                now, hangs = self._clock(), False
                if rests:
                    server.note_health(how, now)
                elif how is not None and server.heard < begun:
                    self._fail(server, how, begun)
                    hangs = True
                server.heard = now
                self._changed.notify_all()
            if hangs:
                server.caller.break_off()

    def _load(self, call: Call, batch: Batch) -> None:
        """Makes a server load the weights if it has not; nothing else is under way there then.

        Raises ServerError if it refuses.
        """
        server, weights = call.server, call.weights
        if server.label == weights.label:
            return
        server.caller.look(_HEALTH_SECONDS)
        try:
            for path, body in self._kind.loads(weights.folder, weights.label):
                answer = server.caller.post(path, body, batch)
                if isinstance(answer, Mapping) and answer.get("success") is False:
                    raise Refused(f"{server.caller.url}{path} has not loaded {weights.folder}: {answer.get('message')}")
        except Refused as error:
            raise ServerError(f"{error} ({self._kind.needs})") from None
        except Unavailable as error:
            if error.status:
                error.args = (f"{error} ({self._kind.needs})",)
            raise
        self._check_weights(call, answer)
        with self._changed:
            self._counts["loads"] += 1
            if call.is_wanted():
                server.label = weights.label
                self._changed.notify_all()

    def _check_weights(self, call: Call, answer: Any, several: bool = False) -> None:
        """Raises Unavailable if an answer names other weights, where the kind of server names them.

        That of a completion names `several`: all that have drawn its tokens.
        """
        if not self._kind.counters:
            return
        url, expected = call.server.caller.url, f"{call.weights.checksum:016x}"
        found = answer.get("weights") if isinstance(answer, Mapping) else None
        if found != ([expected] if several else expected):
            raise Unavailable(f"{url} has the weights {found}, and the trainer {expected}", fault=True)
