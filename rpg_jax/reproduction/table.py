"""A table of runs: rows that differ in a few config fields, over the same seeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.runs import run_names

SMALL_CONFIG = "configs/small.py"
LEARNING_RATE = "optimizer.learning_rate"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a table: a row and a seed."""

    row: str
    seed: int
    config: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run's folder. It states the settings and not the row: two tables may share a run."""
        return f"{run_names.run_name(self.config, self.overrides)}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that differ in a few config fields, over the same seeds.

    Attributes:
      title: title of the page.
      rows: name -> overrides of `config`, the method first.
      baseline: the row that other rows are compared with.
      paper: where the paper has this comparison, and what differs here.
      config: the config file of every run.
      published: the paper's own tables to show on the page, by their names in paper_tables.json.
      baselines: row -> the row that it is compared with, if that is not `baseline`.
      pooled: name -> rows that are one algorithm to a thousandth of the gradient; their mean is compared too, since
        their differences from each other are noise.
      starts: name -> rows that differ in the weights they start from. Their differences are compared over starts too.
      shown: the rows in figures with lines, if such figures have no room for all rows.
      rates: learning rates to choose from for each row, by runs with `scan_seeds`. Empty: the config's rate.
      scan_seeds: seeds of the runs that choose learning rates; no other run has these seeds.
      swept: of a sweep, row -> (the row without the swept values, {field: value}).
    """

    title: str
    rows: Mapping[str, Sequence[str]]
    baseline: str
    paper: str
    config: str = SMALL_CONFIG
    published: Sequence[str] = ()
    baselines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pooled: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    shown: Sequence[str] = ()
    rates: Sequence[float] = ()
    scan_seeds: Sequence[int] = (100, 101)
    swept: Mapping[str, tuple[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

    def compared_with(self, row: str) -> str:
        """The row that `row` is compared with; `row` itself if it is compared with no other row."""
        return self.baselines.get(row, self.baseline)

    def named(self, text: str) -> list[str]:
        """Splits a list of rows at its commas. The names of rows can have commas too."""
        parts, names = [part.strip() for part in text.split(",")], []
        while parts:
            known = (n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in self.rows)
            names.append(", ".join(parts[: next(known, 1)]))
            parts = parts[names[-1].count(",") + 1 :]
        return names

    def only(self, rows: Sequence[str]) -> "Table":
        """The same table with some of its rows.

        Raises:
          ValueError: an unknown row; the message lists the known ones.
        """
        for row in rows:
            if row not in self.rows:
                raise ValueError(f"no row {row!r} in this table; there are {', '.join(self.rows)}")
        return dataclasses.replace(self, rows={row: self.rows[row] for row in rows})

    def planned_runs(self, seeds: Sequence[int], rows: Sequence[str] | None = None) -> list[PlannedRun]:
        """Every run, seed by seed: an interrupted table then has about as many seeds of every row.

        Raises:
          ValueError: an unknown row; the message lists the known ones.
        """
        chosen = self if rows is None else self.only(rows)
        return [PlannedRun(row, seed, self.config, tuple(chosen.rows[row])) for seed in seeds for row in chosen.rows]

    def with_settings(self, values: Mapping[str, Mapping[str, Any]]) -> "Table":
        """The same table with the values {row: {field: value}} in its rows, and without rows that have no values."""
        rows = {
            row: (*self.rows[row], *(run_names.option(field, value) for field, value in own.items()))
            for row, own in values.items()
        }
        return dataclasses.replace(self, rows=rows)

    def scan(self) -> "Table":
        """The table of each row at each of `rates`."""
        return crossed(
            self.rows,
            {LEARNING_RATE: list(self.rates)},
            title=f"{self.title}: learning rates",
            paper="Runs that choose the learning rate of each row",
            config=self.config,
        )


def crossed(
    rows: Mapping[str, Sequence[str]], fields: Mapping[str, Sequence[Any]], *, title: str, paper: str, config: str
) -> Table:
    """The table of each row with every combination of the fields' values, row by row.

    A new row is compared with the first combination of its row. The first combination is compared with the first row.
    """
    combinations: list[dict[str, Any]] = [{}]
    for field, values in fields.items():
        combinations = [{**known, field: value} for known in combinations for value in values]
    made: dict[str, tuple[str, ...]] = {}
    swept: dict[str, tuple[str, Mapping[str, Any]]] = {}
    baselines: dict[str, str] = {}
    for row, overrides in rows.items():
        names = [", ".join(part for part in (row, run_names.label(own)) if part) for own in combinations]
        for name, own in zip(names, combinations, strict=True):
            made[name] = (*overrides, *(run_names.option(field, value) for field, value in own.items()))
            swept[name] = (row, own)
        baselines |= dict.fromkeys(names[1:], names[0])
    return Table(title, made, next(iter(made)), paper, config, baselines=baselines, swept=swept)
