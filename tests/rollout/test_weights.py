from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import models, parallel
from rpg_jax.models import Base
from rpg_jax.rollout import RolloutError, Weights, weights_checksum
from rpg_jax.rollout import weights as weights_module


def tree(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {"a": jnp.asarray(rng.normal(size=(16, 3)), dtype), "b": {"c": jnp.asarray(rng.normal(size=(16, 3)), dtype)}}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_flipped_bit_changes_the_checksum(dtype):
    params = tree(dtype)
    clean = weights_checksum(params)
    bits = params["a"].dtype.itemsize * 8
    rng = np.random.default_rng(1)
    for _ in range(60):
        raw = np.array(params["a"]).view(f"u{bits // 8}")
        i, j = rng.integers(16), rng.integers(3)
        raw[i, j] ^= raw.dtype.type(1 << int(rng.integers(bits)))
        assert weights_checksum({**params, "a": jnp.asarray(raw.view(params["a"].dtype))}) != clean


def test_values_at_another_place_or_name_change_the_checksum():
    params = tree()
    clean = weights_checksum(params)
    moved = {"a": params["a"][::-1], "b": params["b"]}
    swapped = {"a": params["b"]["c"], "b": {"c": params["a"]}}
    reshaped = {"a": params["a"].T, "b": params["b"]}
    assert len({clean, *(weights_checksum(p) for p in (moved, swapped, reshaped))}) == 4


def test_equal_weights_have_equal_checksums_under_every_sharding():
    params = tree()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(params, jax.NamedSharding(mesh, jax.P("x")))
    assert weights_checksum(sharded) == weights_checksum(jax.tree.map(jnp.array, params)) == weights_checksum(params)


def test_a_sync_without_cast_shares_the_arrays_and_carries_the_version():
    params, newer = tree(), jax.tree.map(lambda x: x + 1, tree())
    weights = Weights(params, 4)
    with weights.pinned() as held:
        assert held["a"] is params["a"]
    weights.sync(newer, 5)
    assert (weights.version, weights.checksum()) == (5, weights_checksum(newer))


def test_a_cast_sync_is_verified_in_the_sampler_dtype():
    weights = Weights(tree(), dtype=jnp.bfloat16)
    weights.verify(tree())
    assert weights.checksum() == weights_checksum(tree(jnp.bfloat16)) != weights_checksum(tree())


def test_corrupted_sampler_weights_raise_the_alarm(build, model):
    _, params = model
    sampler = build("lockstep")
    sampler.weights.verify(params)
    corrupted = {**params, "final_norm": params["final_norm"].at[2].add(1e-7)}
    sampler.sync_weights(corrupted, 1)
    try:
        with pytest.raises(RolloutError, match="not the trainer's"):
            sampler.weights.verify(params)
        assert sampler.weights.checksum() != weights_checksum(params)
    finally:
        sampler.sync_weights(params, 0)


def test_the_checksum_is_computed_once_a_sync_and_a_verification_always_computes_it(monkeypatch):
    computed = []
    monkeypatch.setattr(
        weights_module, "weights_checksum", lambda params: computed.append(params["a"]) or len(computed)
    )
    weights = Weights(tree())
    assert weights.checksum() == weights.checksum() == 1
    monkeypatch.setattr(weights_module, "weights_checksum", lambda params: computed.append(params["a"]) or 7)
    weights.verify(tree())
    assert weights.checksum() == 7 and len(computed) == 3
    weights.sync(own := tree(), 1)
    weights.verify(own)  # the same arrays: nothing is compared
    assert weights.checksum() == 7 and len(computed) == 4


@pytest.mark.parametrize("changes", [{"dtype": jnp.bfloat16}, pytest.param({"int8": True}, marks=pytest.mark.slow)])
def test_staged_weights_reach_devices_of_their_own_though_the_trainer_goes_on(model, model_config, changes):
    axes, (_, params) = models.logical_axes(model_config), model
    meshes = ({"fsdp": 4}, jax.devices()[:4]), ({"replica": 2, "tensor": 2}, jax.devices()[4:])
    trained, sampled = (parallel.shardings(axes, params, parallel.make_mesh(*mesh)) for mesh in meshes)
    params = jax.device_put(params, trained)
    weights = Weights(params, shardings=sampled, **changes)
    first = weights.checksum()
    newer = jax.tree.map(lambda x: x + 1, params)
    staged, expected = weights.stage(newer), Weights(newer, **changes).checksum()
    jax.tree.map(lambda x: x.delete(), newer)
    with ThreadPoolExecutor() as thread:
        thread.submit(weights.sync, staged, 1).result()
        thread.submit(weights.verify, staged).result()
    with weights.pinned() as held:
        assert weights_checksum(held) == expected != first
        assert set().union(*(x.sharding.device_set for x in jax.tree.leaves(held))) == set(jax.devices()[4:])
    with pytest.raises(RolloutError, match="not the trainer's"):
        weights.verify(params)
    weights.sync(params, 2)
    weights.verify(params)


def adapted(value):
    """A base of one stacked matrix with adapters whose B is `value`."""
    rng = np.random.default_rng(2)
    base = {"q": jnp.asarray(rng.normal(size=(2, 4, 6)), jnp.float32), "norm": jnp.ones((2, 4))}
    a = jnp.asarray(rng.normal(size=(2, 4, 1)), jnp.float32)
    return Base(base, 0.5), {"q": {"a": a, "b": jnp.full((2, 1, 6), value, jnp.float32)}}


def test_a_sync_of_adapters_moves_them_alone_and_shares_the_base():
    base, adapters = adapted(1.0)
    weights = Weights(adapters, base=base)
    weights.sync(newer := adapted(2.0)[1], 1)
    weights.verify(newer)
    with weights.pinned() as params:
        assert params["q"].base is base.weights["q"] and params["norm"] is base.weights["norm"]
        np.testing.assert_array_equal(params["q"].b, np.full((2, 1, 6), 1.0))  # 2 times alpha / rank
    with pytest.raises(RolloutError, match="are not the trainer's"):
        weights.verify(adapters)


def test_merged_weights_are_made_anew_at_every_sync():
    base, adapters = adapted(1.0)
    weights = Weights(adapters, base=base, merge=True)
    for value in (1.0, 3.0):
        weights.sync(adapted(value)[1], 1)
        weights.verify(adapted(value)[1])
        with weights.pinned() as params:
            expected = base.weights["q"] + 0.5 * value * jnp.broadcast_to(adapters["q"]["a"], (2, 4, 6))
            np.testing.assert_allclose(params["q"], expected, atol=1e-6)
