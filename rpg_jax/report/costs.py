"""What the steps of a run cost, and what a metric is late in training."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.report.run_files import series

Records = Sequence[Mapping[str, Any]]  # of steps that trained


def completions(records: Records, group_size: int) -> list[int]:
    """Completions generated up to the end of each step. Dynamic sampling does not train all of them."""
    return [group_size * groups for groups in itertools.accumulate(record["groups_generated"] for record in records)]


def seconds(records: Records) -> list[float]:
    """Wall seconds in steps up to the end of each step, without evaluations and checkpoints.

    A step that compiled counts as the median step that did not: what it compiled may have been kept from an earlier
    run, and its compilation may have begun before it. nan without a step that did not compile.
    """
    usual = [record["seconds"] for record in records if not record.get("time/compiling")]
    median = statistics.median(usual) if usual else math.nan
    return list(
        itertools.accumulate(median if record.get("time/compiling") else record["seconds"] for record in records)
    )


def late(records: Records, metric: str) -> float:
    """Mean of a metric over the last third of the steps that have it; nan without a value."""
    values = series(records, metric)[1]
    third = values[-max(1, len(values) // 3) :]
    return sum(third) / len(third) if third else math.nan
