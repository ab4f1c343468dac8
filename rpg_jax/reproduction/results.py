"""The results of a table's runs: all that pages and figures show of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rpg_jax.report import costs
from rpg_jax.report.seeds import CellScores, scores_of
from rpg_jax.report.summary import evaluations_in
from rpg_jax.reproduction.table import Table
from rpg_jax.training.reference import make_rule
from rpg_jax.types import Count

# Training metrics by title, each with its scale.
DYNAMICS = {
    "Training accuracy, %": ("accuracy", 100),
    "Entropy, nats per token": ("entropy", 1),
    "KL to the behaviour policy, millinats per token": ("behaviour_forward_kl_k1", 1000),
    "Completion length, tokens": ("completion_length", 1),
    "Clipped tokens, %": ("clip_fraction", 100),
    "KL term's share of the gradient, %": ("kl_gradient_share", 100),
}

Record = dict[str, Any]
Evaluations = dict[str, list[Record]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a table.

    Attributes:
      row, seed: its place in the table.
      name: of its folder.
      config: the resolved config by dotted names, without the fields that say where files lie.
      versions: commit, packages, Python and devices.
      records: one for each step, from step 0, with the metrics that the page needs.
      start: checksum of the weights before the first step; "" if unknown.
    """

    row: str
    seed: int
    name: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    records: Sequence[Record]
    start: str = ""

    @property
    def trained(self) -> list[Record]:
        """The records of steps that trained; step 0 has only evaluations."""
        return [record for record in self.records if "accuracy" in record]

    @property
    def ended(self) -> bool:
        """Whether all steps are done."""
        return bool(self.records) and self.records[-1]["step"] == self.config.get("train.steps")

    def evaluations(self) -> Evaluations:
        """{set: [{step, k, mean_at_k, …}]}, in the order of steps."""
        return evaluations_in(self.records)

    def scores(self) -> CellScores:
        return scores_of(self.evaluations())

    def late(self, metric: str, steps: int | None = None) -> float:
        """`costs.late` of the first `steps` steps (default: of all)."""
        return costs.late(self.trained[:steps], metric)

    def completions(self) -> list[int]:
        """Completions generated up to the end of each step."""
        return costs.completions(self.trained, self.config["rollout.group_size"])

    def updates(self) -> list[int]:
        """Updates up to the end of each step."""
        return [record["updates"] for record in self.trained]

    def seconds(self) -> list[float]:
        """`costs.seconds` of the run."""
        return costs.seconds(self.trained)

    def brief(self, columns: Collection[str]) -> Run:
        """The same run with these metrics only."""
        kept = [{key: value for key, value in r.items() if key in ("step", *columns)} for r in self.records]
        return dataclasses.replace(self, records=kept)

    def reference(self) -> str | None:
        """The policy that anchors the KL term; None for the behaviour policy."""
        numbers = {name: self.config[f"reference.{name}"] for name in ("kl_threshold", "kl_decay")}
        every = Count.parse(self.config["reference.every"], "reference.every")
        return make_rule(self.config["reference.rule"], every=every, **numbers).anchor()


Rows = dict[str, dict[int, Run]]  # {row: {seed: run}}


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a table's page shows.

    Attributes:
      name: of the table and its files.
      table: rows as they were run.
      runs: in the order of the table's cells.
      command, hardware: what made the runs, and on what.
      extra: overrides of every run.
      scan: the runs that chose the learning rates; None without such a scan.
    """

    name: str
    table: Table
    runs: Sequence[Run]
    command: str = ""
    hardware: str = ""
    extra: Sequence[str] = ()
    scan: Results | None = None

    def rows(self) -> Rows:
        """The runs that have taken a step."""
        found: Rows = {}
        for run in self.runs:
            if run.trained:
                found.setdefault(run.row, {})[run.seed] = run
        return found

    def all_runs(self) -> list[Run]:
        """The runs of the table and of its scan."""
        return [*self.runs, *(self.scan.runs if self.scan else ())]
