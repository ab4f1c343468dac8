"""The search ranks what fits by expected seconds; its estimates are near figures of compiled programs."""

import json

import jax
import pytest

from configs import qwen3_0p6b_gsm8k, qwen3_4b_8k
from rpg_jax import plan
from rpg_jax.planning import compiling, estimates, hlo, run_plan, topologies
from rpg_jax.runs import memory
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.memory import make_decoding
from rpg_jax.runs.resolve import resolve

SLICE = topologies.parse("v5p:2x2x2")
GIB = 2**30
ESTIMATE = estimates.estimate


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
    command = ["--config=configs/qwen3_1p7b_gsm8k_lora.py", "--topology=v5e:1x1", "--beside=model.lora.rank=0"]
    assert plan.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    lora, full = found["as given"], found["model.lora.rank=0"]
    assert (lora["trained"], full["trained"]) == (17_432_576, 1_720_574_976)
    assert lora["fits"] and not full["fits"]
    assert lora["base_bytes"] == full["sync_bytes"] == 2 * full["trained"], "bf16"
    assert lora["state_bytes"] == pytest.approx(12 * lora["trained"], rel=1e-4)
    assert lora["training_peak_bytes"] == pytest.approx(6.92 * GIB, rel=1e-2)
    assert full["training_peak_bytes"] == pytest.approx(44.9 * GIB, rel=1e-2)
    assert lora["step"]["expected"]["seconds"] == pytest.approx(350, rel=1e-2)
    assert plan.main(command) == 0
    text = capsys.readouterr().out
    assert "no room" in text and "17.4 M" in text and "1.72 B" in text and "2: model.lora.rank=0" in text


def test_a_plan_for_several_slices_says_what_it_does_not_count(capsys):
    command = ["--config=configs/qwen3_1p7b_gsm8k_lora.py", "--beside=model.lora.rank=8"]
    command += ["--config.train.microbatch_size=8"]
    for slices, said in (("v5e:2x2", False), ("v5e:2x2*2", True)):
        assert plan.main([*command, f"--topology={slices}"]) == 0
        assert ("no byte between slices (DCN) is counted" in capsys.readouterr().out) == said


def test_every_setting_that_is_given_is_shown(capsys):
    settings = [f"model.lora.rank={rank}" for rank in range(1, 10)]
    command = ["--config=configs/qwen3_1p7b_gsm8k_lora.py", "--topology=v5e:1x1"]
    assert plan.main([*command, *(f"--beside={setting}" for setting in settings)]) == 0
    text = capsys.readouterr().out
    assert all(f"{number}: {setting}\n" in text for number, setting in enumerate(settings, 2))


def test_the_fastest_settings_that_fit_come_first():
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    config.rollout.slots = 64
    found, best = estimates.search(config, SLICE)
    seconds = [one["step"]["expected"]["seconds"] for one in found.values()]
    assert seconds == sorted(seconds)
    assert all(one["fits"] for one in found.values())
    assert best.rollout.slots is None and best.train.microbatch_size is None
    assert best.mesh.context == 1
    name = next(iter(found))
    assert estimates.estimate(best, SLICE) == found[name]
    again = plan.cli.settings([name])[name]
    assert all(override.startswith("--config.") for override in again) and len(again) == 3, "--beside takes the name"


def test_a_micro_batch_that_the_devices_do_not_divide_has_no_estimate():
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    config.train.microbatch_size = SLICE.chips // 2
    with pytest.raises(
        ValueError, match=f"rows cannot be spread over {SLICE.chips} devices: set train.microbatch_size"
    ):
        estimates.estimate(config, SLICE)


def test_a_search_without_the_compiler_is_not_a_search_that_found_nothing(monkeypatch):
    def absent(topology):
        raise ValueError("needs the compiler for TPUs")

    monkeypatch.setattr(run_plan.Topology, "devices", absent)
    with pytest.raises(ValueError, match="needs the compiler for TPUs"):
        estimates.search(resolve(qwen3_4b_8k.get_config()), SLICE)


def fit_if(monkeypatch, fits):
    """Of all configs those fit of which `fits` says so."""
    monkeypatch.setattr(estimates, "estimate", lambda config, *a: ESTIMATE(config, *a) | {"fits": fits(config)})


@pytest.mark.slow  # compiles, or waits, for seconds
def test_rows_are_spread_over_chips_if_nothing_else_fits(monkeypatch):
    fit_if(monkeypatch, lambda config: config.mesh.context == 2)
    found, best = estimates.search(resolve(qwen3_4b_8k.get_config()), SLICE)
    assert best.mesh.context == 2 and all(name.startswith("mesh.context=2,") for name in found)


@pytest.mark.slow  # compiles, or waits, for seconds
def test_what_does_not_fit_ends_with_settings_that_fit_by_arithmetic(monkeypatch, capsys):
    monkeypatch.setattr(run_plan, "lowered_programs", lambda *parts: iter([("decode", None)]))
    refused = compiling.Program(0, 0, 0, 0, 0, hlo.Costs(), 0, 0, "no room")
    monkeypatch.setattr(run_plan, "compile_program", lambda *a, **k: refused)
    command = ["--config=configs/qwen3_4b_8k.py", "--topology=v5e:2x2", "--programs=decode"]
    fit_if(monkeypatch, lambda config: config.rollout.int8_kv)
    assert plan.main(command) == 1
    text = capsys.readouterr().out
    assert "does not fit v5e:2x2: decode" in text and "rollout.int8_kv=True" in text
    fit_if(monkeypatch, lambda config: False)
    assert plan.main(command) == 1
    assert "no settings that fit by arithmetic were found; take a larger slice" in capsys.readouterr().out


def test_hosts_exchange_groups_and_a_chip_holds_a_piece_of_each():
    """2 x 2 x 2 chips of v5p are two hosts: 12,288 completions of the other host, in pieces of 64 MiB."""
    config = resolve(qwen3_4b_8k.get_config())
    layout, _, decoding, held = run_plan.parts_on(config, SLICE)
    exchange = run_plan.exchange(layout, decoding, held, SLICE, run_plan.lengths_of(config))["exchange"]
    assert exchange.temporaries == 3 * 2**26
    assert exchange.costs.collectives["all-gather"] == 12_288 * 4096 * 16
    assert exchange.costs.launches == 12
    found = estimates.estimate(config, SLICE)
    assert exchange.hbm < found["sampling_peak_bytes"] < SLICE.chip.hbm
    assert found["step"]["expected"]["phases"]["exchange"] == pytest.approx(12_288 * 4096 * 16 / 1e9, rel=0.01)
    alone = estimates.estimate(resolve(qwen3_0p6b_gsm8k.get_config()), topologies.parse("v5e:1x1"))
    assert "exchange" not in alone["step"]["expected"]["phases"]


def test_evaluations_have_the_problems_of_published_sets_and_the_configs_completions():
    step = estimates.estimate(resolve(qwen3_4b_8k.get_config()), SLICE)["step"]
    assert (step["evaluations"], step["evaluated"]) == (1 + 40, (30 + 30 + 40) * 32)
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    assert run_plan.evaluations_of(config)[1] == 1319
    config.evaluation.problems = 100
    assert run_plan.evaluations_of(config)[1] == 100
    config.task.held_out_sets = "mine=mine.parquet,AIME24=aime-2024"
    assert run_plan.evaluations_of(config)[1] == 130
