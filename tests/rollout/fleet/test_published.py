"""Weights travel to the bit, from any sharding, and what is incomplete is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.rollout import RolloutError, weights_checksum
from rpg_jax.rollout.fleet.published import Published, assembled, name_of
from rpg_jax.rollout.fleet.shelf import Shelf


@pytest.fixture
def params():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
    values = {"w": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), "b": np.float32(2) * np.ones(5)}
    where = {"w": NamedSharding(mesh, PartitionSpec("fsdp")), "b": NamedSharding(mesh, PartitionSpec())}
    return jax.tree.map(lambda x, s: jax.device_put(np.float32(x), s), values, where)


def read(shelf, weights):
    item = shelf.get(name_of(weights.checksum()), 0.0)
    return dict(item.head), bytearray(b"".join(item.chunks(0)))


def test_shards_that_several_devices_have_are_published_once_and_put_together_to_the_bit(params):
    shelf = Shelf()
    weights = Published(params, shelf, dtype=jnp.bfloat16)
    head, held = read(shelf, weights)
    assert len(head["pieces"]) == 5 and len(held) == 2 * (24 + 5)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    shapes = jax.eval_shape(lambda: rounded)
    arrays = assembled(shapes, [(head, held)])
    jax.tree.map(np.testing.assert_array_equal, arrays, rounded)
    assert weights_checksum(jax.device_put(arrays)) == weights.checksum()
    half = {"pieces": head["pieces"][:3]}, held
    with pytest.raises(ValueError, match=r"do not cover \['w'\] exactly once"):
        assembled(shapes, [half])
    with pytest.raises(ValueError, match="which the model has not"):
        assembled({"w": shapes["w"]}, [(head, held)])


def test_a_sync_replaces_the_weights_on_the_shelf_and_staged_ones_are_a_copy(params):
    shelf = Shelf()
    weights = Published(params, shelf)
    first = weights.checksum()
    following = jax.tree.map(lambda x: x + 1, params)
    staged = weights.stage(following)
    assert weights.checksum() == first
    with pytest.raises(RolloutError, match="the fleet has weights"):
        weights.verify(staged)
    expected = jax.tree.map(np.array, following)
    jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(following)
    assert all(x.is_deleted() for x in jax.tree.leaves(following)), "a view would keep the trainer's memory"
    weights.sync(staged, 4)
    assert weights.version == 4 and shelf.get(name_of(first), 0.0) is None
    arrays = assembled(jax.eval_shape(lambda: params), [read(shelf, weights)])
    jax.tree.map(np.testing.assert_array_equal, arrays, expected)
