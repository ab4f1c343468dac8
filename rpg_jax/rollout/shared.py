"""Hosts that take prompts from one list: whoever has room takes the next ones, so no host waits long for the slowest.

A host's completions take as long as they are. With a fixed share of the prompts, all others wait for the host whose
completions are the longest.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import jax
import numpy as np

from rpg_jax.parallel import hosts
from rpg_jax.rollout.request import Feedable, Reply, Request, Responder, Rollout, Split
from rpg_jax.rollout.weights import Params, Staged
from rpg_jax.types import Completion, FinishReason

_PARCELS = 64  # of a host, in the mean: its last one is a small part of its work
_LOOK = 0.005  # seconds between two looks at the slots


class SharedRollout(Rollout):
    """`own`, whose prompts come from a list that all hosts share. The completions are those of `own` alone.

    The prompts are cut into parcels, which depend on the prompts and the number of hosts only. So the programs, and
    with them the rounding, do not depend on who takes a parcel. A host takes the next one when nothing waits for its
    slots, and never has more than its part of the list in progress.
    """

    split = Split.TAKEN

    def __init__(self, own: Feedable):
        self.weights, self.apart, self._own = own.weights, own.apart, own

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        self._own.sync_weights(params, version)

    def exchange(self, value: bytes) -> list[bytes]:
        return self._own.exchange(value)

    def close(self) -> None:
        self._own.close()

    def generate(self, request: Request) -> list[list[Completion]]:
        """The groups that this host took, in their places; the groups of other hosts are empty.

        With `enough`, it is a request of this host alone.
        """
        if request.enough is not None:
            return self._own.generate(request)
        parcels = [parcel for parcel in parcels_of(request) if not request.done.issuperset(parcel)]
        most, progress = math.ceil(len(parcels) / jax.process_count()), list[_Parcel]()
        next_one, groups = hosts.SharedCounter(), [list[Completion]() for _ in request.prompts]
        with contextlib.ExitStack() as begun:
            while True:
                while progress and not (self._own.has_room and sum(not one.complete for one in progress) < most):
                    time.sleep(_LOOK)
                if (number := next_one.draw()) >= len(parcels):
                    break
                parcel = _Parcel(request, parcels[number])
                parcel.completions = begun.enter_context(self._own.begun(parcel.request))
                progress.append(parcel)
            for parcel in progress:
                for place, group in zip(parcel.places, parcel.completions(), strict=True):
                    groups[place] = group
        return groups


def parcels_of(request: Request) -> list[list[int]]:
    """Places of the request in parcels of 1, 2, 4, … prompts of like length. Those with the longest expected
    completions come first."""
    most = max(1, len(request.prompts) // (_PARCELS * jax.process_count()))
    size = 1 << (most.bit_length() - 1)
    by_length = sorted(range(len(request.prompts)), key=lambda place: -len(request.prompts[place]))
    parcels = [by_length[first : first + size] for first in range(0, len(by_length), size)]
    rank = {place: i for i, place in enumerate(request.order)}
    return sorted(parcels, key=lambda parcel: sum(rank[place] for place in parcel) / len(parcel))


class _Parcel:
    """Some places of a request, as a request of their own.

    Attributes:
      complete: whether all its groups are.
      completions: waits for them.
    """

    completions: Callable[[], list[list[Completion]]]

    def __init__(self, whole: Request, places: Sequence[int]):
        self.places, self._whole = places, whole
        self._left = len([place for place in places if place not in whole.done])
        self.request = replace(
            whole,
            prompts=[whole.prompts[place] for place in places],
            prompt_ids=[whole.prompt_ids[place] for place in places],
            done=frozenset(i for i, place in enumerate(places) if place in whole.done),
            on_group=self._note,
            expected=None,
            environment=_Part(whole.environment, places) if whole.environment is not None else None,
        )

    @property
    def complete(self) -> bool:
        return self._left == 0

    def _note(self, place: int, group: list[Completion]) -> None:
        self._left -= 1
        if self._whole.on_group is not None:
            self._whole.on_group(self.places[place], group)


class _Part:
    """An environment, for a part of a request: its places there are others than here."""

    def __init__(self, whole: Responder, places: Sequence[int]):
        self._whole, self._places = whole, places

    @property
    def turn_tokens(self) -> int:
        return self._whole.turn_tokens

    def respond(self, place: int, index: int, tokens: np.ndarray, finish_reason: FinishReason) -> Future[Reply]:
        return self._whole.respond(self._places[place], index, tokens, finish_reason)
