"""Spreads requests over several servers of one policy, and has each server load the weights before it samples."""

import asyncio
import dataclasses
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rpg_jax.rollout.servers.client import Caller, Client, Look, Refused, ServerError, Unavailable
from rpg_jax.rollout.servers.protocol import Aborted, Loadable, Probe, Unusable
from rpg_jax.rollout.servers.server import STRIKES, Kind, Server

_MOST_FAULTS = 4  # of one request at healthy servers: more come from the request, or the servers' program
_HEALTH_SECONDS = 5.0  # the longest wait for the health of a server that rests or must load weights
_QUIET_SECONDS = 10.0  # without an answer: then a server is asked for its health, and has twice as long to answer
_FOLLOW_SECONDS = 5.0  # between two looks at addresses that may change
_TICK_SECONDS = 0.1  # between two looks at the calls that wait for a server
_SAY_AFTER, _SAY_EVERY = 5.0, 60.0  # seconds without a server

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a server.

    Attributes:
      server: the server, which counts the call until the call ends.
      weights: the weights with which the server must answer.
      begun: when the call began, in seconds of `time.monotonic`.
      sound: whether the server was sound when the call began, see `Server.is_sound`.
    """

    server: Server
    weights: Loadable
    begun: float
    sound: bool


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A request that waits for a server. The servers in `failed` have failed this request already."""

    failed: set[Server]
    call: asyncio.Future[Call]


class Balance:
    """Sends each request to the server with room that has the fewest calls under way. A server without the present
    weights loads them before its next call.

    A server that fails rests until its health is good again. The rest is longer each time that calls fail although the
    health is good. After its rest the server loads the weights, because it may have been started anew. The requests
    that the server had not answered go to other servers, and come back only if no other server lives.

    A server without room (429) gets fewer calls at once, and then slowly more while it answers. Failures and refusals
    of calls that were under way together count once. A server whose address is no longer found gets no further calls.

    `run` and `ask` run in one event loop; `run` must run all the time. An error in `run` is raised by every `ask` that
    waits or comes later. Any thread may call `use`, `begin` and `counts`.

    Args:
      addresses: the URLs of the servers, or a function that looks for the URLs and is called every five seconds.
      client: calls the servers.
      kind: the program of the servers, which says how they load weights.
      parallel: the most calls under way at one server.
      patience: requests that wait fail once no server has answered for so many seconds; but not while a server is
        sound, see `Server.is_sound`, nor while a server that does not rest has a call. A 429 counts as an answer.
      rest: seconds of rest after the first failure, and between two health calls of a server that rests.
    """

    def __init__(
        self,
        addresses: Sequence[str] | Look,
        client: Client,
        kind: Kind,
        *,
        parallel: int,
        patience: float,
        rest: float = 1.0,
    ):
        self._addresses, self._client, self._kind = addresses, client, kind
        self._parallel, self._patience, self._rest = parallel, patience, rest
        self._servers, self._watching = dict[str, Server](), set[asyncio.Task[None]]()
        self._waiting = deque[_Waiting]()
        self._ended: BaseException | None = None
        self._weights: Loadable | None = None
        self._answered = self._said = time.monotonic()
        self._not_found = "no address is known yet"
        self._counts: Counter[str] = Counter()
        self._longest_idle = self._gap = 0.0
        self._warned = set[str]()

    def use(self, weights: Loadable) -> None:
        """Sets the weights that each server must have from its next call on. The call first makes the server load the
        weights, unless the server has them. Calls under way keep their weights. `ask` needs an earlier `use`."""
        self._weights = weights

    def begin(self) -> None:
        """Starts the clock of `patience` anew, for a caller that has asked nothing for some time."""
        self._answered = self._said = time.monotonic()

    def counts(self) -> dict[str, float]:
        """Returns `answering`, the number of sound servers now, see `Server.is_sound`. For the time since the last call
        of `counts`: the numbers of answered `requests`, `refused` calls, `failures` of servers and `loads` of weights;
        `longest_idle`, the longest time, in seconds, for which a server had no call although requests waited, without
        servers that rest or wait after a refusal, and without requests that the server has failed; and, if the weights
        have a probe, `probe_gap`, the largest `Difference.mean` of a server, in nats."""
        taken, self._counts = self._counts, Counter()
        idle, self._longest_idle = self._longest_idle, 0.0
        alive = sum(server.is_sound for server in list(self._servers.values()))
        counted = {name: taken[name] for name in ("requests", "refused", "failures", "loads")}
        gap, self._gap = self._gap, 0.0
        probed = {"probe_gap": gap} if self._weights is not None and self._weights.probe is not None else {}
        return {"answering": alive, **counted, "longest_idle": idle, **probed}

    async def run(self) -> None:
        """Follows the servers' addresses and health, and gives servers to requests that wait. It runs until it is
        cancelled; then it closes the client's connections."""
        followed = time.monotonic()
        if not callable(self._addresses):
            self._follow(self._addresses)
        try:
            while True:
                now = time.monotonic()
                if callable(self._addresses) and now >= followed:
                    followed = now + _FOLLOW_SECONDS
                    await self._look(self._addresses)
                waiting = self._waiting
                for server in self._servers.values():
                    if server.resting or server.calls or now < server.until or all(server in w.failed for w in waiting):
                        server.idle = now
                    self._longest_idle = max(self._longest_idle, now - server.idle)
                if self._waiting:
                    self._dispatch()
                    self._say(now)
                await asyncio.sleep(_TICK_SECONDS)
        except Exception as error:
            self._ended = error
            self._give_up(error)
            raise
        finally:
            for task in self._watching:
                task.cancel()
            await self._client.close()

    def _give_up(self, error: BaseException) -> None:
        while self._waiting:
            if not (call := self._waiting.popleft().call).done():
                call.set_exception(error)

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Posts `body` to /v1/completions of a server, and returns `read(JSON of the answer)`. If a server does not
        answer, has no room, has other weights, or `read` raises Aborted, the request goes to a server again. Raises
        ServerError if a server refuses the request, cannot load or name the weights, or fails the probe; if `read`
        raises Unusable; when `patience` is over; or if four failures at sound servers may be the request's fault."""
        failed, faults = set[Server](), 0
        while True:
            call = await self._take(failed)
            error, answered = None, False
            try:
                if call.server.failed >= call.begun:  # it rests, and will get the weights after that
                    continue
                await self._load(call)
                answer, connected = await call.server.caller.post("/v1/completions", body)
                self._check_weights(call, answer, several=True)
                if not call.begun < call.server.failed < connected:  # else a new process may have accepted the call
                    answered = True
                    return read(answer)
            except Unavailable as unavailable:
                error = unavailable
            except Aborted as aborted:
                error = Unavailable(f"{call.server.caller.url}: {aborted}", fault=True)
            except Refused as refused:
                models = "; servers.model must name one of GET /v1/models" if refused.status == 404 else ""
                raise ServerError(f"{refused}{models}") from None
            except Unusable as unusable:
                raise ServerError(f"{call.server.caller.url} returned no usable completion: {unusable}") from None
            finally:
                self._return(call, error, answered and error is None)
            if error is not None and not error.busy:
                failed.add(call.server)
                faults += error.fault and call.sound
                if faults == _MOST_FAULTS:
                    raise ServerError(f"a request has failed {faults} times, the last time so: {error}")

    async def _take(self, failed: set[Server]) -> Call:
        """Waits for a server, and counts a call there. A server in `failed` is taken only if no other server lives.
        Raises ServerError if no server has answered for `patience` seconds, and the error that has ended `run`."""
        if self._ended is not None:
            raise self._ended
        wait = _Waiting(failed, asyncio.get_running_loop().create_future())
        if failed:
            self._waiting.appendleft(wait)  # it has waited before
        else:
            self._waiting.append(wait)
        self._dispatch()
        try:
            return await wait.call
        except asyncio.CancelledError:
            if wait.call.done() and not wait.call.cancelled() and wait.call.exception() is None:
                self._return(wait.call.result(), None, answered=False)
            raise

    def _dispatch(self) -> None:
        """Gives servers to the requests that wait, in order, as far as servers are free."""
        assert self._weights is not None, "weights are synced before anything is sampled"
        now, left = time.monotonic(), list[_Waiting]()
        while self._waiting:
            wait = self._waiting.popleft()
            if wait.call.done():  # cancelled
                continue
            if (server := self._chosen(wait.failed, now)) is not None:
                if not server.calls:
                    server.heard = now
                server.calls += 1
                wait.call.set_result(Call(server, self._weights, now, server.is_sound))
                continue
            left.append(wait)
            if not wait.failed:  # then no later request has a server either
                break
        self._waiting.extendleft(reversed(left))

    def _chosen(self, failed: set[Server], now: float) -> Server | None:
        """The free server with the fewest calls at the time `now`; None if no server is free. A server in `failed` is
        chosen only if all servers that do not rest are in `failed`."""
        assert self._weights is not None
        living = [server for server in self._servers.values() if not server.resting]
        others = [server for server in living if server not in failed] or living
        free = [server for server in others if server.is_free(self._weights.label, now)]
        return min(free, key=lambda server: server.calls, default=None)

    def _say(self, now: float) -> None:
        """Does nothing if a server that does not rest has a call, or has not failed since its last answer. Otherwise
        prints, now and then, that requests wait; after `patience` seconds without an answer, fails these requests."""
        servers = self._servers.values()
        if any(not server.resting and (server.calls or not server.failures) for server in servers):
            return
        said = "; ".join(server.said for server in servers) or self._not_found
        if now - self._answered > self._patience:
            message = f"no server has answered for {self._patience:g} s (servers.patience_seconds): {said}"
            self._give_up(ServerError(message))
        elif now - self._answered > _SAY_AFTER and now - self._said > _SAY_EVERY * (self._said > self._answered):
            self._said = now
            print(f"waiting for servers since {now - self._answered:.0f} s: {said}", file=sys.stderr, flush=True)

    def _return(self, call: Call, error: Unavailable | None, answered: bool) -> None:
        """Ends a call: it was `answered`, it failed with `error`, or with neither it is no longer wanted."""
        server = call.server
        server.calls -= 1
        server.heard = now = time.monotonic()
        if answered:
            self._counts["requests"] += 1
            self._answered = now
            server.note_answer()
        elif error is not None and error.busy:
            self._counts["refused"] += 1
            self._answered = now
            server.note_refusal(error, call.begun, now)
        elif error is not None:
            self._fail(server, error, call.begun)
        self._dispatch()

    def _fail(self, server: Server, error: Unavailable, begun: float) -> None:
        """Notes that a call that began at `begun` failed. At the third failure in a row of a server, whose health was
        good between them, it prints the server's name."""
        if not server.note_failure(error, begun, time.monotonic()):
            return
        self._counts["failures"] += 1
        if server.failures == STRIKES:
            healthy = f"{server.caller.url} says that it is healthy, and its last {STRIKES} calls have failed"
            print(f"{healthy}; it rests, longer after each: {error}", file=sys.stderr, flush=True)

    async def _look(self, look: Look) -> None:
        """Follows the addresses that `look` finds. They stay if `look` raises or needs more than five seconds."""
        try:
            async with asyncio.timeout(_FOLLOW_SECONDS):  # wait_for of Python 3.11 may lose a cancellation
                found = await look()
        except Exception as error:  # a TimeoutError, or whatever the client of a bucket raises
            self._not_found = f"the servers' addresses cannot be found: {str(error) or 'no answer'}"
            return
        self._not_found = "the list of servers has no address now"
        self._follow(found)

    def _follow(self, urls: Sequence[str]) -> None:
        """Begins to watch the servers of new `urls`. Servers whose URL is not in `urls` get no further calls."""
        for url in self._servers.keys() - set(urls):
            self._servers.pop(url).gone = True
        for url in urls:
            if url not in self._servers:
                self._servers[url] = server = Server(Caller(url, self._client), self._parallel, self._rest)
                server.idle = time.monotonic()
                self._watching.add(task := asyncio.create_task(self._watch(server)))
                task.add_done_callback(self._watched)

    def _watched(self, task: asyncio.Task[None]) -> None:
        self._watching.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended = error  # nobody would end the rest of its server
            self._give_up(error)

    async def _watch(self, server: Server) -> None:
        """Asks a server for its health while the server rests, and when it is silent during calls or with weights. Good
        health ends the rest. If a silent server does not answer, it fails and its calls are broken off. A server that
        is gone is watched until its last call has ended, because a machine that vanishes closes no connection."""
        while server.calls or not server.gone:
            begun, rests, idle = time.monotonic(), server.resting, not server.calls
            if not server.is_due(_QUIET_SECONDS, begun):
                await asyncio.sleep(server.rest / 4)
                continue
            how: Unavailable | None = None
            loads = self._weights is None or server.label != self._weights.label  # nothing else is answered then
            path = self._kind.health if rests or not loads else "/health"
            try:
                await server.caller.look(_HEALTH_SECONDS if rests else 2 * _QUIET_SECONDS, path)
            except Unavailable as error:
                how = error
            if rests:
                server.note_health(how, time.monotonic())
            elif how is not None and (idle or server.heard < begun):
                self._fail(server, how, begun)
                server.caller.break_off()
            server.heard = time.monotonic()
            if self._waiting:
                self._dispatch()

    async def _load(self, call: Call) -> None:
        """Makes the server of `call` load its weights, unless the server has them. Meanwhile the server has no other
        call. Raises ServerError if the server refuses or does not say which weights it has; Unavailable if it does not
        answer, or has other weights after the load; and as `_compare`, with the answer to the probe."""
        server, weights = call.server, call.weights
        if server.label == weights.label:
            return
        await server.caller.look(_HEALTH_SECONDS, self._kind.health)
        answer: Any = None
        try:
            for path, body in self._kind.loads(weights.folder, weights.label):
                answer, _ = await server.caller.post(path, body)
                if isinstance(answer, Mapping) and answer.get("success") is False:
                    raise Refused(f"{server.caller.url}{path} has not loaded {weights.folder}: {answer.get('message')}")
        except (Refused, Unavailable) as error:
            contrary = self._kind.contrary is not None and self._kind.contrary in str(error)
            if error.status:
                error.args = (f"{error} ({self._kind.needs})",)
            if isinstance(error, Refused) != contrary:
                raise ServerError(str(error)) from None
            raise (Unavailable(str(error)) if contrary else error) from None
        self._check_weights(call, answer)
        if weights.probe is not None:
            answer, _ = await server.caller.post("/v1/completions", weights.probe.body)
            self._compare(server, weights.probe, answer)
        self._counts["loads"] += 1
        if server.failed < call.begun:  # otherwise a new process, with other weights, may have answered in part
            server.label = weights.label
            self._dispatch()

    def _compare(self, server: Server, probe: Probe, answer: Any) -> None:
        """Raises ServerError if the log-probs in `answer`, a server's answer to `probe.body`, differ by more than
        `probe.fails` from the trainer's; and as `Probe.difference`. Above `probe.warns`, it warns once a server."""
        found, url = probe.difference(answer), server.caller.url
        self._gap = max(self._gap, found.mean)
        if not found.mean > probe.warns:
            return
        difference = (
            f"{url} and the trainer disagree by {found.mean:.2g} nats on average about a greedy completion, after it "
            f"has loaded the trainer's weights: the log-prob of token {found.token} is {found.server:.4f} there and "
            f"{found.trainer:.4f} here"
        )
        if found.mean > probe.fails:
            raise ServerError(f"{difference}. The limit is {probe.fails:g} ({self._kind.needs})")
        if url not in self._warned:
            self._warned.add(url)
            print(f"warning: {difference}. {probe.warns:g} is usual", file=sys.stderr, flush=True)

    def _check_weights(self, call: Call, answer: Any, several: bool = False) -> None:
        """Raises Unavailable if a server names other weights than those of `call`, and ServerError if this project's
        server names none. `several`: the answer is a completion. This project's server lists all weights that have
        drawn its tokens; SGLang names the label of its last load."""
        url, said = call.server.caller.url, answer if isinstance(answer, Mapping) else {}
        if self._kind.counters:
            if isinstance(answer, Mapping) and "weights" not in answer:
                raise ServerError(f"{url} does not say which weights it has ({self._kind.needs})")
            found, expected = said.get("weights"), f"{call.weights.checksum:016x}"
        else:
            named, expected = said.get("metadata"), call.weights.label
            found = named.get("weight_version", expected) if expected and isinstance(named, Mapping) else expected
        if found != ([expected] if several and self._kind.counters else expected):
            raise Unavailable(f"{url} has the weights {found}, and the trainer {expected}", fault=True)
