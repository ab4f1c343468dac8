"""The warm start stops inside its range, however steep the learning curve."""

import itertools

import jax.numpy as jnp
import pytest

from rpg_jax.runs.warm_start import train_to_accuracy
from rpg_jax.training.state import TrainState


def run(curve, **settings):
    """The weights are a count of updates; accuracy is `curve` of it."""
    target = {**dict(min_accuracy=0.4, max_accuracy=0.6, check_every=50, max_updates=2000), **settings}
    checks = []
    state, reached = train_to_accuracy(
        TrainState(jnp.int32(0), (), jnp.int32(0), jnp.int32(0)),
        lambda state, batch: (state.replace(params=state.params + 1), None),
        itertools.count(),
        lambda params: curve(int(params)),
        **target,
        on_check=lambda updates, accuracy: checks.append(accuracy),
    )
    return int(state.params), reached, checks


def test_it_stops_at_the_first_check_inside_the_range():
    state, reached, checks = run(lambda n: n / 1000)
    assert (state, reached) == (400, 0.4) and len(checks) == 8


def test_an_overshoot_is_taken_back_and_approached_in_smaller_steps():
    state, reached, checks = run(lambda n: 0.0 if n < 60 else 0.5 if n < 70 else 1.0)
    assert 60 <= state < 70 and reached == 0.5 and 1.0 in checks


def test_a_range_inside_one_update_is_an_error_that_says_what_to_change():
    with pytest.raises(ValueError, match="learning_rate"):
        run(lambda n: 0.0 if n < 60 else 1.0)


def test_a_range_never_reached_is_an_error_with_the_last_accuracy():
    with pytest.raises(ValueError, match=r"in 200 updates, the last was below it \(0.100\): raise warm_start.learn"):
        run(lambda n: 0.1, max_updates=200)


def test_a_range_overshot_at_the_last_check_is_said_to_be_overshot():
    with pytest.raises(ValueError, match=r"in 50 updates, the last was above it \(1.000\): lower warm_start.learn"):
        run(lambda n: 0.0 if n < 20 else 1.0, max_updates=50)


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="min_accuracy"):
        run(lambda n: 0.1, min_accuracy=0.6, max_accuracy=0.6)
