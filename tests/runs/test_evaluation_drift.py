from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from configs import reasoning
from rpg_jax import data
from rpg_jax.runs.evaluation import Drift
from rpg_jax.runs.reinforcement import make_drift
from rpg_jax.types import Completion, Turns


def test_the_kl_to_the_initial_policy_is_the_mean_log_ratio_of_completions():
    """log π_θ(x_t) = −x_t under weights 1 and −3 x_t under the initial weights 3: a completion has Σ 2 x_t.

    The tokens 9 are an environment's.
    """
    tokens = [[[1, 9, 2], [3]], [[4, 5, 9, 9, 6], [7]]]

    def completion(x):
        return Completion(
            np.array(x, np.int32), np.zeros(len(x)), "stop", 0, turns=Turns(np.array(x) == 9, np.zeros(2))
        )

    problem = data.Problem(0, "1+1=", "2", "")
    groups = [data.unscored(problem, np.ones(2, np.int32), [completion(x) for x in group]) for group in tokens]
    drift = Drift(
        SimpleNamespace(restore=lambda number, like: 3.0),
        None,
        lambda groups: data.pack(groups, data.RowShape(1, 16, 16, packed=True)),
        lambda weights, rows: (-weights * jnp.asarray(rows.targets, float), 0.5 * jnp.asarray(rows.targets, float)),
    )
    found = drift.metrics(groups, 1.0)
    by_prompt = np.array([(6 + 6) / 2, (30 + 14) / 2])
    assert found["initial_kl"] == pytest.approx(by_prompt.mean())
    assert found["initial_kl_error"] == pytest.approx(by_prompt.std(ddof=1) / np.sqrt(2))
    assert found["entropy"] == pytest.approx(0.5 * 28 / 7)


def test_completions_of_another_distribution_are_refused():
    config = reasoning.get_config()
    config.evaluation.temperature = 0.0
    with pytest.raises(ValueError, match="evaluation.drift needs"):
        make_drift(SimpleNamespace(config=config), None, None, None)
