"""The weights that a run starts from are read once, from where they are."""

import jax
import pytest

from configs import tiny
from rpg_jax.runs.learner import init_params, no_params
from rpg_jax.runs.memory import fitting_layout
from rpg_jax.training.state import shardings_of


def test_the_weights_of_a_resumed_run_are_not_read_from_the_model_too():
    config = tiny.get_config()
    config.model.num_layers = 1
    layout = fitting_layout(config, 32)
    layout.config.model.path = "/nowhere/model"
    with pytest.raises(ValueError, match="/nowhere/model"):
        init_params(layout)
    params = no_params(layout)
    shapes, places = (jax.tree.map(of, params) for of in (lambda x: x.shape, lambda x: x.sharding))
    assert shapes == jax.tree.map(lambda x: x.shape, layout.weights) and places == shardings_of(layout.weights)
    assert not any(x.any() for x in jax.tree.leaves(params))
