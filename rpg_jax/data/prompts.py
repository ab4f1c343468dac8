"""Problems, and the order in which training sees them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import grain


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt with its reference answer.

    Attributes:
      prompt_id: stable index, below 2**31; the noise of a completion is folded from it, so it must not depend on
        the order, the host or the number of problems asked for.
      prompt: text of the user's turn; without a chat template, the text to continue.
      answer: reference answer as its verifier reads it; empty for a row that has a demonstration and no answer.
      source: name of the task or data set.
      samples: completions that the evaluation data asks for: how often it has the problem's row.
      system: text of the system turn; empty for none.
      question: the problem without any template around it, if it is known; else the prompt.
      demonstrations: completions to imitate in supervised training.
    """

    prompt_id: int
    prompt: str
    answer: str
    source: str
    samples: int = 1
    system: str = ""
    question: str = ""
    demonstrations: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.question:
            object.__setattr__(self, "question", self.prompt)
        object.__setattr__(self, "demonstrations", tuple(self.demonstrations))  # JSON makes a list of it


class PromptStream:
    """Endless batches of problems. Every epoch is another permutation, and a batch may reach into the next epoch.

    The global order depends on (problems, seed) only. Host h of H gets the h-th contiguous block of every batch. So the
    lists of the hosts, one after the other, are the batch of a single host, for any H that divides `batch_size`. The
    position counts problems. A state may be restored on another number of hosts or with another batch size, in the
    middle of an epoch; the stream continues with the next unseen problem.

    Args:
      problems: N problems held in memory, or anything with `__len__` and `__getitem__`.
      batch_size: prompts per step, over all hosts.
      seed: seed of the shuffle, in [0, 2**32).
      prefetch: number of problems that a background thread reads ahead; with 0 the caller's thread reads.

    Raises:
      ValueError: there are no problems, or the hosts cannot share a batch equally.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        batch_size: int,
        seed: int,
        host_index: int = 0,
        host_count: int = 1,
        prefetch: int = 0,
    ):
        if len(problems) == 0:
            raise ValueError("no problems to stream: the source is empty or every row was dropped")
        if not 0 <= host_index < host_count:
            raise ValueError(f"host_index must be in [0, {host_count}), got {host_index}")
        if batch_size < 1 or batch_size % host_count:
            raise ValueError(f"batch_size={batch_size} must be a positive multiple of host_count={host_count}")
        self._batch_size = batch_size
        self._host = slice(*(batch_size // host_count * i for i in (host_index, host_index + 1)))
        self._identity = {"problems": len(problems), "seed": seed, "fingerprint": fingerprint(problems)}
        self._dataset = (
            grain.MapDataset.source(problems)
            .seed(seed)
            .shuffle()
            .repeat(None)
            .to_iter_dataset(grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch))
        )
        self._iterator = iter(self._dataset)
        self._consumed = 0

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> list[Problem]:
        """This host's share of the next global batch."""
        batch = [next(self._iterator) for _ in range(self._batch_size)]
        self._consumed += self._batch_size
        return batch[self._host]

    def state(self) -> dict[str, Any]:
        """The position as a JSON-able dict; the same on every host."""
        return {"consumed": self._consumed, "iterator": self._iterator.get_state(), **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken.

        Raises:
          ValueError: the state belongs to other problems or another seed.
        """
        differing = {k: (state.get(k), v) for k, v in self._identity.items() if state.get(k) != v}
        if differing:
            raise ValueError(
                f"this data position belongs to another stream (saved, current): {differing}; "
                "resume with the problems and seed of the saved run, or start a new run folder"
            )
        self._iterator = iter(self._dataset)
        self._iterator.set_state(state["iterator"])
        self._consumed = state["consumed"]


def fingerprint(problems: Sequence[Problem]) -> int:
    """CRC-32 of everything that a completion and its verdict depend on, in order."""
    checksum = 0
    for p in problems:
        checksum = zlib.crc32(repr((p.prompt_id, p.system, p.prompt, p.answer)).encode(), checksum)
    return checksum
