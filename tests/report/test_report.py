"""A run folder is enough to draw its pages again."""

import json
import sys

import pytest

from rpg_jax.report import __main__ as report


def test_curves_and_summary_are_made_again_from_the_logs(tmp_path, monkeypatch, capsys):
    records = [{"step": s, "reward": 0.1 * s, "eval/held_out/mean_at_k": 0.5 + 0.1 * s} for s in (0, 1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    report.main()
    assert "held_out accuracy: 0.500 (step 0) → 0.700 (step 2)" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 0 and "0.7000" in (tmp_path / "summary.md").read_text()


def test_a_folder_without_steps_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit):
        report.main()
    assert "no steps to draw" in capsys.readouterr().err
