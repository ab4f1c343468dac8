"""summary.md and the closing words of a run, for finished, unfinished and unevaluated runs."""

from __future__ import annotations

import json

import pytest

from rpg_jax.report.run_files import Run
from rpg_jax.report.summary import closing_message, write_summary


@pytest.fixture
def run_dir(tmp_path):
    """Three steps, evaluated at 1, 2 and 3; the second is the best."""
    records = [
        {
            "step": step,
            "seconds": 50.0,
            "tokens_per_second": 30.0,
            "eval/accuracy": mean,
            "eval/held out/mean_at_k": mean,
            "eval/held out/pass_at_k": mean + 0.1,
            "eval/held out/k": 4,
            "sampler_gap_max": gap,
        }
        for step, mean, gap in ((1, 0.5, 1e-6), (2, 0.75, 3e-5), (3, 0.625, 2e-6))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (tmp_path / "config.json").write_text(
        json.dumps({"method": "RPG-UFKL", "loss": {"kl_coef": 1e-4}}), encoding="utf-8"
    )
    return tmp_path


def row(text, *cells):
    return any([cell.strip() for cell in line.strip("|").split("|")] == list(cells) for line in text.splitlines())


def test_last_and_best_carry_their_own_step_and_pass_at_k(run_dir):
    text = write_summary(Run.read(run_dir)).read_text(encoding="utf-8")
    assert row(text, "held out", "Last", "3", "4", "0.6250", "–", "0.7250", "–")
    assert row(text, "held out", "Best", "2", "4", "0.7500", "–", "0.8500", "–")


def test_work_adds_up_over_steps_and_takes_the_largest_gap(run_dir):
    text = write_summary(Run.read(run_dir)).read_text(encoding="utf-8")
    assert row(text, "time in steps", "2 min 30 s")
    assert row(text, "completion tokens", "4,500")
    assert row(text, "completion tokens per second", "30")
    assert row(text, "largest sampler–trainer gap", "3.0e-05 nats")


def test_settings_come_from_the_resolved_config(run_dir):
    text = write_summary(Run.read(run_dir)).read_text(encoding="utf-8")
    assert row(text, "method", "`RPG-UFKL`") and row(text, "KL coefficient β", "`0.0001`")


def test_adapters_are_a_setting_where_a_run_has_them(run_dir):
    for rank in (0, 4):
        lora = {"rank": rank, "alpha": 32.0, "targets": "all"}
        (run_dir / "config.json").write_text(json.dumps({"model": {"lora": lora}}), encoding="utf-8")
        text = write_summary(Run.read(run_dir)).read_text(encoding="utf-8")
        assert row(text, "adapters", "`rank 4, alpha 32, all`") == ("| adapters |" in text) == bool(rank)


def test_only_files_that_exist_are_listed(run_dir):
    text = write_summary(Run.read(run_dir)).read_text(encoding="utf-8")
    assert "(metrics.jsonl)" in text and "curves.png" not in text


def test_each_held_out_set_is_scored_by_itself(run_dir):
    later = {"step": 4}
    for name, mean in (("easy", 0.9), ("hard/er", 0.2)):
        later |= {f"eval/{name}/mean_at_k": mean, f"eval/{name}/standard_error": 0.05, f"eval/{name}/k": 32}
    with (run_dir / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(later) + "\n")
    run = Run.read(run_dir)
    found = run.evaluations
    assert list(found) == ["held out", "easy", "hard/er"]
    assert found["hard/er"] == [{"step": 4, "mean_at_k": 0.2, "standard_error": 0.05, "k": 32}]
    text = write_summary(run).read_text(encoding="utf-8")
    assert row(text, "hard/er", "Best", "4", "32", "0.2000", "0.0500", "–", "–")


def test_a_run_that_did_nothing_still_has_a_summary(tmp_path):
    text = write_summary(Run.read(tmp_path)).read_text(encoding="utf-8")
    assert "No evaluation yet." in text and "No step was finished." in text


def test_closing_words_name_the_score_and_the_picture(run_dir):
    (run_dir / "curves.png").touch()
    write_summary(Run.read(run_dir))
    text = closing_message(Run.read(run_dir))
    assert "0.500 (step 1) → 0.625 (step 3)" in text
    assert str(run_dir / "curves.png") in text and str(run_dir / "summary.md") in text
