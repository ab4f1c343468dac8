"""When the reference moves, and that its weights come back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.training.reference import Reference
from rpg_jax.training.snapshots import Snapshots

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def weights(value):
    return {"w": jnp.full((3, 2), value, jnp.float32)}


def make(tmp_path, rule, **changes):
    settings = dict(every=4, kl_threshold=0.1, kl_decay=0.5, resident=False) | changes
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), weights(0))
    return Reference(rule, snapshots=Snapshots(tmp_path / "reference"), like=like, **settings)


def test_behaviour_rule_always_coincides_and_writes_nothing(tmp_path):
    reference = make(tmp_path, "behaviour")
    reference.start(weights(0))
    for updates in range(1, 6):
        reference.after_update(weights(updates), updates)
        assert reference.coincides(updates)
    assert list((tmp_path / "reference").iterdir()) == []


def test_fixed_rule_keeps_the_policy_before_the_first_update(tmp_path):
    reference = make(tmp_path, "fixed")
    reference.start(weights(7))
    for updates in range(1, 9):
        reference.after_update(weights(updates), updates)
        reference.after_step(weights(updates), updates, [1.0])
    assert reference.coincides(0) and not reference.coincides(8)
    np.testing.assert_array_equal(reference.params()["w"], weights(7)["w"])


def test_an_offloaded_reference_waits_in_host_memory(tmp_path, monkeypatch):
    reference = make(tmp_path, "fixed", offload=True)
    reference.start(weights(7))
    first = reference.params()
    restored = []
    monkeypatch.setattr(Snapshots, "restore", lambda *args: restored.append(args))
    again = reference.params()
    assert restored == [], "read from disk again"
    assert again["w"].sharding.memory_kind == "device"
    assert reference._restored[1]["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(again["w"], first["w"])


def test_every_rule_moves_after_each_kth_update(tmp_path):
    reference = make(tmp_path, "every", every=4)
    reference.start(weights(0))
    held = []
    for updates in range(1, 10):
        reference.after_update(weights(updates), updates)
        held.append((reference.number, float(reference.params()["w"][0, 0]), reference.coincides(updates)))
    assert [number for number, _, _ in held] == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert all(number == value for number, value, _ in held)
    assert [coincides for _, _, coincides in held] == [n in (4, 8) for n in range(1, 10)]


def test_kl_rule_moves_when_the_bias_corrected_average_passes_the_threshold(tmp_path):
    reference = make(tmp_path, "kl", kl_threshold=0.1, kl_decay=0.5)
    reference.start(weights(0))
    # corrected averages: 0.08; (0.25*.08+.5*.11)/.75 = 0.1
    reference.after_step(weights(2), 2, [0.08])
    assert reference.number == 0
    reference.after_step(weights(4), 4, [0.125])
    assert reference.number == 4 and reference.kl_average == 0.0
    np.testing.assert_array_equal(reference.params()["w"], weights(4)["w"])


def test_a_restored_reference_goes_on_as_if_never_interrupted(tmp_path):
    straight = make(tmp_path / "a", "kl")
    straight.start(weights(0))
    interrupted = make(tmp_path / "b", "kl")
    interrupted.start(weights(0))
    kls = [[0.03], [0.09], [0.2], [0.01], [0.12], [0.3]]
    for step, kl in enumerate(kls, start=1):
        straight.after_step(weights(step), step, kl)
        interrupted.after_step(weights(step), step, kl)
        record = interrupted.commit()
        interrupted = make(tmp_path / "b", "kl")
        interrupted.restore(record)
        assert interrupted.commit() == straight.commit()
        np.testing.assert_array_equal(interrupted.params()["w"], straight.params()["w"])


def test_prune_keeps_what_a_checkpoint_needs(tmp_path):
    reference = make(tmp_path, "every", every=1)
    reference.start(weights(0))
    for updates in range(1, 5):
        reference.after_update(weights(updates), updates)
    reference.commit()
    reference.prune([2])
    assert sorted(p.name for p in (tmp_path / "reference").iterdir()) == ["00000002", "00000004"]


@pytest.mark.parametrize("change", [{"rule": "sometimes"}, {"every": 0}, {"kl_threshold": 0.0}, {"kl_decay": 1.0}])
def test_bad_settings_are_named(tmp_path, change):
    rule = change.pop("rule", "every")
    with pytest.raises(ValueError, match="sometimes" if rule == "sometimes" else next(iter(change))):
        make(tmp_path, rule, **change)


def test_a_missing_snapshot_is_named(tmp_path):
    reference = make(tmp_path, "fixed")
    with pytest.raises(ValueError, match="00000000: this snapshot is missing"):
        reference.params()
