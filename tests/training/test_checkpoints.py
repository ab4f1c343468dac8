"""States come back bit for bit; what does not fit is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.training.checkpoints import Checkpoints, Snapshots, bit_checksum

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), tree)


def tree(seed, width=4):
    key = jax.random.key(seed)
    return {"params": {"w": jax.random.normal(key, (3, width))}, "updates": jnp.int32(seed)}


def test_checkpoints_come_back_bit_for_bit_and_only_the_last_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, tree(step), {"step": step, "stream": {"at": 5 * step}})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3] and checkpoints.latest_step() == 3
    assert bit_checksum(checkpoints.restore(3, like(tree(0)))) == bit_checksum(tree(3))
    assert checkpoints.record(2) == {"step": 2, "stream": {"at": 10}}
    checkpoints.close()


def test_a_save_is_not_disturbed_by_donating_its_buffers(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    state = tree(1, width=200_000)
    expected = bit_checksum(state)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    checkpoints.save(1, state, {"step": 1})
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    assert bit_checksum(checkpoints.restore(1, like(tree(0, width=200_000)))) == expected
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, tree(1), {"step": 1})
    checkpoints.wait()
    with pytest.raises(ValueError, match=r"c/1 does not fit this config"):
        checkpoints.restore(1, like(tree(0, width=5)))
    checkpoints.close()


def test_snapshots_are_replaced_atomically_and_outlive_donation(tmp_path):
    snapshots = Snapshots(tmp_path)
    snapshots.save(0, tree(1))
    state = tree(2, width=4)
    expected = bit_checksum(state)
    snapshots.save(0, state)
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(state))
    assert bit_checksum(snapshots.restore(0, like(tree(0)))) == expected


def test_the_checksum_sees_one_flipped_bit_a_shape_and_a_name():
    base = {"w": jnp.arange(6, dtype=jnp.float32)}
    flipped = np.arange(6, dtype=np.float32)
    flipped.view(np.int32)[3] ^= 1
    others = [{"w": flipped}, {"w": base["w"].reshape(2, 3)}, {"v": base["w"]}, {"w": base["w"].astype(jnp.int32)}]
    assert len({bit_checksum(t) for t in [base, *others]}) == 5
