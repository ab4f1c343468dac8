"""A rollout that samples only the groups that the run's journal lacks, and journals every group that it completes."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from rpg_jax.parallel import hosts
from rpg_jax.rewards.verdicts import CHANCE
from rpg_jax.rollout.request import Request, Rollout, Split
from rpg_jax.rollout.weights import Params, Staged
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion

Key = dict[str, Any]


class JournaledRollout(Rollout):
    """`own`, with the journal before it. The completions are those of `own` alone.

    A group's key has everything that its completions depend on: the checksum and the version of the weights, the
    request's counters and sampling parameters, the prompt, and `settings`. With an environment this is so if its
    answers depend on the problem and the conversation alone. A group that an environment with state of its own has
    answered is valid too, but sampled afresh it may differ.

    Where hosts ask for the same prompts (`split`), each needs to know what the others have found. Hosts that decode
    together use what all of them have found, and each journals every n-th group. Where each samples what it takes, one
    of those that have found a group returns it.

    With `Request.enough`, the groups that are complete first depend on all others. So the journal serves only if it has
    as many groups as are wanted.

    Args:
      settings: of the decoding, by name; JSON-able.
    """

    def __init__(self, own: Rollout, journal: Journal, settings: Mapping[str, Any]):
        self.weights, self.apart, self.split, self._own, self._journal = own.weights, own.apart, own.split, own, journal
        self._settings, self.engine = dict(settings), own.engine

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        self._own.sync_weights(params, version)

    def exchange(self, value: bytes) -> list[bytes]:
        return self._own.exchange(value)

    def close(self) -> None:
        self._own.close()

    def generate(self, request: Request) -> list[list[Completion]]:
        keys, wanted = self._keys(request), len(request.prompts) if request.enough is None else request.enough
        found, elsewhere = self._journal.find(keys), frozenset[int]()
        if self.split is Split.TOGETHER:
            found = self._found_by_all(found)
        if request.enough is not None:
            found = dict(list(found.items())[:wanted]) if len(found) >= wanted else {}
        elif self.split is Split.TAKEN:
            found, elsewhere = self._divided(found)
        for place, group in found.items():
            if request.on_group is not None:
                request.on_group(place, group)
        there = len(found) + len(elsewhere)
        sizes = {"found": there * request.group_size, "sampled": (wanted - there) * request.group_size}
        self._journal.count(request.step, **sizes)
        if there == wanted:
            return [found.get(place, []) for place in range(len(keys))]

        def note(place: int, group: list[Completion]) -> None:
            if self._is_mine(place) and _is_sound(group, keys[place]["version"]):
                self._journal.add(keys[place], group)
            if request.on_group is not None:
                request.on_group(place, group)

        missing = dataclasses.replace(request, done=elsewhere.union(found), on_group=note)
        return [found.get(place, group) for place, group in enumerate(self._own.generate(missing))]

    def _keys(self, request: Request) -> list[Key]:
        common = {
            "weights": f"{self.weights_checksum():016x}",
            "version": self.weights.version,
            "seed": request.seed,
            "step": request.step,
            "group_size": request.group_size,
            **dataclasses.asdict(request.sampling),
            **self._settings,
        }
        return [
            common | {"prompt_id": int(prompt_id), "prompt": _digest(prompt)}
            for prompt_id, prompt in zip(request.prompt_ids, request.prompts, strict=True)
        ]

    def _is_mine(self, place: int) -> bool:
        return self.split is not Split.TOGETHER or place % jax.process_count() == jax.process_index()

    def _found_by_all(self, found: dict[int, list[Completion]]) -> dict[int, list[Completion]]:
        by_all = set(found).intersection(*_found_by_each(found))
        return {place: group for place, group in found.items() if place in by_all}

    def _divided(self, found: dict[int, list[Completion]]) -> tuple[dict[int, list[Completion]], frozenset[int]]:
        """What this host returns of what it has found, and the places that others return."""
        finders: dict[int, list[int]] = {}
        for host, places in enumerate(_found_by_each(found)):
            for place in places:
                finders.setdefault(place, []).append(host)
        returns = {place: having[place % len(having)] for place, having in finders.items()}
        mine = {place: group for place, group in found.items() if returns[place] == jax.process_index()}
        return mine, frozenset(finders) - frozenset(mine)


def _found_by_each(found: Collection[int]) -> list[list[int]]:
    """The places that each host has found. A collective."""
    return [json.loads(places) for places in hosts.all_gather_bytes(json.dumps(list(found)).encode())]


def _is_sound(group: list[Completion], version: int) -> bool:
    """Whether a group is a function of its key. The next process must not find one that is not.

    Mixed weights and log-probabilities that are not finite stop the run. An environment's failure by chance, as a
    timeout, does not: the next process asks the environment again.
    """
    return all(
        c.token_versions is None
        and c.weight_version == version
        and np.isfinite(c.logprobs).all()
        and (c.turns is None or c.turns.error not in CHANCE)
        for c in group
    )


def _digest(prompt: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(prompt, "<i4").tobytes()).hexdigest()[:16]
