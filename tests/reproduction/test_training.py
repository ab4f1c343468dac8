from __future__ import annotations

import dataclasses

import pytest

from rpg_jax.report import seeds
from rpg_jax.reproduction import page, training
from rpg_jax.reproduction.results import Results, collect
from rpg_jax.reproduction.tables import TABLES

SMALL = TABLES["small"]
TWO = {row: {0: 1.0, 1: 2.0} for row in ("RLOO", "GSPO")}


@pytest.fixture
def rows_of(tmp_path, leave_a_run):
    """The rows of `small` from {(row, seed): how `leave_a_run` leaves the run}."""

    def rows(runs):
        cells = [cell for cell in SMALL.planned_runs(range(2)) if (cell.row, cell.seed) in runs]
        for cell in cells:
            leave_a_run(tmp_path / "runs" / cell.name, **runs[cell.row, cell.seed])
        return Results("small", SMALL, collect(cells, tmp_path)).rows()

    return rows


@pytest.fixture
def equal(rows_of):
    """The text under "At equal updates, completions and seconds"."""
    return lambda runs: "\n".join(training.equal_cost(SMALL, rows_of(runs)))


def test_rows_are_compared_where_they_have_spent_as_much_as_the_cheapest_in_all(equal):
    runs = {("GRPO", seed): dict(accuracy=0.1 * seed, gain=0.05, steps=6, of=6) for seed in range(2)}
    runs |= {("DAPO", seed): dict(accuracy=0.1 * seed, gain=0.1, steps=6, of=6, groups=8) for seed in range(2)}
    text = equal(runs)
    assert "Rows spend 48 updates, 48–96 completions, 6 seconds." in text
    # At 48 completions: steps 5 and 6 of GRPO, step 3 of DAPO.
    assert "| training accuracy | Δ at 48 updates | Δ at 48 completions | Δ at 6 seconds | compared with |" in text
    assert "| GRPO | *-27.5 ± 0.0* | *-2.5 ± 0.0* | *-27.5 ± 0.0* | DAPO |" in text


def test_a_slow_row_gets_fewer_steps_and_compilation_is_no_cost(equal, rows_of):
    fast = dict(accuracy=0.1, gain=0.1, steps=6, of=6)
    text = equal({("GRPO", 0): fast, ("DAPO", 0): fast | {"seconds": 2.0}})
    assert "6–12 seconds" in text and "| GRPO | +0.0 | +0.0 | +25.0 | DAPO |" in text
    run = rows_of({("RLOO", 0): fast})["RLOO"][0]
    run.records[1] |= {"seconds": 50.0, "time/compiling": 70.0}  # it counts compilations since the process started
    assert list(run.costs["seconds"].values()) == [0, 1, 2, 3, 4, 5, 6]


def test_rows_that_differ_by_a_batch_or_have_not_ended_are_no_other_cost(equal):
    dear = dict(accuracy=0.1, steps=3, groups=103)
    assert not equal({("GRPO", 0): dict(accuracy=0.1, groups=100), ("DAPO", 0): dear, ("RLOO", 0): dear | {"of": 9}})
    assert equal({("CISPO", 0): dict(accuracy=0.1, groups=50), ("GSPO", 0): dear})


def test_a_row_whose_first_step_costs_more_than_all_of_anothers_is_left_out(equal):
    runs = {("DAPO", 0): dict(accuracy=0.1, groups=2), ("RLOO", 0): dict(accuracy=0.1, groups=9)}
    assert "| RLOO | +0.0 | – | +0.0 | DAPO |" in equal(runs)


def test_a_page_whose_rows_differ_in_cost_says_so_before_its_first_number(tmp_path, leave_a_run, without_figures):
    cells = SMALL.only(["GRPO", "DAPO"]).planned_runs([0])
    for cell, groups in zip(cells, (4, 8), strict=True):
        leave_a_run(tmp_path / "runs" / cell.name, 0.1, groups=groups)
    results = Results("small", SMALL, collect(cells, tmp_path))
    before, after = page.write_page(results, tmp_path).read_text(encoding="utf-8").split("| GRPO |", maxsplit=1)
    assert "(#at-equal-updates-completions-and-seconds)" in before
    assert "## At equal updates, completions and seconds" in after


@pytest.mark.parametrize(
    ("rule", "shown"),
    [("fixed", "5 (initial)"), ("every", "5 (every 16 updates)"), ("kl", "5 (κ = 0.01)"), ("behaviour", "–")],
)
def test_the_kl_to_the_reference_says_which_one(rows_of, rule, shown):
    """Tokens are of π_old: log π_old/π_θ is 2e-3 in their mean, log π_θ/π_ref 3e-3."""
    rows = rows_of({("DAPO", 0): dict(accuracy=0.5, rule=rule)})
    text = "\n".join(training.training_table(SMALL, rows))
    assert f"| DAPO | 50 | 0.1 | 2 | {shown} | 24 | – | – |" in text and "critic" not in text


def test_a_critic_that_has_learned_nothing_shows_it(rows_of):
    critic = {"explained_variance": 0.01, "value": 0.4, "return": 0.7}
    rows = rows_of({("DAPO", 0): dict(accuracy=0.5), ("PPO, untuned critic", 0): dict(accuracy=0.5, **critic)})
    text = "\n".join(training.training_table(SMALL, rows))
    assert (
        "Critic of the row PPO, untuned critic: it explains 0.01 of the variance of the returns; its mean value is 0.4"
        in text
    )
    assert "the row DAPO" not in text


def test_rows_that_share_no_seed_leave_out_their_paragraph_and_nothing_else():
    """As after two runs that failed: the page of the others is written."""
    pooled = SMALL.pooled["the eight RPG rows"]
    values = {row: {0: 1.0, 1: 2.0} for row in (*pooled, SMALL.baseline)}
    said = training.all_differences(SMALL, {"accuracy": values})
    assert any("which are one algorithm here" in text for text in said)
    apart = values | {pooled[0]: {0: 1.0}, pooled[1]: {1: 2.0}}
    without = training.all_differences(SMALL, {"accuracy": apart})
    assert without and not any("one algorithm" in text for text in without)
    starts = dataclasses.replace(SMALL, starts={"RLOO − DAPO": ("RLOO", "GSPO")})
    assert any("Over 2 starts" in text for text in training.all_differences(starts, {"a": values | TWO}))
    alone = values | TWO | {"RLOO": {5: 1.0}}
    assert not any("Over 2 starts" in text for text in training.all_differences(starts, {"a": alone}))


def test_numbers_have_the_digits_that_their_intervals_tell():
    shown = [seeds.Mean(74.123, 0.123, 3), seeds.Mean(170.2, 14.3, 3), seeds.Mean(0.5, float("nan"), 1)]
    assert [training.significant(m) for m in shown] == ["74.12 ± 0.12", "170 ± 14", "0.5"]
    rounding = [seeds.Mean(-0.0, 0.0, 3), seeds.Mean(3e-6, 1.4e-5, 3), seeds.Mean(1e-7, float("nan"), 1)]
    assert {training.significant(m) for m in rounding} == {"0"}
