"""Run folders as they are while a run writes them, and as a killed run leaves them."""

from __future__ import annotations

import json
import math

import pytest

from rpg_jax.report.run_files import Run, read_config, read_jsonl, read_lines, read_metrics, series


def write(path, *records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return path


def test_an_unfinished_last_line_is_dropped(tmp_path):
    path = write(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2}, tail='{"step": 3, "rew')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_jsonl(path)


def test_a_folder_in_place_of_a_file_is_named_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a folder and not a file of JSON lines: move it away$"):
        read_metrics(tmp_path)


def test_a_missing_file_has_no_records(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == ([], b"")
    assert read_metrics(tmp_path) == [] and read_config(tmp_path) == {}


def test_a_repeated_step_counts_once_with_its_later_values(tmp_path):
    write(tmp_path / "metrics.jsonl", {"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 1, "x": 3})
    assert read_metrics(tmp_path) == [{"step": 1, "x": 3}, {"step": 2, "x": 2}]


def test_series_keep_finite_numbers_only():
    values = (0.5, None, float("nan"), float("inf"), "text", True, 2)
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    assert series(records, "x") == ([0, 6], [0.5, 2.0])


STEPS = [
    {"step": 1, "seconds": 9.0, "time/compiling": 20.0, "groups_generated": 4, "accuracy": 0.1},
    {"step": 2, "seconds": 2.0, "groups_generated": 6, "accuracy": 0.2},
    {"step": 3, "seconds": 4.0, "time/compiling": 0.0, "groups_generated": 4, "accuracy": 0.4},
]


def run_of(records):
    return Run("a", 0, {"rollout.group_size": 8}, records)


def test_a_step_that_compiled_costs_the_median_of_the_others():
    assert run_of(STEPS).costs["seconds"] == {0: 0, 1: 3.0, 2: 5.0, 3: 9.0}
    assert "seconds" not in run_of(STEPS[:1]).costs


def test_completions_add_up_and_a_late_metric_is_of_the_last_third():
    run = run_of(STEPS)
    assert list(run.costs["completions"].values()) == [0, 32, 80, 112]
    assert (run.spent("completions"), run.spent("completions", 2), run.spent("completions", 0)) == (112, 80, 0)
    assert [run.last_step_within("completions", amount) for amount in (0, 79, 80, 1e9)] == [0, 1, 2, 3]
    assert run.late("accuracy") == 0.4 and run.late("accuracy", until=2) == 0.2
    assert run_of([*STEPS, *({**r, "step": r["step"] + 3} for r in STEPS)]).late("accuracy") == (0.2 + 0.4) / 2
    assert math.isnan(run.late("kl"))
