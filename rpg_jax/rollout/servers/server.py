"""A server as the trainer knows it: its program's way to load weights, how many calls it gets, when it rests.

The test `tests/end_to_end/test_engines.py` ran with vLLM 0.32.0 and SGLang 0.5.23 on a CPU."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from rpg_jax.rollout.servers.client import Caller, Unavailable

Post = tuple[str, Mapping[str, Any]]
"""(path, the JSON object to post there)."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One program of servers, such as vLLM.

    Attributes:
      loads: from (folder of weights, label) to the calls, in order, that make the server use these weights; [] if it
        loads none. The calls empty the server's cache of prefixes. They break off the completions under way, but this
        project's own server lets them end first.
      needs: what must serve, and how it must be started for `loads`, as a sentence for messages.
      counters: whether the program is this project's own: it draws this project's random numbers, and every answer has
        the checksum of the weights. Servers of other programs are probed after each load.
      contrary: a text in an answer to a load that means the contrary of the answer's status; None: no such text. vLLM
        says at status 500 that every load would fail. SGLang says at 400 that a request must end first.
      health: the path of the health of the program that samples. vLLM's /health is the health of its HTTP server, which
        answers while the engine hangs.
      head: whether a folder of a model with tied embeddings must have the head as a tensor of its own too. vLLM keeps a
        packed copy of the head on a CPU, which a reload replaces only where the folder has the tensor.
      drawn: the number of tokens, 0 or 1, that a request for the scores of a text draws. SGLang refuses to draw none.
    """

    loads: Callable[[str, str], list[Post]]
    needs: str
    counters: bool = False
    contrary: str | None = None
    health: str = "/health"
    head: bool = False
    drawn: int = 0


def _vllm(folder: str, label: str) -> list[Post]:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [("/pause?mode=abort", {}), ("/collective_rpc", reload), ("/reset_prefix_cache", {}), ("/resume", {})]


def _from_disk(folder: str, label: str, **options: bool) -> list[Post]:
    return [("/update_weights_from_disk", {"model_path": folder, "weight_version": label, **options})]


KINDS = {
    "vllm": Kind(
        _vllm,
        "servers.kind=vllm needs vLLM with a model of the trainer's shapes, which sees the folder servers.weights, "
        "started with VLLM_SERVER_DEV_MODE=1, where only the trainer reaches it",
        contrary="collective_rpc method failed",
        health="/is_paused",
        head=True,
    ),
    "sglang": Kind(
        functools.partial(_from_disk, abort_all_requests=True, flush_cache=True),
        "servers.kind=sglang needs SGLang with a model of the trainer's shapes, which sees the folder servers.weights",
        contrary="the cache was not flushed",
        drawn=1,
    ),
    "rpg_jax": Kind(
        _from_disk,
        "servers.kind=rpg_jax needs this project's server with a model of the trainer's shapes, started with "
        "--weights_from=FOLDER, the folder servers.weights",
        counters=True,
    ),
}
"""The programs by the value of the config field `servers.kind`."""

TEACHER = Kind(lambda folder, label: [], "reference.path needs servers with OpenAI's completions, echo and logprobs")
"""Servers of a teacher, which load nothing."""


STRIKES = 3  # incidents without an answer between them, at a server that says that it is healthy
_LONGEST_REST, _DOUBLINGS = 30.0, 10  # seconds; the most times that a rest doubles
_FEWER, _SHARE = 0.75, 16  # a refusal leaves 3/4 of the limit; a round of answers adds a call, or 1/16 of it


@dataclasses.dataclass(eq=False)
class Server:
    """One server, as `Balance` counts its calls in its event loop, without a lock. All times are seconds of
    `time.monotonic`. Calls that were under way together and failed count as one failure of the server. Calls that were
    refused together count as one refusal.

    Attributes:
      caller: posts to the server.
      most: the most calls at once, if the server has room for all of them.
      rest: seconds of rest after the first failure, and between health calls that fail.
      limit: the most calls under way. It falls when the server has no room, and rises while the server answers.
      calls: the number of calls under way.
      label: the label of the weights that the server has loaded; "" if unknown.
      heard: when the silence of the server began: at its last call that ended, its last health call, or the begin of
        the first call under way.
      idle: the last time that does not count for `longest_idle` of `Balance.counts`.
      refused: the time of the last refusal: the server had no room.
      failed: the time of the last failure.
      failures: the number of failures since the server's last answer to a completion request.
      gone: whether the server's address is no longer found.
      resting: whether the server has not yet said that it is healthy, at all or since its last failure.
      until: the time before which the server gets no call, nor a health call while it rests.
      said: the message of the last failure, or of the last health call that failed.
    """

    caller: Caller
    most: int
    rest: float
    limit: float = dataclasses.field(init=False)
    calls: int = 0
    label: str = ""
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
        """Whether the server does not rest, and has answered a completion request since its last failure, if any."""
        return not (self.resting or self.failures)

    def is_free(self, label: str, now: float) -> bool:
        """Whether a server that does not rest can have one more call for the weights `label` at the time `now`. A
        server that must load these weights first has one call only, which makes it load."""
        return now >= self.until and self.calls < (int(self.limit) if self.label == label else 1)

    def is_due(self, quiet: float, now: float) -> bool:
        """Whether to ask for the server's health at the time `now`: at the end of a rest, or if nothing was heard for
        `quiet` seconds of a server that has calls or weights: another process in its place would have other weights."""
        return now >= self.until if self.resting else bool(self.calls or self.label) and now - self.heard >= quiet

    def note_answer(self) -> None:
        """Notes that a call was answered: sets `failures` to 0, and raises `limit`, to `most` at most."""
        self.failures, self.limit = 0, min(self.most, self.limit + 1 / min(self.limit, _SHARE))

    def note_refusal(self, error: Unavailable, begun: float, now: float) -> None:
        """Notes at the time `now` that the server had no room for a call that began at `begun`. If the call began after
        the last refusal, `limit` falls by a quarter, to 1 at least, and the server gets no call for `error.after`
        seconds: 30 at most, and at least `rest` if it has no other call."""
        if begun > self.refused:
            self.refused, self.limit = now, max(1, self.limit * _FEWER)
            self.until = now + min(max(error.after, 0.0 if self.calls else self.rest), _LONGEST_REST)

    def note_failure(self, error: Unavailable, begun: float, now: float) -> bool:
        """Notes at the time `now` that a call that began at `begun` has failed. Returns whether this is a new failure:
        the call began after the last failure. Then the server rests, twice as long after each failure in a row, at
        least `error.after` and at most 30 seconds, and its weights count as unknown."""
        if begun < self.failed:
            return False
        rest = self.rest * 2 ** min(self.failures, _DOUBLINGS)
        self.until = now + min(max(error.after, rest), _LONGEST_REST)
        self.failed, self.failures, self.resting, self.said = now, self.failures + 1, True, str(error)
        self.label = ""
        return True

    def note_health(self, error: Unavailable | None, now: float) -> None:
        """Notes the result of a health call during a rest: None, good health, ends the rest. After an `error` the next
        health call comes `rest` seconds after `now`."""
        self.resting = error is not None
        if error is not None:
            self.until, self.said = now + self.rest, str(error)
