"""The course of training as plain data for the page: curves over steps, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax.report.compare import Config, Json, anchor
from rpg_jax.report.curves import CONVERSATION_PANELS, PANELS, Panel, smooth
from rpg_jax.report.rollouts import evenly
from rpg_jax.report.run_files import series

DYNAMICS = (
    *PANELS,
    *CONVERSATION_PANELS,
    Panel("Sampler–trainer gap", "nats per token, mean of absolute values", "sampler_gap"),
    Panel("KL term's share of the gradient", "%, by norms over trained tokens", "kl_gradient_share", 100),
    Panel("Gradient norm", "before it is clipped", "grad_norm"),
    Panel("Learning rate", "of the step's last update", "learning_rate"),
    Panel("Speed", "completion tokens per second", "tokens_per_second"),
)
COMPILING = ("time/compilations", "time/compiling")  # other times include these
BETWEEN_STEPS = ("time/evaluation", "time/checkpoint")  # not in a step's "seconds"
POINTS = 400  # most points of a curve


def dynamics(configs: Sequence[Config]) -> list[Json]:
    """The curves of each config in each of `DYNAMICS` that any run has.

    A curve has its steps, and the mean, the least and the largest of the seeds' moving averages. `raw` is the mean
    without moving averages; `held_out` are the points of the panel's second metric, if it has one.
    """
    curves = {panel: [_curve(c, panel) for c in configs] for panel in DYNAMICS}
    differ = "; anchors differ: do not compare" if len({anchor(c) for c in configs}) > 1 else ""
    units = {panel: panel.unit + differ * (panel.key == "kl") for panel in curves}
    return [{"title": panel.title, "unit": units[panel], "curves": own} for panel, own in curves.items() if any(own)]


def timing(configs: Sequence[Config]) -> Json:
    """Mean seconds of each part of a step, over all steps but each run's first, which compiles.

    Evaluations and checkpoints come between steps; their time is spread over all steps.

    Returns:
      parts: names in order.
      rows: for each config {seconds: [one for each part], total, tokens_per_second, compiling}, or None without steps;
        `compiling` is in seconds per run.
    """
    timed = [[r for run in c.runs for r in [r for r in run.records if "seconds" in r][1:]] for c in configs]
    keys = dict.fromkeys(k for own in timed for r in own for k in r if k.startswith("time/") and k not in COMPILING)
    rows = [_times(c, own, list(keys)) if own else None for c, own in zip(configs, timed, strict=True)]
    parts = [k.removeprefix("time/").replace("_", " ").replace("logprobs", "log-probs") for k in keys]
    return {"parts": parts, "rows": rows}


def _times(config: Config, records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Json:
    def mean_of(key: str) -> float:
        return sum(r.get(key) or 0.0 for r in records) / len(records)

    seconds = {key: mean_of(key) for key in keys}
    step = mean_of("seconds")
    tokens = sum(r["seconds"] * (r.get("tokens_per_second") or 0.0) for r in records) / len(records)
    compiling = [sum(r.get("time/compiling") or 0.0 for r in run.records) for run in config.runs]
    return {
        "seconds": list(seconds.values()),
        "total": step + sum(seconds.get(key, 0.0) for key in BETWEEN_STEPS),
        "tokens_per_second": tokens / step if step else 0.0,
        "compiling": sum(compiling) / len(compiling),
    }


def _curve(config: Config, panel: Panel) -> Json | None:
    seeds = [dict(zip(*series(run.records, panel.key), strict=True)) for run in config.runs]
    seeds = [s for s in seeds if s]
    if not seeds:
        return None
    steps = sorted(set.intersection(*map(set, seeds)))
    raw = panel.scale * np.array([[s[step] for step in steps] for s in seeds])
    averaged = np.array([smooth(row, len(steps) // 20 | 1) for row in raw])
    kept = evenly(len(steps), POINTS)
    found: Json = {"steps": [steps[i] for i in kept], "raw": _rounded(raw.mean(0)[kept])}
    for name, values in (("mean", averaged.mean(0)), ("low", averaged.min(0)), ("high", averaged.max(0))):
        found[name] = _rounded(values[kept])
    if panel.held_out:
        marked = [dict(zip(*series(run.records, panel.held_out), strict=True)) for run in config.runs]
        common = sorted(set.intersection(*map(set, marked)))
        found["held_out"] = [[step, panel.scale * float(np.mean([m[step] for m in marked]))] for step in common]
    return found


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.5g}") for v in values]
