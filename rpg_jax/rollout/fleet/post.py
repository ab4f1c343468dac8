"""A worker's place at one process of a trainer: the calls of the protocol, in the worker's terms."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.fleet.link import Link
from rpg_jax.rollout.interface import Request
from rpg_jax.storage import journal_records
from rpg_jax.types import Completion


class Loan(NamedTuple):
    """Groups to sample: `places` of the request's prompts, with the weights of `checksum`.

    `job` counts the requests of the trainer's process; `version` is that of the weights.
    """

    job: int
    request: Request
    places: list[int]
    checksum: int
    version: int


class RunIsOver(Exception):
    """The trainer has taken its last step."""


class Post:
    """Joins the trainer's process behind `link`. Any thread may call the methods; they raise as `Link.call` does.

    Args:
      worker: the id of this worker, the same at all processes.
      hello: what the trainer asks of a worker, see `Hub.join`.

    Attributes:
      spec: what the trainer says about the run.
      trainers: the addresses of all its processes.
    """

    def __init__(self, link: Link, worker: str, hello: Mapping[str, Any]):
        self._link, self._common = link, {"worker": worker}
        answer, _ = link.call("Join", {**self._common, **hello})
        self._common["session"] = answer["session"]
        self.spec: dict[str, Any] = answer["spec"]
        self.trainers: list[str] = answer["trainers"]

    def leave(self) -> None:
        """Asks once: a trainer that is gone finds out by itself. No call goes out afterwards."""
        try:
            self._link.call("Leave", self._common, once=True)
        finally:
            self._link.close()

    def beat(self, progress: int) -> None:
        """Raises RunIsOver when it is."""
        if self._link.call("Beat", {**self._common, "progress": progress})[0]["over"]:
            raise RunIsOver

    def lease(self, room: int, progress: int) -> Loan | None:
        """Groups of about `room` completions; None if there is nothing to do. Raises RunIsOver when it is."""
        head, body = self._link.call("Lease", {**self._common, "room": room, "progress": progress})
        if head["over"]:
            raise RunIsOver
        if not head["places"]:
            return None
        request = messages.request_from_wire(head["request"], body)
        return Loan(head["job"], request, head["places"], int(head["weights"], 16), head["version"])

    def complete(self, loan: Loan, place: int, group: Sequence[Completion]) -> None:
        """Returns a group. It carries the checksum of the weights that sampled it."""
        key = {"job": loan.job, "place": place, "weights": f"{loan.checksum:016x}", "version": loan.version}
        self._link.call("Complete", self._common, journal_records.to_bytes(key, group))

    def release(self, loan: Loan, places: Sequence[int], fault: str | None) -> None:
        """Gives groups back that were not sampled; `fault` says why, if that is the worker's."""
        self._link.call("Release", {**self._common, "job": loan.job, "places": list(places), "fault": fault})

    def weights(self, name: str, moved: Any) -> tuple[messages.Head, bytearray]:
        """This process's part of the weights; see `Link.read`."""
        return self._link.read(name, moved)
