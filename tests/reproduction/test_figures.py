from __future__ import annotations

import pytest

from rpg_jax.reproduction.figures import _shared, draw_drift


def records(last, kl=True):
    values = ({"mean_at_k": 0.3, "entropy": 0.4, "completion_length": 33.0} for _ in range(last + 1))
    measured = ({"initial_kl": 0.1 * step, "initial_kl_error": 0.02} if kl else {} for step in range(last + 1))
    return [
        {"step": step, **{f"eval/A/{key}": x for key, x in (own | drift).items()}}
        for step, (own, drift) in enumerate(zip(values, measured, strict=True))
    ]


@pytest.mark.slow
def test_drift_is_drawn_where_a_run_measured_it():
    drawn = draw_drift({"GRPO": [records(3), records(2)], "DAPO": [records(3)]}, ["A"])
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000
    assert draw_drift({"GRPO": [records(3, kl=False)]}, ["A"]) is None


def test_seeds_are_compared_at_the_steps_that_all_have():
    steps, values = _shared([records(3), records(2)], "eval/A/initial_kl")
    assert steps == [0, 1, 2] and values.shape == (2, 3)
