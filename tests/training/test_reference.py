"""When the reference moves, and that its weights come back bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training import reference as reference_module
from rpg_jax.training.reference import RULES, Reference, Rule, Taught, make_rule
from rpg_jax.types import Count

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


NEVER = Count(0, "steps")


def weights(value):
    return {"w": jnp.full((3, 2), value, jnp.float32)}


def made_rule(rule, every="4 updates", kl_threshold=0.1):
    return make_rule({"rule": rule, "every": str(every), "kl_threshold": kl_threshold, "path": None})


def make(tmp_path, rule, **changes):
    memory, teacher = changes.pop("memory", "disk"), changes.pop("teacher", None)
    rule = made_rule(rule, **changes)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), weights(0))
    return Reference(rule, snapshots=Snapshots(tmp_path / "reference"), like=like, memory=memory, teacher=teacher)


def steps(reference, per_step, count, kls=(), first=1):
    """Steps of `per_step` updates as the trainer takes them; the weights after update u are u everywhere."""
    for step in range(first, first + count):
        reference.before_updates(weights(reference.updates), step, per_step)
        for _ in range(per_step):
            reference.after_update(weights(reference.updates + 1))
        reference.after_step(kls)


def written(tmp_path):
    return sorted(int(p.name) for p in (tmp_path / "reference").glob("*"))


def test_behaviour_rule_always_coincides_and_writes_nothing(tmp_path):
    reference = make(tmp_path, "behaviour")
    for _ in range(5):
        steps(reference, 1, 1)
        assert reference.coincides()
    assert written(tmp_path) == []


def test_fixed_rule_keeps_the_policy_before_the_first_update(tmp_path):
    reference = make(tmp_path, "fixed")
    assert reference.coincides()
    steps(reference, 2, 4, kls=[1.0])
    assert not reference.coincides()
    np.testing.assert_array_equal(reference.params()["w"], weights(0)["w"])
    reference.commit()
    assert written(tmp_path) == [0]


def test_a_branch_of_a_run_with_a_teacher_reads_and_writes_no_snapshot(tmp_path):
    parent, branch = (make(tmp_path / name, "teacher", teacher=Taught(weights(9), None)) for name in ("p", "b"))
    steps(parent, 2, 3)
    branch.take_over(parent.commit(), lambda number, like: pytest.fail(f"the parent has no snapshot {number}"))
    assert branch.updates == 6 and not branch.coincides()
    np.testing.assert_array_equal(branch.params()["w"], weights(9)["w"])
    assert written(tmp_path / "p") == written(tmp_path / "b") == []


def test_an_offloaded_reference_waits_in_host_memory(tmp_path, monkeypatch):
    reference = make(tmp_path, "fixed", memory="host")
    steps(reference, 1, 1)
    first = reference.params()
    restored = []
    monkeypatch.setattr(Snapshots, "restore", lambda *args: restored.append(args))
    again = reference.params()
    assert restored == [], "read from disk again"
    assert again["w"].sharding.memory_kind == "device"
    assert reference._restored[1]["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(again["w"], first["w"])


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("per_step", [1, 4, 6])
def test_every_rule_has_the_weights_after_the_last_kth_update_and_writes_those_it_reads(tmp_path, every, per_step):
    reference, read = make(tmp_path, "every", every=Count(every, "updates")), set()
    for step in range(1, 6):
        steps(reference, per_step, 1)
        updates = step * per_step
        assert (reference.number, reference.updates) == (updates - updates % every, updates)
        assert reference.coincides() == (updates % every == 0)
        if not reference.coincides():
            assert float(reference.params()["w"][0, 0]) == reference.number
            read.add(reference.number)
    reference.commit()
    assert set(written(tmp_path)) == read, "written and never read"
    if per_step % every == 0:
        assert read == set()


def test_kl_rule_moves_when_the_bias_corrected_average_passes_the_threshold(tmp_path):
    reference = make(tmp_path, "kl", kl_threshold=0.1)
    # corrected averages: 0.08; (0.09 * 0.08 + 0.1 * 0.125) / 0.19 = 0.104
    steps(reference, 2, 1, kls=[0.08])
    assert reference.number == 0
    steps(reference, 2, 1, kls=[0.125])
    assert reference.number == 4 and reference.kl_average == 0.0 and reference.coincides()
    steps(reference, 2, 1, kls=[0.01])
    np.testing.assert_array_equal(reference.params()["w"], weights(4)["w"])


@pytest.mark.parametrize("rule", ["every", "kl", "fixed"])
def test_a_restored_reference_goes_on_as_if_never_interrupted(tmp_path, rule):
    straight, interrupted = make(tmp_path / "a", rule), make(tmp_path / "b", rule)
    for kl in (0.03, 0.09, 0.2, 0.01, 0.12, 0.3):
        steps(straight, 2, 1, [kl])
        steps(interrupted, 2, 1, [kl])
        record = interrupted.commit()
        interrupted = make(tmp_path / "b", rule)
        interrupted.check(record)
        interrupted.restore(record)
        assert interrupted.commit() == straight.commit()
        if not straight.coincides():
            np.testing.assert_array_equal(interrupted.params()["w"], straight.params()["w"])


def test_prune_keeps_what_a_checkpoint_needs(tmp_path):
    reference = make(tmp_path, "every", every=Count(3, "updates"))
    for _ in range(5):
        steps(reference, 2, 1)
    reference.commit()
    assert written(tmp_path) == [0, 3, 6, 9]
    reference.prune([3])
    assert written(tmp_path) == [3, 9]


@pytest.mark.parametrize("change", [{"rule": "sometimes"}, {"every": NEVER}, {"kl_threshold": 0.0}])
def test_bad_settings_are_named(tmp_path, change):
    rule = change.pop("rule", "kl")
    with pytest.raises(ValueError, match="sometimes" if rule == "sometimes" else next(iter(change))):
        make(tmp_path, rule, **change)


def test_a_missing_snapshot_is_named(tmp_path):
    reference = make(tmp_path, "fixed")
    steps(reference, 1, 1)
    record = reference.commit()
    reference.prune([])
    next((tmp_path / "reference").iterdir()).rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="00000000: this snapshot is missing"):
        make(tmp_path, "fixed").check(record)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[4] * 7, [4, 4, 3, 4, 1, 4, 4]])
def test_every_k_steps_moves_when_a_kth_step_ends_however_many_updates_the_steps_have(tmp_path, k, sizes):
    """A step for which too few groups were found has fewer updates."""
    reference, ends = make(tmp_path, "every", every=Count(k, "steps")), [0]
    for step, size in enumerate(sizes, start=1):
        steps(reference, size, 1, first=step)
        ends.append(ends[-1] + size)
        assert reference.number == ends[step - step % k]
        if not reference.coincides():
            assert float(reference.params()["w"][0, 0]) == reference.number


def test_every_rollout_is_one_setting_for_any_number_of_updates(tmp_path):
    for per_step in (1, 2, 16):
        reference = make(tmp_path / str(per_step), "every", every=Count(1, "steps"))
        for step in range(1, 6):
            assert reference.coincides()
            steps(reference, per_step, 1, first=step)
        assert written(tmp_path / str(per_step)) == []


@pytest.mark.parametrize("every", [Count(4, "updates"), Count(1, "steps"), Count(2, "steps")])
@pytest.mark.parametrize("updates_per_step", [1, 3, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_whether_the_reference_ever_costs_a_pass(tmp_path, rule, updates_per_step, every):
    """Asked before the run, by a plan; compared with what the reference does in six steps."""
    reference, passes = make(tmp_path, rule, every=every), 0
    for step in range(1, 7):
        passes += not reference.coincides()
        steps(reference, updates_per_step, 1, kls=[0.0], first=step)
    assert made_rule(rule, every).differs(updates_per_step) == (passes > 0)


def test_a_reference_is_taken_over_with_its_weights_or_begins_at_the_present_policy(tmp_path):
    parent, snapshots = make(tmp_path, "fixed"), Snapshots(tmp_path / "reference")
    steps(parent, 2, 3)
    branch = make(tmp_path / "b", "fixed")
    branch.take_over(parent.commit(), snapshots.restore)
    np.testing.assert_array_equal(branch.params()["w"], weights(0)["w"])
    assert (branch.number, branch.updates, branch.coincides()) == (0, 6, False)
    anew = make(tmp_path / "c", "fixed")
    anew.begin_at(6)
    assert (anew.number, anew.updates, anew.coincides()) == (6, 6, True)
    steps(anew, 2, 1, first=4)
    np.testing.assert_array_equal(anew.params()["w"], weights(6)["w"])
    behaviour = make(tmp_path / "d", "behaviour")
    behaviour.begin_at(6)
    assert behaviour.coincides() and behaviour.number == 0


def test_a_rule_names_its_anchor():
    anchors = {name: made_rule(name).anchor() for name in RULES}
    assert anchors == {
        "behaviour": None,
        "fixed": "initial",
        "every": "every 4 updates",
        "kl": "κ = 0.1",
        "teacher": "teacher",
    }
    assert made_rule("every", Count(1, "steps")).anchor() == "every 1 step"


@dataclasses.dataclass(frozen=True)
class Geometric(Rule):
    growth: float = 2.0
    word = "steps {0.growth:g}ᵏ"


def test_a_number_of_a_rule_of_ones_own_is_an_attribute_and_a_field(monkeypatch):
    monkeypatch.setattr(reference_module, "RULES", RULES | {"geometric": Geometric})
    section = {"rule": "geometric", "every": "1 step", "kl_threshold": 0.1, "path": None}
    assert make_rule(section | {"growth": 3.0}).anchor() == "steps 3ᵏ"
    assert make_rule(section).anchor() == "steps 2ᵏ", "a run of before the field"
