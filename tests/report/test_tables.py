"""Runs at equal steps, completions or seconds; each value below is worked out by hand."""

from __future__ import annotations

import html
import json

import pytest

from rpg_jax.report import page, tables
from rpg_jax.report.run_files import START, Run
from rpg_jax.report.tables import markdown_table


@pytest.fixture
def leave(tmp_path):
    """Writes runs that are evaluated at every second step, at `accuracy` + step / 100."""

    def leave(
        method,
        seed,
        *,
        steps=4,
        groups=2,
        seconds=1.0,
        accuracy=0.5,
        reference=None,
        inputs=None,
        folder=None,
        **fields,
    ):
        folder = tmp_path / (folder or f"{method}-{seed}")
        folder.mkdir()
        config = {
            "method": method,
            "seed": seed,
            "rollout": {"group_size": 4},
            "reference": reference or {"rule": "fixed"},
            **fields,
        }
        (folder / "inputs.json").write_text(json.dumps(inputs or {}), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        records = [{"step": 0, **_evaluation(accuracy)}]
        for step in range(1, steps + 1):
            first = 10.0 if step == 1 else 0.0
            records.append({"step": step, "groups_generated": groups, "kl": step / 1000, "seconds": seconds + first})
            records[-1] |= {"time/compiling": first} | (_evaluation(accuracy + step / 100) if step % 2 == 0 else {})
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
        return Run.read(folder)

    return leave


def _evaluation(accuracy):
    return {"eval/easy/mean_at_k": accuracy, "eval/easy/pass_at_k": accuracy, "eval/easy/k": 4}


def at(axis, runs):
    configs = tables.configs_of(runs)
    budget = next(b for b in tables.budgets(configs) if b.axis == axis)
    return budget, tables.rows_within(configs, budget)


def test_each_axis_cuts_every_run_where_the_cheapest_ends(leave):
    runs = [leave("short", 0, steps=4, groups=6, seconds=3), leave("long", 0, steps=8, groups=2, seconds=1)]
    expected = {  # budget, the run that sets it, steps of the evaluations of short and long, Last of both
        "steps": (4, "short-0", [[4], [4]], [54, 54]),
        "completions": (64, "long-0", [[2], [8]], [52, 58]),  # short has generated 24, 48, 72
        "seconds": (8, "long-0", [[2], [8]], [52, 58]),  # short has taken 3, 6, 9 without compilation
    }
    for axis, (amount, name, steps, last) in expected.items():
        budget, rows = at(axis, runs)
        assert (budget.amount, budget.run) == (amount, name)
        assert [row.steps for row in rows] == steps
        assert [row.scores["easy", "last"].value for row in rows] == pytest.approx(last)
    assert rows[0].spent == pytest.approx({"steps": 2, "completions": 48, "seconds": 6})
    assert rows[1].kl.value == pytest.approx(7.5), "the mean of steps 7 and 8"


def test_intervals_are_over_seeds_and_differences_paired_by_seed(leave):
    runs = [leave("a", s, accuracy=0.1 * s) for s in range(3)] + [
        leave("b", s, accuracy=0.1 * s + 0.2) for s in (1, 2, 3)
    ]
    a, b = at("steps", runs)[1]
    last = a.scores["easy", "last"]
    assert (last.value, last.half) == pytest.approx((14, 4.302652730 * 10 / 3**0.5))  # t of two degrees of freedom
    assert a.differences == {} and (b.differences["easy"].value, b.differences["easy"].seeds) == (pytest.approx(20), 2)
    assert b.differences["easy"].half == pytest.approx(0, abs=1e-9), "seeds 1 and 2 differ equally"
    assert (a.ranks["easy", "last"], b.ranks["easy", "last"]) == (2, 1)


EASY = "task.held_out_sets: easy"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"evaluation": {"k": 8}}, "evaluation.k is 4 and 8"),
        ({"evaluation": {"k": 4, "problems": 9}}, "evaluation.problems is 9 and –"),
        ({"evaluation": {"k": 4}, "inputs": {EASY: "2"}}, "its problems differ"),
        ({"evaluation": {"k": 4}, "steps": 1}, "b-0 has no evaluation after its first step"),
        ({"evaluation": {"k": 4}, "inputs": {"begun from": "runs/p@4"}}, "b-0 has no evaluation after its first step"),
    ],
)
def test_evaluations_that_are_not_of_the_same_problems_have_no_difference_and_no_ranks(leave, other, why):
    runs = [leave("a", seed, evaluation={"k": 4}, inputs={EASY: "1"}) for seed in range(3)]
    configs = tables.configs_of([*runs, *(leave("b", seed, **other) for seed in range(3))])
    budget = tables.budgets(configs)[0]
    a, b = rows = tables.rows_within(configs, budget)
    assert b.differences == {} and b.left_out == {"easy": why} and not a.left_out
    assert ("easy", "last") not in a.ranks | b.ranks and ("easy", "last") in b.scores
    shown = page.results_table(configs, rows, {"easy": 4}, budget)
    assert f"Δ of easy is left out, because {why}." in html.unescape(shown)


def test_a_branch_is_another_config_than_its_parent_and_is_named_with_it(leave):
    parent = leave("a", 0, steps=6)
    branch = leave("b", 0, steps=6, inputs={"begun from": "runs/a@2"}, run={"start_from": "runs/a@2", "dir": "x"})
    assert [r["step"] for r in branch.trained] == [3, 4, 5, 6] and len(tables.configs_of([parent, branch])) == 2
    assert branch.costs["completions"] == {0: 0, 3: 8, 4: 16, 5: 24, 6: 32}
    configs = tables.configs_of([parent, branch])
    said = page.notes(configs, tables.rows_within(configs, tables.budgets(configs)[0]))
    assert "b-0 was begun from runs/a@2: its steps go on from there, so" in said and "a-0 was begun" not in said


def test_branches_of_equal_text_from_other_weights_are_no_seeds_of_one_config(leave):
    """Both say runs/a@2, each of its own folder."""
    runs = [
        leave("b", seed, inputs={"begun from": f"/{folder}/runs/a@2", START: start}, run={"start_from": "runs/a@2"})
        for seed, (folder, start) in enumerate([("x", "1f"), ("y", "2f"), ("z", "1f")])
    ]
    configs = tables.configs_of(runs)
    assert [[run.seed for run in config.runs] for config in configs] == [[0, 2], [1]]
    assert [config.label.partition(", ")[2] for config in configs] == ["first weights 1f", "first weights 2f"]


def test_runs_that_differ_in_their_servers_and_places_are_runs_of_one_config(leave):
    runs = [
        leave("a", seed, servers={"urls": f"http://host-{seed}:8000"}, warm_start={"dir": f"{seed}/warm_starts"})
        for seed in range(2)
    ]
    assert len(tables.configs_of(runs)) == 1
    assert len(tables.configs_of([*runs, leave("a", 2, servers={"urls": "x"}, train={"updates_per_step": 9})])) == 2


def test_labels_tell_configs_apart_that_differ_in_the_third_field_alone():
    values = ((1, 1, 1), (1, 1, 2), (2, 2, 1))
    runs = [Run("run", 0, {"method": "a", "x": x, "y": y, "z": z}, []) for x, y, z in values]
    labels = [config.label for config in tables.configs_of(runs)]
    assert labels == ["a, x 1, y 1, z 1", "a, x 1, y 1, z 2", "a, x 2, y 2, …"]
    runs = [Run("run", 0, {"method": "a", "c.x": x, "c.y": x, "loss.name": x}, []) for x in ("b", "c")]
    assert [config.label for config in tables.configs_of(runs)] == ["a, name b, x b, …", "a, name c, x c, …"]


def test_no_row_is_the_best_below_three_seeds(leave):
    runs = [leave("a", s) for s in range(3)] + [leave("b", s, accuracy=0.7) for s in range(2)]
    configs = tables.configs_of(runs)
    budget, rows = at("steps", runs)
    assert [row.ranks for row in rows] == [{}, {}]
    text = page.results_table(configs, rows, {"easy": 4}, budget) + page.notes(configs, rows)
    assert "<b>" not in text and "fewer than 3 seeds" in text


def test_an_axis_that_a_run_does_not_record_is_left_out(leave):
    configs = tables.configs_of([leave("a", 0), leave("b", 0)])
    del configs[1].runs[0].costs["seconds"]
    assert [b.axis for b in tables.budgets(configs)] == ["steps", "completions"]


def test_kls_to_different_policies_carry_a_warning(leave):
    every = {"rule": "every", "every": "16 updates"}
    runs = [leave("a", 0), leave("b", 0, reference=every), leave("c", 0)]
    configs = tables.configs_of(runs)
    _, rows = at("steps", runs)
    assert "a: to the initial policy; b: to the policy after every 16 updates" in page.notes(configs, rows)
    assert "anchors" not in page.notes(configs[::2], rows[::2])
    runs = [leave(name, 0, reference={"rule": "teacher", "every": "1 step", "path": name}) for name in ("d", "e")]
    _, rows = at("steps", runs)
    assert "a: to the teacher d; b: to the teacher e." in page.notes(tables.configs_of(runs), rows)


def test_kls_to_two_initial_policies_carry_a_warning(leave):
    runs = [leave(name, 0, inputs={START: start}) for name, start in (("a", "1f"), ("b", "2f"), ("c", "1f"))]
    configs, (_, rows) = tables.configs_of(runs), at("steps", runs)
    assert "a: to the initial policy (1f); b: to the initial policy (2f)" in page.notes(configs, rows)
    assert "anchors" not in page.notes(configs[::2], rows[::2])


def test_kls_to_two_teachers_carry_a_warning(leave):
    runs = [leave(name, 0, reference={"rule": "teacher", "path": f"teachers/{name}"}) for name in "ab"]
    configs, (_, rows) = tables.configs_of(runs), at("steps", runs)
    assert "a: to the teacher teachers/a; b: to the teacher teachers/b" in page.notes(configs, rows)


def test_numbers_are_aligned_to_the_right_and_empty_cells_stay_cells():
    assert (
        markdown_table(("", "score"), [("a", 1), ("", 2.5)], numbers=(1,))
        == "| | score |\n|---|--:|\n| a | 1 |\n| | 2.5 |"
    )


def test_text_cannot_end_a_cell_or_a_row():
    assert markdown_table(("a",), [("x|y\nz",)]).splitlines()[2:] == ["| x\\|y z |"]


def test_a_run_repeated_in_another_folder_is_no_second_seed(leave, capsys):
    first, other, again = leave("a", 0), leave("a", 1), leave("a", 0, folder="again", accuracy=0.7)
    (config,) = tables.configs_of([first, other, again, again])
    assert config.runs == [again, other] and capsys.readouterr().err.splitlines() == [
        "left out: a-0: again has the same config and seed",
        "left out: again: again has the same config and seed",
    ]
    (row,) = at("steps", [first, again])[1]
    assert row.seeds == 1 and row.scores["easy", "last"].margin == ""
