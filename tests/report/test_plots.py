"""Pictures: curves.png from whatever a run has logged so far, and the drift of the rows of a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from rpg_jax.report import plots
from rpg_jax.report.plots import (
    CONVERSATION_PANELS,
    HELD_OUT,
    LINE,
    PANELS,
    curves_of,
    draw_curves,
    draw_drift,
    shared_points,
    smooth,
)
from rpg_jax.report.run_files import Run

FULL = {panel.key: 0.01 for panel in PANELS}


def log(run_dir, records, tail=""):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8"
    )
    return Run.read(run_dir)


def pixels(path, color):
    """How many pixels of a picture have a colour, to a level of antialiasing."""
    wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(imread(path)[..., :3] - wanted).max(-1) < 0.02).sum())


def test_every_panel_draws_its_metric(tmp_path):
    complete = pixels(draw_curves(log(tmp_path / "all", [{"step": s, **FULL} for s in (1, 2, 3)])), LINE)
    for panel in PANELS:
        fewer = {key: value for key, value in FULL.items() if key != panel.key}
        without = draw_curves(log(tmp_path / panel.key, [{"step": s, **fewer} for s in (1, 2, 3)]))
        assert pixels(without, LINE) < complete, panel.key


def test_a_run_with_an_environment_has_a_line_of_panels_more(tmp_path):
    turns = {panel.key: 2.0 for panel in CONVERSATION_PANELS}
    drawn = draw_curves(log(tmp_path / "turns", [{"step": s, **turns} for s in (1, 2)]))
    assert imread(drawn).shape[0] == 3 * 2.9 * 150 and pixels(drawn, LINE) > 0, "the other panels are empty"


def test_held_out_accuracy_appears_once_there_is_an_evaluation(tmp_path):
    run = log(tmp_path / "run", [{"step": 1, **FULL}])
    assert pixels(draw_curves(run), HELD_OUT) == 0
    run = log(tmp_path / "run", [{"step": 1, **FULL, "eval/accuracy": 0.6}])
    accuracy = pixels(draw_curves(run), HELD_OUT)
    run = log(tmp_path / "run", [{"step": 1, **FULL, "eval/accuracy": 0.6, "eval/reward": 0.1}])
    assert 0 < accuracy < pixels(draw_curves(run), HELD_OUT), "the reward stands beside it"


def test_a_number_above_a_panel_has_all_its_digits_before_the_point(tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(plots, "png", lambda figure: texts.extend(x.get_text() for x in figure.findobj(Text)) or b"")
    numbers = {"reward": 12345.6, "completion_length": 999.7, "entropy": 0.012345, "eval/reward": -2998.4}
    draw_curves(log(tmp_path, [{"step": 1, **numbers}]))
    assert {"training 12,346", "held out -2,998", "1,000", "0.0123"} <= set(texts)


def test_killed_and_odd_runs_are_drawn_too(tmp_path):
    run = log(tmp_path, [{"step": 1, "reward": float("nan")}, {"step": 2, "reward": None}], tail='{"step": 3, "rew')
    assert draw_curves(run) == tmp_path / "curves.png"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_run_without_steps_says_so(tmp_path):
    with pytest.raises(ValueError, match="no steps to draw"):
        draw_curves(Run.read(tmp_path))


def test_smoothing_keeps_length_level_and_ends():
    np.testing.assert_allclose(smooth(np.full(150, 3.0)), 3.0)
    np.testing.assert_allclose(smooth(np.arange(60.0)), [0.5, *range(1, 59), 58.5])  # of three values
    assert smooth(np.arange(4.0)).tolist() == [0, 1, 2, 3] and smooth(np.array([])).shape == (0,)


def drifted(last, kl=True):
    values = ({"mean_at_k": 0.3, "entropy": 0.4, "completion_length": 33.0} for _ in range(last + 1))
    measured = ({"initial_kl": 0.1 * step, "initial_kl_error": 0.02} if kl else {} for step in range(last + 1))
    records = [
        {"step": step, **{f"eval/A/{key}": x for key, x in (own | drift).items()}}
        for step, (own, drift) in enumerate(zip(values, measured, strict=True))
    ]
    return Run("a", 0, {}, records)


@pytest.mark.slow
def test_drift_is_drawn_where_a_run_measured_it():
    drawn = draw_drift({"GRPO": [drifted(3), drifted(2)], "DAPO": [drifted(3)]}, ["A"])
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000
    assert draw_drift({"GRPO": [drifted(3, kl=False)]}, ["A"]) is None


def test_seeds_are_compared_at_the_steps_that_all_have():
    steps, values = shared_points(curves_of([drifted(3), drifted(2)], "eval/A/initial_kl"))
    assert steps == [0, 1, 2] and values.shape == (2, 3)


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    name = r"a$\frac{b$ and $\undefined$"
    (folder := tmp_path / name).mkdir()
    run = log(folder, [{"step": step, f"eval/{name}/mean_at_k": 0.5, "reward": 0.1} for step in (1, 2)])
    assert draw_curves(run).stat().st_size > 1000


ASKS_FOR_LATEX = """
import io, sys
from pathlib import Path
from rpg_jax.report import plots
figure = plots.empty_figure(2, 2)
figure.subplots().set_title("a")
sys.exit(not plots.png(figure))
"""


def test_a_matplotlibrc_of_the_present_folder_asks_for_no_latex(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://planted\n", encoding="utf-8")
    how = {"env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", ASKS_FOR_LATEX], capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
