import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from rpg_jax import models, parallel
from rpg_jax.models.weights import Int8, quantized, quantized_shardings

QWEN2 = models.DecoderConfig(
    vocab_size=50,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    qkv_bias=True,
    qk_norm=False,
)


def test_matrices_are_off_by_half_a_step_of_their_channel_at_most_and_nothing_else_changes():
    _, params = models.init(QWEN2)
    params, rounded = jax.device_get((params, jax.jit(quantized)(params)))
    changed = 0
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        found = rounded
        for key in path:
            found = found[key.key]
        if isinstance(found, Int8):
            changed += 1
            assert found.values.dtype == jnp.int8 and found.scale.size < weight.size / 4
            assert np.all(np.abs(found.values * found.scale - weight) <= found.scale * 0.5001)  # f32 rounding
        else:
            np.testing.assert_array_equal(found, weight)
    assert changed == 7  # q k v o gate up down: the biases [L, K, H] have three dimensions too


def test_scales_lie_where_their_channels_do():
    shapes = models.abstract(QWEN2)[1]
    mesh = parallel.make_mesh({"fsdp": 4, "tensor": 2})
    where = quantized_shardings(parallel.shardings(models.logical_axes(QWEN2), shapes, mesh), shapes)
    layers = where["layers"]
    assert layers["mlp"]["gate"].scale.spec == PartitionSpec(None, None, "tensor")
    assert layers["attention"]["o"].scale.spec == PartitionSpec(None, None, None, "fsdp")
    params = jax.jit(quantized, out_shardings=where)(models.init(QWEN2)[1])
    assert jax.tree.structure(params) == jax.tree.structure(where)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def test_the_rounded_model_is_close_to_the_model(family):
    mixture = {} if family == "dense" else {"experts": models.Experts(4, 2, 16)}
    config = models.DecoderConfig(
        vocab_size=50, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=48, **mixture
    )
    graphdef, params = models.init(config)
    tokens = jnp.arange(12).reshape(2, 6)
    module, rounded = (nnx.merge(graphdef, p) for p in (params, quantized(params)))
    hidden, other = (m.prefill(tokens, jnp.full(2, 6))[0] for m in (module, rounded))
    assert 0 < jnp.abs(hidden - other).max() < 0.1 * jnp.abs(hidden).max()
