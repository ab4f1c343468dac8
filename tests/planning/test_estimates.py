"""The search ranks what fits by expected seconds; its estimates are near figures of compiled programs."""

import io
import json

import jax
import pytest
from rich.console import Console

from configs import qwen3_0p6b_gsm8k, qwen3_4b_8k
from rpg_jax import plan, planning
from rpg_jax.planning import estimates, printing, run_plan
from rpg_jax.runs import memory
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.memory import make_decoding
from rpg_jax.runs.resolve import resolve

SLICE = planning.parse("v5p:2x2x2")
GIB = 2**30


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """The CPU's devices stand in for the slice's: arithmetic compiles nothing."""
    monkeypatch.setattr(run_plan.Topology, "devices", lambda topology: jax.devices()[: topology.chips])


def test_estimates_are_near_what_the_compiler_counted():
    """The compiled figures are those of docs/plan.md, of 16 slots and two rows a chip."""
    config = resolve(qwen3_4b_8k.get_config())
    config.rollout.slots, config.train.microbatch_size = 16, 16
    layout = make_layout(config, None, SLICE.devices(), SLICE.host.devices(), SLICE.chip.hbm)
    decoding, learner = make_decoding(layout), make_learner(layout)
    found = estimates.estimated_programs(layout, decoding, memory.resident(layout, learner, decoding))
    decode = found["decode"]
    assert decode.hbm == pytest.approx(30.3 * GIB, rel=0.02)
    assert decode.costs.bytes == pytest.approx(27.3e9, rel=0.06)
    assert decode.costs.launches == 74
    assert found["log-probs"].costs.flops == pytest.approx(227e12, rel=0.01)
    assert found["log-probs"].costs.collectives["all-gather"] == pytest.approx(7.27e9, rel=0.15)
    assert found["start"].costs.flops == pytest.approx(901e12, rel=0.01)
    assert found["prefill"].costs.flops == pytest.approx(4.03e12, rel=0.01)


def test_settings_are_planned_beside_each_other_without_a_compilation(monkeypatch, capsys):
    """The figures are those of docs/lora.md."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    shown, show, console = [], printing.show_beside, Console(record=True, width=80, file=io.StringIO())
    monkeypatch.setattr(printing, "show_beside", lambda *found, as_json: shown.append(found))
    command = ["--config=configs/qwen3_1p7b_gsm8k_lora.py", "--topology=v5e:1x1", "--beside=model.lora.rank=0"]
    assert plan.main(command) == 0
    ((topology, found),) = shown
    lora, full = (one.as_dict(topology) for one in found.values())
    assert (lora["trained"], full["trained"]) == (17_432_576, 1_720_574_976)
    assert lora["fits"] and not full["fits"]
    assert lora["base_bytes"] == full["sync_bytes"] == 2 * full["trained"], "bf16"
    assert lora["state_bytes"] == pytest.approx(12 * lora["trained"], rel=1e-4)
    assert lora["training_peak_bytes"] == pytest.approx(6.86 * GIB, rel=1e-2)
    assert full["training_peak_bytes"] == pytest.approx(44.9 * GIB, rel=1e-2)
    assert lora["step"]["expected"]["seconds"] == pytest.approx(298, rel=1e-2)
    show(topology, found, as_json=True)
    assert json.loads(capsys.readouterr().out)["settings"] == {"as given": lora, "model.lora.rank=0": full}
    show(topology, found, console)
    text = console.export_text()
    assert "does not fit" in text and "17.4 M" in text and "1.72 B" in text and "model.lora.rank" in text


def test_the_fastest_settings_that_fit_come_first(monkeypatch):
    samplings = [{"rollout.slots": None, "rollout.tensor": n, "rollout.int8_kv": False} for n in (1, 2, 3)]
    trainings = [{"train.microbatch_size": n, "model.remat": "full"} for n in (8, 16)]
    monkeypatch.setattr(estimates, "sampling_choices", lambda *a: samplings)
    monkeypatch.setattr(estimates, "training_choices", lambda *a: trainings)
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    found = estimates.search(config, SLICE)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert {one.change["rollout.tensor"] for one in found} == {1, 2}, "three does not divide the chips of a host"
    assert len(found) == 4
    best = run_plan.changed(config, found[0].change)
    assert best.rollout.slots is None and best.rollout.tensor == found[0].change["rollout.tensor"]
    console = Console(record=True, width=120, file=io.StringIO())
    printing.show_search(SLICE, found, console)
    text = console.export_text()
    assert "4 settings fit v5p:2x2x2" in text and "--config.train.microbatch_size=" in text and "slots=" not in text


def test_choices_are_whole_rows_of_every_shard_and_copies_within_a_host():
    config = resolve(qwen3_4b_8k.get_config())
    rows = {change["train.microbatch_size"] for change in estimates.training_choices(config, SLICE)}
    assert rows == {8, 16, 32}
    assert {change["rollout.tensor"] for change in estimates.sampling_choices(config, SLICE)} == {1, 2, 4}


def test_what_does_not_fit_is_left_out():
    config = resolve(qwen3_4b_8k.get_config())
    change = [{"train.microbatch_size": 512, "model.remat": "none"}]
    assert estimates._estimates(config, SLICE, change, None) == []
