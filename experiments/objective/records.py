"""The runs of the experiments on the objective: looking them up, and what follows from a scan of learning rates."""

import math
from collections.abc import Sequence

import numpy as np

from experiments.objective.design import ROWS, SCAN, Record

MIDDLE = 0.1  # β where an experiment has one
Seeds = dict[int, Record]  # {seed: run}


class Runs:
    """Looks up runs; a row without β stands in every column of β."""

    def __init__(self, records: Sequence[Record]):
        self._records = records

    def has(self, experiment: str) -> bool:
        return any(r["experiment"] == experiment for r in self._records)

    def get(self, experiment: str, row: str, kl_coef: float = MIDDLE, **wanted: object) -> Seeds:
        wanted |= {"experiment": experiment, "row": row}
        chosen = (r for r in self._records if all(r[name] == value for name, value in wanted.items()))
        return {r["seed"]: r for r in chosen if math.isclose(r["kl_coef"], kl_coef)}

    def rows(self, experiment: str) -> list[str]:
        return self._values(experiment, "row")

    def kl_coefs(self, experiment: str) -> list[float]:
        return sorted(self._values(experiment, "kl_coef"))

    def lengths(self, experiment: str) -> list[int]:
        return sorted(self._values(experiment, "length"))

    def _values(self, experiment: str, name: str) -> list:
        """What the runs of an experiment have under a name; rows in the order of `ROWS`."""
        found = {r[name] for r in self._records if r["experiment"] == experiment}
        return [row for row in ROWS if row in found] if name == "row" else list(found)

    @property
    def all(self) -> Sequence[Record]:
        return self._records


def best_rates(records: Sequence[Record], scan: str = SCAN) -> dict[str, float]:
    """The learning rate of every row of a scan: least mean regret; the smaller one of equals."""
    scanned: dict[str, dict[float, list[float]]] = {}
    for record in records:
        if record["experiment"] == scan:
            scanned.setdefault(record["row"], {}).setdefault(record["rate"], []).append(own_regret(record))
    return {row: min(sorted(by), key=lambda rate: float(np.mean(by[rate]))) for row, by in scanned.items()}


def own_regret(record: Record) -> float:
    """J* − J with the divergence that the row is meant for; samples know KL(π_θ‖π_ref) alone."""
    forward = ROWS[record["row"]].meant == "forward" and "regret_forward" in record
    return record["regret_forward" if forward else "regret"]
