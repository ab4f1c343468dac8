"""Rollouts for later steps in a thread of their own while the trainer trains, with bounded staleness.

The batch of step s begins when s − max_staleness steps are trained, not earlier. So no token comes from older weights.
(A group that dynamic sampling carries over is one step older.) Trained weights replace the rollout's weights between
two batches: a batch comes from the weights after exactly max(0, s − max_staleness) steps. Runs are reproducible bit for
bit, whatever the threads do.

Groups carry the log-probability with which every token was drawn. The trainer recomputes this number for completions of
its present weights, as without this module. For completions of earlier weights the rollout's number serves as log
π_old, unless `Algorithm.decoupled` is set.

On several devices the rollout has devices of its own. Two threads that launch programs on the same devices may launch
them in another order on each device, and programs that exchange data across devices then wait for ever. So this
module's thread launches nothing across the trainer's devices. The trainer's thread launches nothing across the
rollout's devices, except when the rollout is idle (an evaluation). Staged weights pass from the trainer to the rollout
by a transfer; completions pass on the host.

A checkpoint waits for the batches under way and stores them with the groups carried over. A resumed run trains them,
and is the same run. A run that is made longer later differs from a run that was long from the start: nothing is sampled
beyond the last step, so the first batches of the longer part come from newer weights.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from rpg_jax.data import Group
from rpg_jax.data.groups import decode_groups, encode_groups
from rpg_jax.rollout import RolloutError, Staged
from rpg_jax.training.collect import Collected, Collector

_LISTS = ("generated", "pending", "trained", "carried", "dropped")


@dataclasses.dataclass(eq=False, kw_only=True)
class AheadCollector(Collector):
    """Collects the groups of `max_staleness` steps to come, in a thread, while the trainer trains.

    Attributes:
      generator, stream: as in `Collector`; one thread at a time uses them. The rollout is on other devices than the
        trainer's, unless there is one device only.
      max_staleness: steps, at least 1.
      steps: the number of steps of the run; nothing is sampled for later steps.

    Raises ValueError if the run has several processes and no servers sample for it.
    """

    max_staleness: int
    steps: int
    lags = True

    def __post_init__(self) -> None:
        if jax.process_count() > 1 and not self.rollout.apart:
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} on {jax.process_count()} processes needs rollout.driver="
                "servers: threads of several hosts launch programs that span them in different orders. Or set it to 0"
            )
        self._jobs: dict[int, Future[Collected]] = {}
        self._versions: dict[int, int] = {}
        self._turn = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rpg-ahead")

    def take(self, step: int, params: Any, version: int) -> Collected:
        """Hands the thread the batches of steps up to `step` + max_staleness that it lacks, and a copy of `params` to
        sample them with; then waits for the groups of `step`. Called once a step, in order; `step` counts from 0.
        `params` are the trainer's weights and `version` their number of updates. Raises RolloutError if a token is from
        weights of more than max_staleness steps ago (one more in a group carried over), and the errors of sampling."""
        self._versions = {s: v for s, v in self._versions.items() if s >= step - self.max_staleness - 1}
        self._versions[step] = version
        due = [s for s in range(step, min(step + self.max_staleness + 1, self.steps)) if s not in self._jobs]
        if due:
            policy = self.rollout.weights.stage(params)
            self._jobs |= {s: self._thread.submit(self._sample, s, policy, version) for s in due}
        collected = self._jobs.pop(step).result()
        self._check(step, collected)
        return aged(collected, version)

    def publish(self, params: Any, version: int) -> None:
        """Does nothing: the next `take` hands the weights to the batch that it begins."""

    def sync(self, params: Any, version: int) -> None:
        """Gives the rollout a copy of `params`, the weights after `version` updates: the next step donates `params`
        while the rollout samples. Raises RolloutError unless the rollout then holds the same bits, in its own dtype."""
        super().sync(self.rollout.weights.stage(params), version)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which the rollout serves the caller alone. Entering waits for all batches that `take` has begun,
        so that no host evaluates before a batch and another host after it. A later `take` raises a batch's error."""
        wait(self._jobs.values())
        with self._turn:
            yield

    def record(self) -> dict[str, Any]:
        """Returns all that a resume needs, JSON-able. Waits for the batches that have begun; raises their errors."""
        ahead = {
            "batches": {str(step): _encode(job.result()) for step, job in self._jobs.items()},
            "carried": encode_groups(self.carried),
            "versions": {str(step): version for step, version in self._versions.items()},
        }
        return {"ahead": ahead, "stream": self.stream.state(), "pending": "", "share": self.share}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes back to the state that `record` returned. Raises ValueError if a run without staleness wrote it, or if
        the stream has other problems or another seed."""
        state = record["ahead"]
        if state is None:
            raise ValueError("the checkpoint was written with rollout.max_staleness=0 and this run has more")
        for job in self._jobs.values():
            job.result()
        self._jobs = {int(step): _decode(batch) for step, batch in state["batches"].items()}
        self.carried, self.share = decode_groups(state["carried"]), record["share"]
        self._versions = {int(step): version for step, version in state["versions"].items()}
        self.stream.restore(record["stream"])

    def close(self) -> None:
        """Begins no more batches and returns at once. A batch under way goes on until the rollout is closed."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _sample(self, step: int, policy: Staged, version: int) -> Collected:
        with self._turn:
            self.rollout.sync_weights(policy, version)
            self.rollout.weights.verify(policy)
            collected = _marked(self._next(step))
            self.carried = collected.carried
            return collected

    def _check(self, step: int, collected: Collected) -> None:
        carried = {id(g) for g in collected.pending}
        for group in collected.trained:
            first = step - self.max_staleness - (id(group) in carried)
            allowed = min(version for s, version in self._versions.items() if s >= first)
            oldest = min(c.weight_version for c in group.completions)
            if oldest < allowed:
                raise RolloutError(
                    f"step {step} would train on tokens of weights version {oldest}, but rollout.max_staleness="
                    f"{self.max_staleness} allows none before version {allowed}"
                )


def aged(collected: Collected, version: int) -> Collected:
    """Returns a copy whose groups to train are those of `without_present`, with the metrics of `staleness`. `version`
    is that of the trainer's weights."""
    trained = collected.trained
    return dataclasses.replace(
        collected, trained=without_present(trained, version), staleness=staleness(trained, version)
    )


def without_present(groups: Sequence[Group], version: int) -> list[Group]:
    """Returns copies of the groups with the rollout's log-probs as `behaviour_logprobs`, f32[n] a completion of n
    tokens. Tokens of weights `version` get NaN: the trainer computes these."""

    def known(completion):
        return np.where(completion.token_versions == version, np.float32(np.nan), completion.logprobs)

    return [dataclasses.replace(g, behaviour_logprobs=[known(c) for c in g.completions]) for g in groups]


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Returns the metrics staleness_updates and staleness_updates_max: mean and maximum, over the tokens (at least
    one) that the policy sampled in `groups`, of the updates between the weights that drew a token and `version`."""
    ages = np.concatenate([version - c.token_versions[c.sampled] for g in groups for c in g.completions])
    return {"staleness_updates": float(ages.mean()), "staleness_updates_max": int(ages.max())}


def _marked(collected: Collected) -> Collected:
    """Returns `collected` with the rollout's log-probs as behaviour log-probs. A group is one object in all lists."""
    marked = {
        id(g): dataclasses.replace(g, behaviour_logprobs=[c.logprobs for c in g.completions])
        for name in _LISTS
        for g in getattr(collected, name)
    }
    lists: dict[str, Any] = {name: [marked[id(g)] for g in getattr(collected, name)] for name in _LISTS}
    return dataclasses.replace(collected, **lists)


def _encode(collected: Collected) -> dict[str, Any]:
    lists = {name: getattr(collected, name) for name in _LISTS}
    distinct = list({id(g): g for members in lists.values() for g in members}.values())
    number = {id(g): i for i, g in enumerate(distinct)}
    places = {name: [number[id(g)] for g in members] for name, members in lists.items()}
    counts = {"first_batch": collected.first_batch}
    return {"groups": encode_groups(distinct), "places": places, "counts": counts, "errors": dict(collected.errors)}


def _decode(state: Mapping[str, Any]) -> Future[Collected]:
    distinct = decode_groups(state["groups"])
    lists: dict[str, Any] = {name: [distinct[i] for i in places] for name, places in state["places"].items()}
    future: Future[Collected] = Future()
    future.set_result(Collected(**lists, first_batch=state["counts"]["first_batch"], errors=state["errors"]))
    return future
