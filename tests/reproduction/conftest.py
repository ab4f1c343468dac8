from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rpg_jax.report import plots


@pytest.fixture
def leave_a_run() -> Callable[..., None]:
    """Writes a run folder as training leaves it, in miniature."""

    def leave(
        folder: Path,
        accuracy: float,
        *,
        steps=3,
        of=3,
        groups=4,
        gain=0.0,
        rule="every",
        commit="",
        start="",
        **metrics: float,
    ):
        """`steps` of `of` steps, each of `groups` groups of two completions; accuracy gains `gain` in each."""
        folder.mkdir(parents=True)
        if commit:
            versions = {"commit": commit, "packages": {"jax": "0.10.2"}, "devices": "1 x cpu", "command": ["/a/path"]}
            (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
        if start:
            (folder / "inputs.json").write_text(json.dumps({"weights before the first step": start}), encoding="utf-8")
        config = {
            "train": {"steps": of},
            "warm_start": {"enabled": True},
            "evaluation": {"k": 2},
            "optimizer": {"learning_rate": 1e-4},
            "run": {"dir": str(folder.parent)},
            "rollout": {"group_size": 2},
            "reference": {"rule": rule, "every": "16 updates", "kl_threshold": 0.01},
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        metrics = {"entropy": 0.1, "behaviour_forward_kl_k1": 2e-3, "kl_k1": 3e-3, "groups_generated": groups} | metrics
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(steps + 1):
                right = accuracy + gain * step
                scores = {"mean_at_k": right + 0.01 * (step == 1), "pass_at_k": 1.0, "pass@1": right, "pass@2": 1.0}
                evals = {f"eval/{name}/{key}": value for name in ("held out", "carry") for key, value in scores.items()}
                trained = {"accuracy": right, "updates": 8 * step, **metrics} if step else {}
                file.write(json.dumps({"step": step, "seconds": 1.0, **evals, **trained}) + "\n")
        (folder / "summary.md").write_text("done", encoding="utf-8")

    return leave


@pytest.fixture
def without_figures(monkeypatch) -> None:
    """Pages are written without their figures, which take seconds."""
    for name in ("scores", "dynamics"):
        monkeypatch.setattr(plots, f"draw_{name}", lambda *_: None)
