"""States come back bit for bit; what cannot be trusted is refused by name, and the one before it used."""

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.parallel import hosts
from rpg_jax.rollout import weights_checksum
from rpg_jax.storage import integrity
from rpg_jax.storage.checkpoints import Checkpoints, Snapshots, committed_steps
from rpg_jax.storage.integrity import Damaged, Refused
from rpg_jax.training import optimizer, state
from rpg_jax.types import Count

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), tree)


def tree(seed, width=4):
    w = np.random.default_rng(seed).standard_normal((3, width), np.float32)
    return {"params": {"w": jnp.asarray(w)}, "updates": jnp.int32(seed)}


def largest(folder):
    """The file with most of a checkpoint's arrays."""
    return max((p for p in folder.resolve().rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_state_comes_back_into_host_memory(tmp_path):
    wanted = tree(3)
    host = SHARDING.with_memory_kind("pinned_host")
    waiting = {**wanted, "params": jax.device_put(wanted["params"], host)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, waiting, {})
    where = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), waiting)
    restored = checkpoints.restore(3, where)
    assert restored["params"]["w"].sharding.memory_kind == "pinned_host"
    assert weights_checksum(restored) == weights_checksum(wanted)
    checkpoints.close()


def truncate(step):
    file = largest(step / "state")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(step):
    file = largest(step / "state")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def edit_the_record(step):
    file = step / "record" / "metadata"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"at": 15', '"at": 16').replace('"at":15', '"at":16'), encoding="utf-8"
    )


def cut_the_record(step):
    file = step / "record" / "metadata"
    file.write_bytes(file.read_bytes()[:-20])


DAMAGE = {  # what was done to a checkpoint: what the refusal says
    "half-written": (lambda step: (step / "commit_success.txt").unlink(), "3: it is half-written"),
    "truncated": (truncate, "3/state: "),
    "bit-flipped": (flip_a_bit, "3/state: "),
    "without arrays": (lambda step: shutil.rmtree(step / "state"), "3/state: "),
    "without a file": (lambda step: largest(step / "state").unlink(), "3/state: "),
    "record edited": (edit_the_record, "3/record: its text is not the one that was written"),
    "record cut": (cut_the_record, "3/record: "),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_the_previous_one_used_and_nothing_lost(tmp_path, capsys, kind):
    damage, said = DAMAGE[kind]
    checkpoints = write(tmp_path / "c", {"seed": 0}, width=3000)
    damage(tmp_path / "c" / "3")
    left = sorted(p.relative_to(tmp_path / "c" / "3") for p in (tmp_path / "c" / "3").rglob("*"))
    checkpoints = Checkpoints(tmp_path / "c", keep=2, identity={"seed": 0})
    step, state, record = checkpoints.restore_last(like(tree(0, 3000)))
    assert (step, record) == (2, {"stream": {"at": 10}}) and weights_checksum(state) == weights_checksum(tree(2, 3000))
    errors = capsys.readouterr().err
    assert f"c/{said}" in errors and "using the checkpoint of step 2" in errors
    aside = tmp_path / "c" / "refused" / "3"
    assert sorted(p.relative_to(aside) for p in aside.rglob("*")) == left
    checkpoints.save(3, tree(3, 3000), {"again": True})
    checkpoints.wait()
    assert checkpoints.restore_last(like(tree(0, 3000)))[2] == {"again": True}
    checkpoints.close()


def write(folder, identity, steps=(1, 2, 3), width=4, **options):
    checkpoints = Checkpoints(folder, keep=2, identity=identity, **options)
    for step in steps:
        checkpoints.save(step, tree(step, width), {"stream": {"at": 5 * step}})
    checkpoints.close()
    return checkpoints


def test_a_checkpoint_of_another_run_stops_the_resume_naming_the_fields_and_none_moves(tmp_path):
    write(tmp_path / "other", {"seed": 1, "loss.kl_coef": 0.5}, steps=(7,))
    write(tmp_path / "c", {"seed": 0, "loss.kl_coef": 0.5})
    shutil.copytree(tmp_path / "other" / "7", tmp_path / "c" / "7")
    checkpoints = Checkpoints(tmp_path / "c", keep=2, identity={"seed": 0, "loss.kl_coef": 0.5})
    with pytest.raises(Refused, match=r"c/7: it is foreign, of a run with seed 1, here 0$"):
        checkpoints.restore_last(like(tree(0)))
    assert (tmp_path / "c" / "7" / "commit_success.txt").exists() and not (tmp_path / "c" / "refused").exists()
    checkpoints.close()


def test_a_field_that_no_longer_counts_does_not_make_a_checkpoint_foreign(tmp_path):
    write(tmp_path / "c", {"seed": 0, "slots": 64})
    checkpoints = Checkpoints(tmp_path / "c", keep=2, identity={"seed": 0})
    assert checkpoints.record(3) == {"stream": {"at": 15}}
    checkpoints.close()


def test_where_none_can_be_trusted_the_run_stops_and_all_stay(tmp_path):
    write(tmp_path / "c", {"seed": 0}, width=3000)
    for step in ("2", "3"):
        flip_a_bit(tmp_path / "c" / step)
    checkpoints = Checkpoints(tmp_path / "c", keep=2, identity={"seed": 0})
    with pytest.raises(ValueError, match=r"no checkpoint in .*c/3/state: .*c/2/state: .*Nothing was deleted"):
        checkpoints.restore_last(like(tree(0, 3000)))
    assert checkpoints.steps() == [2, 3]
    checkpoints.close()


def test_what_a_kill_left_of_a_write_is_named_and_goes_once_there_is_a_newer_one(tmp_path, capsys):
    write(tmp_path / "c", None)
    partial = tmp_path / "c" / "4.orbax-checkpoint-tmp"
    partial.mkdir()
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert "4.orbax-checkpoint-tmp is half-written" in capsys.readouterr().err
    assert checkpoints.restore_last(like(tree(0)))[0] == 3
    for step in (5, 6):
        assert partial.exists()
        checkpoints.save(step, tree(step), {})
    assert not partial.exists()
    checkpoints.close()


def test_a_record_that_needs_what_is_not_there_is_refused(tmp_path):
    write(tmp_path / "c", None)

    def accept(record):
        if record["stream"]["at"] == 15:
            raise Damaged("reference/00000004", "this snapshot is missing")

    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.restore_last(like(tree(0)), accept)[0] == 2
    checkpoints.close()


def test_permanent_checkpoints_stay(tmp_path):
    write(tmp_path / "c", None, steps=range(1, 8), permanent_every=3)
    (tmp_path / "c" / "²").mkdir()
    (tmp_path / "c" / "²" / "commit_success.txt").touch()
    assert committed_steps(tmp_path / "c") == [3, 6, 7], "a folder of another name is no step"


def test_a_checkpoint_of_one_mesh_is_restored_and_verified_on_another(tmp_path):
    def mesh(devices):
        return NamedSharding(jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices]), PartitionSpec("x"))

    values = {"w": jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4)}
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, jax.device_put(values, mesh(8)), {})
    other = {"w": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=mesh(2))}
    checkpoints.wait()
    restored = checkpoints.restore(1, other)
    assert len(restored["w"].sharding.device_set) == 2 and weights_checksum(restored) == weights_checksum(values)
    checkpoints.close()


def test_checkpoints_come_back_bit_for_bit_and_only_the_last_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, tree(step), {"step": step, "stream": {"at": 5 * step}})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3] and checkpoints.latest_step() == 3
    assert weights_checksum(checkpoints.restore(3, like(tree(0)))) == weights_checksum(tree(3))
    assert checkpoints.record(2) == {"step": 2, "stream": {"at": 10}}
    checkpoints.close()


def test_a_save_under_way_is_no_checkpoint_yet(tmp_path, monkeypatch):
    on_disk, finalize = threading.Event(), ocp.CheckpointManager._finalize
    monkeypatch.setattr(ocp.CheckpointManager, "_finalize", lambda *how: (on_disk.wait(60), finalize(*how)))
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for step in (1, 2):
        checkpoints.save(step, tree(step), {})
        assert checkpoints.latest_step() == (step - 1 or None)
        on_disk.set()
        checkpoints.wait()
        assert checkpoints.latest_step() == step
        on_disk.clear()
    checkpoints.close()


def test_memory_is_given_back_before_a_save_once_the_save_before_is_on_disk(tmp_path):
    found = []
    checkpoints = Checkpoints(tmp_path / "c", keep=3, freed=lambda: found.append(committed_steps(tmp_path / "c")))
    for step in (1, 2):
        checkpoints.save(step, tree(step), {})
    checkpoints.close()
    assert found == [[], [1]]


def test_a_save_is_not_disturbed_by_donating_its_buffers(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    state = tree(1, width=200_000)
    expected = weights_checksum(state)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    checkpoints.save(1, state, {"step": 1})
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    assert weights_checksum(checkpoints.restore(1, like(tree(0, width=200_000)))) == expected
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    write(tmp_path / "c", None)
    with pytest.raises(Refused, match=r"c/3/state: .*shape"):
        integrity.restored(tmp_path / "c" / "3" / "state", like(tree(0, width=5)))


@pytest.mark.parametrize("name", optimizer.NAMES)
def test_of_a_state_only_what_evaluation_needs_is_read(tmp_path, name):
    rates = dict(
        learning_rate=1e-2, warmup=Count(0, "updates"), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
    )
    chosen = optimizer.make_optimizer(name, **rates)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    updates, slots = chosen.update(params, chosen.init(params), params)
    trained = state.TrainState(jax.tree.map(jnp.add, params, updates), slots, jnp.int32(1), jnp.int32(0))
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(3, trained, {})
    checkpoints.close()
    restored = integrity.restored(tmp_path / "c" / "3" / "state", state.for_evaluation(like(trained), chosen))
    arrays = [x for x in jax.tree.leaves(restored.opt_state) if x is not integrity.LEFT_OUT]
    assert len(arrays) == len(chosen.evaluation_slots) < len(jax.tree.leaves(slots))
    wanted = chosen.evaluation_params(slots, trained.params)
    assert weights_checksum(chosen.evaluation_params(restored.opt_state, restored.params)) == weights_checksum(wanted)


def test_a_leaf_that_is_read_is_checked_whatever_is_left_out():
    signed = integrity.signed({"a": jnp.ones(3), "b": jnp.ones(3)})
    assert not integrity.differing(signed | {"tree": {"a": integrity.LEFT_OUT, "b": jnp.ones(3)}})
    assert integrity.differing(signed | {"tree": {"a": integrity.LEFT_OUT, "b": jnp.zeros(3)}}) == ["['b']"]


def test_snapshots_are_replaced_atomically_and_outlive_donation(tmp_path):
    snapshots = Snapshots(tmp_path)
    snapshots.save(0, tree(1))
    state = tree(2, width=4)
    expected = weights_checksum(state)
    snapshots.save(0, state)
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(state))
    assert weights_checksum(snapshots.restore(0, like(tree(0)))) == expected


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, DAMAGE["half-written"][0]])
def test_a_damaged_snapshot_is_refused_by_name_and_kept(tmp_path, damage):
    snapshots = Snapshots(tmp_path)
    snapshots.save(4, tree(1, 3000))
    snapshots.wait()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "state").symlink_to(tmp_path / "00000004")
    damage(tmp_path / "00000004" if damage is DAMAGE["half-written"][0] else tmp_path / "link")
    with pytest.raises(Refused, match=f"{tmp_path}/00000004: "):
        snapshots.restore(4, like(tree(0, 3000)))
    assert snapshots.move_aside(4).exists() and not snapshots.exists(4)


def test_the_first_of_several_processes_moves_a_snapshot_aside_and_tells_the_others_where(tmp_path, monkeypatch):
    (tmp_path / "00000004").mkdir()
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    monkeypatch.setattr(hosts, "all_gather_bytes", lambda own: [b"refused-00000004-2", own])
    snapshots = Snapshots(tmp_path)
    assert snapshots.move_aside(4).name == "refused-00000004-2" and snapshots.exists(4)


FULL = (
    'RESOURCE_EXHAUSTED: Error writing "tree.w/0": Failed to write to file 7: No space [OS error 28: ENOSPC No space]'
)


@pytest.mark.parametrize("error", [ValueError(FULL), OSError(28, "No space left on device", "x"), ValueError("")])
def test_a_write_that_fails_is_no_error_of_the_user(tmp_path, monkeypatch, error):
    def fail(*arguments, **keywords):
        raise error

    checkpoints, snapshots = Checkpoints(tmp_path / "c", keep=1), Snapshots(tmp_path / "s")
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
    monkeypatch.setattr(snapshots._checkpointer, "save", fail)
    for write in (checkpoints.wait, lambda: checkpoints.save(1, {}, {}), lambda: snapshots.save(0, {"w": jnp.ones(1)})):
        with pytest.raises(OSError, match="could not be written: (No space|.*No space|ValueError)"):
            write()
    monkeypatch.undo()
    checkpoints.close()
    snapshots.close()
