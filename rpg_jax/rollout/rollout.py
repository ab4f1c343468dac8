"""The interface of a rollout, and the way of a request: through the journal, among the hosts, to the driver.

`Rollout.generate` is the only entry. It asks the journal for groups that are complete already. The driver samples the
other groups, by `sample`. Where hosts share one list of prompts, `sample_from_shared_list` gives the driver one parcel
of prompts after the other. A host is a process of the run; a place is the index of a prompt in its request.
"""

import abc
import contextlib
import dataclasses
import enum
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from rpg_jax.parallel import hosts
from rpg_jax.rewards.verdicts import CHANCE
from rpg_jax.rollout.request import Request
from rpg_jax.rollout.weights import Params, Staged, Weights
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion

_PARCELS = 64  # parcels of a host, on average: so its last parcel is a small part of its work
_LOOK = 0.005  # seconds between two looks at the slots

Groups = list[list[Completion]]
Key = dict[str, Any]


class Split(enum.Enum):
    """How the n hosts of a run divide the prompts of a call of `Rollout.generate`.

    SHARE: each host asks for its share, every n-th prompt.
    TOGETHER: all hosts ask for all prompts, decode each prompt together, and get all groups.
    TAKEN: all hosts ask for all prompts, and each host samples and gets the groups that it takes from a shared list.
    """

    SHARE = enum.auto()
    TOGETHER = enum.auto()
    TAKEN = enum.auto()


class Rollout(abc.ABC):
    """Generates completions for the trainer, an evaluation or a server's client. A driver implements `sample`.

    The random numbers of a completion's tokens depend on (seed, step, prompt_id, index) and the token's position; not
    on slots, batching, order, driver or devices. So equal logits give equal tokens. Programs of different shapes round
    logits differently: in float32 the tokens are still the same, unless two logits agree to seven digits; in bfloat16
    a completion may change where two tokens are almost equally probable.

    Attributes:
      weights: the weights of the next dispatch; their `version` is the `weight_version` of completions. Only
        `sync_weights` replaces them; they are staged, verified and summed up by their own methods.
      apart: whether completions are sampled in other processes. `generate`, `exchange` and a sync of staged weights
        then launch no program here, so any thread may call them on any number of hosts.
      split: how several hosts divide the prompts. Only a `Feedable` rollout can have TAKEN.
      engine: the `DecodeEngine` that decodes in this process; None where another program decodes.
    """

    weights: Weights
    engine: Any = None
    apart: bool = False
    split: Split = Split.SHARE

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        """Makes `params` the rollout's weights from the next dispatch on, with the number `version`. Lockstep waits for
        calls that sample; with JetStream they raise RolloutError. If dtype and layout are the trainer's, nothing is
        copied: a trainer that donates these arrays must sync again before the next `generate`."""
        self.weights.sync(params, version)

    def generate(self, request: Request, journal: "GroupJournal | None" = None) -> Groups:
        """Blocks until the completions are drawn, and returns the completions of each prompt, in the prompts' order.

        A prompt has [] if it is in `request.done`, or if another host took it. With a journal, only the groups that the
        journal lacks are sampled, and the journal keeps them; `done` and `places` must be unset. The completions are
        the same without a journal. If `split` is not SHARE, all hosts call this together, with the same prompts.

        Raises ValueError if a token is not in the vocabulary, or a prompt with its limit of tokens is longer than a
        slot; RolloutError, perhaps with a cause, if sampling fails: the next call starts afresh."""
        if journal is None:
            return self._sampled(request)
        found, missing = journal.look_up(request, self.weights, self.split)
        for place, group in found.items():
            if request.on_group is not None:
                request.on_group(place, group)
        groups = [[] for _ in request.prompts] if missing is None else self._sampled(missing)
        return [found.get(place, group) for place, group in enumerate(groups)]

    def _sampled(self, request: Request) -> Groups:
        if self.split is Split.TAKEN:
            assert isinstance(self, Feedable), "a list is shared by rollouts that can be fed"
            return sample_from_shared_list(self, request)
        return self.sample(request)

    @abc.abstractmethod
    def sample(self, request: Request) -> Groups:
        """Samples the completions of each prompt, here or by servers, and returns them in the order of the prompts; []
        for a prompt in `request.done`. Blocks. Raises ValueError if the request does not fit the engine, and
        RolloutError if sampling fails."""

    def exchange(self, value: bytes) -> list[bytes]:
        """The `value` of every host, in the order of the hosts. All hosts call this together, and wait for all."""
        return hosts.all_gather_bytes(value)

    def take_counts(self) -> dict[str, float]:
        """Metrics, by name, of the servers that sample, since the last call; {} without servers. All hosts call it."""
        return {}

    def close(self) -> None:  # noqa: B027, most drivers hold nothing to end
        """Ends the rollout's threads, if any, and frees their cache, but no weights. No other call may follow."""


class Feedable(Rollout):
    """A rollout that takes further requests while it samples others. A driver implements `begin` and `has_room`."""

    def sample(self, request: Request) -> Groups:
        """Begins the request, waits for its completions, and returns them as `Rollout.sample` does."""
        with self.begin(request) as completions:
            return completions()

    @abc.abstractmethod
    def begin(self, request: Request) -> AbstractContextManager[Callable[[], Groups]]:
        """A context that begins to sample. Its block gets a function that waits for the completions and returns them as
        `sample` does. An exception in the block cancels the request. Entry and function raise as `sample` does."""

    @property
    @abc.abstractmethod
    def has_room(self) -> bool:
        """Whether no completion waits for a slot. Raises RolloutError if the threads that sample have ended."""


class GroupJournal:
    """The run's journal as a rollout uses it: it gives complete groups to a request, and keeps each new group.

    A group's key has everything that its completions depend on: the checksum and the version of the weights, the
    request's counters and sampling parameters, the prompt, and `settings`. An environment's answers should depend on
    the problem and the conversation alone. If not, a group that is sampled afresh may differ; both groups are valid.

    Where hosts ask for the same prompts (`Split`), each host needs to know what the other hosts have found. Hosts that
    decode together use the groups that all of them have found, and each host keeps every n-th group. Hosts that take
    prompts from a list return a group once: one of the hosts that have found the group returns it.

    Args:
      journal: stores this host's groups across restarts.
      settings: the settings of decoding on which completions depend, by name, as JSON can hold them.
    """

    def __init__(self, journal: Journal, settings: Mapping[str, Any]):
        self._journal, self._settings = journal, dict(settings)

    def look_up(
        self, request: Request, weights: Weights, split: Split
    ) -> tuple[dict[int, list[Completion]], Request | None]:
        """Looks for the groups of `request` under `weights`. If `split` is not SHARE, all hosts call this together.
        Returns two things: the groups that this host contributes, by place; and the request for all groups that were
        not found, None if there are none. The journal keeps the new groups that are sound, see `_is_sound`."""
        keys, wanted = self._keys(request, weights), len(request.prompts)
        sizes = [len(request.indices(place)) for place in range(wanted)]
        found, elsewhere = self._journal.find(keys), frozenset[int]()
        if split is Split.TOGETHER:
            by_all = set(found).intersection(*_found_by_each(found))
            found = {place: group for place, group in found.items() if place in by_all}
        if split is Split.TAKEN:
            found, elsewhere = _divided(found)
        there = elsewhere.union(found)
        completions = sum(sizes[place] for place in there)
        self._journal.count(request.step, found=completions, sampled=sum(sizes) - completions)
        if len(there) == wanted:
            return found, None

        def note(place: int, group: list[Completion]) -> None:
            mine = split is not Split.TOGETHER or place % jax.process_count() == jax.process_index()
            if mine and _is_sound(group, keys[place]["version"]):
                self._journal.add(keys[place], group)
            if request.on_group is not None:
                request.on_group(place, group)

        return found, dataclasses.replace(request, done=there, on_group=note)

    def _keys(self, request: Request, weights: Weights) -> list[Key]:
        common = {
            "weights": f"{weights.checksum():016x}",
            "version": weights.version,
            "seed": request.seed,
            "step": request.step,
            "group_size": request.group_size,
            **dataclasses.asdict(request.sampling),
            **self._settings,
        }
        starts = [{"start": dataclasses.asdict(start)} for start in request.starts or ()] or [{}] * len(request.prompts)
        return [
            common
            | {"prompt_id": int(i), "prompt": hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]}
            | start
            for i, prompt, start in zip(request.prompt_ids, request.prompts, starts, strict=True)
        ]


def _found_by_each(found: Collection[int]) -> list[list[int]]:
    """The places `found` of each host, in the order of the hosts. A collective."""
    return [json.loads(places) for places in hosts.all_gather_bytes(json.dumps(list(found)).encode())]


def _divided(found: dict[int, list[Completion]]) -> tuple[dict[int, list[Completion]], frozenset[int]]:
    """The part of `found` that this host returns, and the places that other hosts return. A collective."""
    finders: dict[int, list[int]] = {}
    for host, places in enumerate(_found_by_each(found)):
        for place in places:
            finders.setdefault(place, []).append(host)
    returns = {place: having[place % len(having)] for place, having in finders.items()}
    mine = {place: group for place, group in found.items() if returns[place] == jax.process_index()}
    return mine, frozenset(finders) - frozenset(mine)


def _is_sound(group: list[Completion], version: int) -> bool:
    """Whether the journal may keep a group: weights of `version` sampled all of it, its log-probabilities are finite,
    and no environment failed by chance (`CHANCE`). After a restart such another group is sampled again."""
    return all(
        c.weight_version == version
        and np.isfinite(c.logprobs).all()
        and (c.turns is None or c.turns.error not in CHANCE)
        for c in group
    )


def sample_from_shared_list(rollout: Feedable, request: Request) -> Groups:
    """Samples the prompts that this host takes from a list of all hosts. All hosts call this together. Returns the
    groups in the order of the prompts; [] for a prompt of another host, and for a prompt in `request.done`.

    With a fixed share of the prompts, all hosts would wait for the host whose completions are the longest. So a host
    takes the next parcel of `parcels_of` when nothing waits for its slots. One of n hosts never has more than 1/n of
    the parcels in progress. The programs, and so the rounding, do not depend on which host takes a parcel."""
    parcels = [parcel for parcel in parcels_of(request) if not request.done.issuperset(parcel)]
    most, progress = math.ceil(len(parcels) / jax.process_count()), list[_Parcel]()
    next_one, groups = hosts.SharedCounter(), [list[Completion]() for _ in request.prompts]
    with contextlib.ExitStack() as begun:
        while True:
            while progress and not (rollout.has_room and sum(one.left > 0 for one in progress) < most):
                time.sleep(_LOOK)
            if (number := next_one.draw()) >= len(parcels):
                break
            parcel = _Parcel(request, parcels[number])
            parcel.completions = begun.enter_context(rollout.begin(parcel.request))
            progress.append(parcel)
        for parcel in progress:
            for group, own in zip(groups, parcel.completions(), strict=True):
                group += own  # [] but for the places of the parcel
    return groups


def parcels_of(request: Request) -> list[list[int]]:
    """Returns all places of the request, also those in `done`, in parcels of prompts of like length. All parcels have
    the same number of prompts, a power of two that depends on the numbers of prompts and hosts; one parcel may be
    smaller. The parcels with the longest expected completions come first. `request.places` must be None."""
    most = max(1, len(request.prompts) // (_PARCELS * jax.process_count()))
    size = 1 << (most.bit_length() - 1)
    by_length = sorted(range(len(request.prompts)), key=lambda place: -len(request.prompts[place]))
    parcels = [by_length[first : first + size] for first in range(0, len(by_length), size)]
    rank = {place: i for i, place in enumerate(request.order)}
    return sorted(parcels, key=lambda parcel: sum(rank[place] for place in parcel) / len(parcel))


class _Parcel:
    """`request`, the part of the request `whole` for some places alone. `left` is the number of its groups that are not
    complete. `completions`, which the caller sets, waits for the groups and returns them."""

    completions: Callable[[], Groups]

    def __init__(self, whole: Request, places: Sequence[int]):
        wanted = frozenset(places) - whole.done
        done = frozenset(range(len(whole.prompts))) - wanted
        self.left, self._on_group = len(wanted), whole.on_group
        self.request = dataclasses.replace(whole, places=places, done=done, on_group=self._note, expected=None)

    def _note(self, place: int, group: list[Completion]) -> None:
        self.left -= 1
        if self._on_group is not None:
            self._on_group(place, group)
