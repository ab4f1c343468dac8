"""The reference policy, the anchor of the KL term, and its weights (arXiv:2505.17508, section 4).

A snapshot lies on disk, through Orbax. It is restored for the log-prob pass only if the reference differs from the
behaviour policy; if the two coincide, the behaviour log-probs serve for both. A snapshot is written only if it will be
read. A reference that is the present policy is written when an update is about to change the policy, unless the same
step moves the reference again. Every step moves the reference if K is one step or divides a step's updates.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from rpg_jax.losses.declaration import lookup
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training.state import in_device_memory, in_host_memory
from rpg_jax.types import Count


@dataclasses.dataclass(frozen=True)
class Rule:
    """When the reference moves to the present policy. The base class never moves it. Each attribute is a config field
    of its name in the section `reference`. `every` is K >= 1, in steps or in updates: config files set it for all
    methods, whichever rule they have. Other attributes belong to a rule. Raises ValueError if K is below 1."""

    every: Count

    meaning: ClassVar[str] = "the policy that the run started from"
    word: ClassVar[str] = "initial"  # what `anchor` says; {0} is the rule
    is_behaviour: ClassVar[bool] = False  # the policy that sampled a completion is its reference
    watches_kl: ClassVar[bool] = False

    def __post_init__(self):
        if self.every.number < 1:
            raise ValueError(f"a reference needs every >= 1, got every={self.every}")

    def anchor(self) -> str | None:
        """Returns a word for tables: the policy to which the KL is measured; None is the behaviour policy."""
        return None if self.is_behaviour else self.word.format(self)

    def last_move(self, step: int, before: int, after: int) -> int | None:
        """Returns the number of the last update of a step after which the reference moves; None if no update moves it.
        Step number `step`, from 1, makes the updates `before` + 1 to `after` of the run."""
        return None

    def moves_at(self, kl_average: float) -> bool:
        """Returns whether `kl_average`, bias-corrected nats per token, moves the reference at the end of the step."""
        return False

    def differs(self, updates_per_step: int) -> bool:
        """Whether the reference may differ from the policy at the start of a step. Then its log-probs cost a pass."""
        return True


class Behaviour(Rule):
    meaning = "the policy that sampled the batch: ρ = π_ref/π_old = 1, and nothing is stored"
    is_behaviour = True

    def differs(self, updates_per_step: int) -> bool:
        return False


class EveryK(Rule):
    meaning = "the policy after every K-th step or every K-th optimizer update; skipped updates count"
    word = "every {0.every}"

    def last_move(self, step: int, before: int, after: int) -> int | None:
        if self.every.unit == "steps":
            return after if step % self.every.number == 0 else None
        last = after - after % self.every.number
        return last if last > before else None

    def differs(self, updates_per_step: int) -> bool:
        return (1 if self.every.unit == "steps" else updates_per_step) % self.every.number != 0


@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    kl_threshold: float  # κ > 0, nats per token

    meaning = "the policy at the end of a step in which the moving average of the token KL, the metric `kl`, passed κ"
    word = "κ = {0.kl_threshold}"
    watches_kl = True

    def __post_init__(self):
        super().__post_init__()
        if not self.kl_threshold > 0:
            raise ValueError(f"a reference needs kl_threshold > 0, got kl_threshold={self.kl_threshold}")

    def moves_at(self, kl_average: float) -> bool:
        return kl_average > self.kl_threshold


class OfTeacher(Rule):
    meaning = "a teacher: another model, at reference.path, which is never trained"
    word = "teacher"


RULES: Mapping[str, type[Rule]] = MappingProxyType(
    {"behaviour": Behaviour, "fixed": Rule, "every": EveryK, "kl": Threshold, "teacher": OfTeacher}
)


def make_rule(section: Mapping[str, Any]) -> Rule:
    """Returns the rule named `section["rule"]` in `RULES`. Each attribute of its class is the field of the same name
    in `section`, the config's section `reference`; `every` is text there, "4 updates". An older run's config may lack
    the field of an attribute with a default. Raises ValueError for an unknown name or a number out of its range."""
    rule = lookup(RULES, "reference rule", section["rule"])
    own = {field.name: section[field.name] for field in dataclasses.fields(rule) if field.name in section}
    return rule(**own | {"every": Count.parse(section["every"], "reference.every")})


class Taught(NamedTuple):
    """A teacher: its weights `params`, on devices or in host memory, and the `step.Programs` that read them; or servers
    of it. `scores` asks the servers: groups in, log-probs f32[n] of each completion of each group out. Then `params`
    and `programs` are None."""

    params: Any = None
    programs: Any = None
    scores: Callable[[Sequence[Any]], list[list[np.ndarray]]] | None = None


class Reference:
    """Decides when the reference moves and brings its weights back.

    Args:
      like: shapes, dtypes and shardings of the weights, as a tree of `ShapeDtypeStruct`.
      memory: the place of restored weights between steps: "disk" keeps no copy, "device" and "host" keep a copy.
      teacher: the reference, if it is another model; no run stores its weights.

    Attributes:
      programs: the programs that read a teacher's weights; None without a teacher, or if servers have it.
      scores: asks the servers of a teacher, see `Taught`; None without such servers.
      number: the value of `updates` when the policy last became the reference. 0 if `is_behaviour`.
      updates: the number of updates so far. Skipped updates count, and so do the updates of a run's parent.
      kl_average: moving average of the token KL since the reference moved, not bias-corrected.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        snapshots: Snapshots,
        like: Any,
        memory: Literal["disk", "device", "host"] = "disk",
        teacher: Taught | None = None,
    ):
        self._rule, self._snapshots, self._like, self._memory = rule, snapshots, like, memory
        self._teacher, self.programs = teacher, teacher and teacher.programs
        self.scores = teacher and teacher.scores
        self._stores = not rule.is_behaviour and teacher is None
        self._restored: tuple[int, Any] | None = None
        self.number, self.updates = 0, 0
        self._step_end, self._next_move = 0, 0  # the values of `updates` at this step's end and its last move (or 0)
        self._unwritten = self._stores  # the reference is the present policy and has no snapshot
        self.kl_average, self._kl_count = 0.0, 0

    @property
    def is_behaviour(self) -> bool:
        """Whether the reference of every completion is the policy that sampled it."""
        return self._rule.is_behaviour

    def differs(self, updates_per_step: int) -> bool:
        """Returns whether the reference may differ from the policy at the start of a step, see `Rule.differs`."""
        return self._rule.differs(updates_per_step)

    def coincides(self) -> bool:
        """Returns whether the present policy, the next behaviour policy, is the reference itself."""
        return self._rule.is_behaviour or (self._teacher is None and self.number == self.updates)

    def before_updates(self, params: Any, step: int, count: int) -> None:
        """Notes when the `count` updates of step `step` (from 1) move the reference. If a snapshot of `params` will be
        read, starts to write it before the updates change `params`. Raises the errors of `Snapshots.save`."""
        self._step_end = self.updates + count
        self._next_move = self._rule.last_move(step, self.updates, self._step_end) or 0
        if self._unwritten and not self._next_move:
            self._write(params)

    def after_update(self, params: Any) -> None:
        """Counts an update, skipped or not. If the step's last move is due, makes `params` the reference, and starts to
        write a snapshot of `params` if the step goes on. Raises the errors of `Snapshots.save`."""
        self.updates += 1
        if self.updates == self._next_move:
            self._move()
            if self.updates < self._step_end:
                self._write(params)

    def after_step(self, token_kls: Sequence[float]) -> None:
        """If the rule reads the average, adds each update's mean token KL (nats) to it, a ← 0.9·a + 0.1·KL, and moves
        the reference to the present policy if any of these updates makes the move due."""
        decay, moves = 0.9, False
        for kl in token_kls if self._rule.watches_kl else ():
            self.kl_average = decay * self.kl_average + (1 - decay) * float(kl)
            self._kl_count += 1
            moves |= self._rule.moves_at(self.kl_average / (1 - decay**self._kl_count))
        if moves:
            self._move()

    def params(self) -> Any:
        """The reference's weights on devices: a teacher's, or from the snapshot, which a reference that `coincides` may
        lack. Raises ValueError if the snapshot is damaged or missing, StorageFailure if it cannot be read."""
        if self._teacher is not None:
            return in_device_memory(self._teacher.params)
        if self._restored and self._restored[0] == self.number:
            return in_device_memory(self._restored[1])
        return self._read(self.number)

    def _read(self, number: int) -> Any:
        """Returns the weights of snapshot `number`; keeps a copy in `memory`."""
        params, self._restored = self._snapshots.restore(number, self._like), None
        if self._memory == "host":
            self._restored = number, jax.device_put(params, jax.tree.map(lambda x: in_host_memory(x.sharding), params))
        elif self._memory == "device":
            self._restored = number, params
        return params

    def _move(self) -> None:
        self.number, self.kl_average, self._kl_count, self._unwritten = self.updates, 0.0, 0, True

    def _write(self, params: Any) -> None:
        self._snapshots.save(self.number, params)
        self._unwritten = False

    def commit(self) -> dict[str, Any]:
        """Returns the JSON-able state for a checkpoint, once the snapshot is on disk. Raises StorageFailure if not."""
        self._snapshots.wait()
        return {
            "number": self.number,
            "updates": self.updates,
            "unwritten": self._unwritten,
            "kl_average": self.kl_average,
            "kl_count": self._kl_count,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if weights that a state of `commit` needs are missing or damaged; or StorageFailure."""
        if self._stores and not state["unwritten"]:
            self._read(int(state["number"]))

    def begin_at(self, updates: int) -> None:
        """Makes the present policy, which `updates` updates have made, the reference."""
        self.updates = updates
        self.number = 0 if self._rule.is_behaviour else updates

    def take_over(self, state: Mapping[str, Any], read: Callable[[int, Any], Any]) -> None:
        """Takes over the reference of another run, whose `commit` returned `state`, with its snapshot if there is one.
        `read(number, like)` returns that run's snapshot, laid out as `like`. Raises the errors of `read` and saving."""
        self.restore(state)
        if self._stores and not self._unwritten:
            self._write(read(self.number, self._like))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state that `commit` returned."""
        self.number, self.updates, self._unwritten = int(state["number"]), int(state["updates"]), state["unwritten"]
        self.kl_average, self._kl_count = float(state["kl_average"]), int(state["kl_count"])

    def prune(self, numbers: Iterable[int]) -> None:
        """Deletes all snapshots but the reference's own and `numbers`, the snapshots that checkpoints need."""
        if self._stores:
            self._snapshots.keep_only({self.number, *numbers})
