"""Shared by the tests of the losses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def batch():
    """A generic off-policy batch with a distinct reference, ragged completions and a sampler; f32[4, 6]."""
    rng = np.random.default_rng(13)
    shape = (4, 6)
    behaviour = -np.abs(rng.normal(1.5, 0.8, shape)) - 0.05
    noise = rng.normal(0, 1, (3, *shape)) * np.array([0.2, 0.4, 0.6, 1.5])[:, None]
    lengths = np.array([6, 4, 5, 3])
    arrays = {
        "logprobs": behaviour + noise[0],
        "behaviour_logprobs": behaviour,
        "ref_logprobs": behaviour + noise[1],
        "sampler_logprobs": behaviour + 0.1 * noise[2],
        "advantages": np.broadcast_to(rng.normal(0, 1, (4, 1)), shape),
        "mask": np.arange(6) < lengths[:, None],
    }
    return {name: jnp.asarray(x, bool if name == "mask" else jnp.float32) for name, x in arrays.items()}
