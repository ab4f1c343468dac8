"""The figures beside the programs of a plan, its tables, and plans that are compiled for slices."""

import json
import math
import re
import subprocess
import sys

import jax
import pytest

from configs import qwen3_0p6b_gsm8k, qwen3_4b_2k, qwen3_4b_8k, tiny
from rpg_jax import plan
from rpg_jax.planning import compiling, estimates, hlo, run_plan, topologies
from rpg_jax.planning.chips import PACKING
from rpg_jax.runs import memory
from rpg_jax.runs.layout import make_layout, rows_per_update
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.memory import make_decoding
from rpg_jax.runs.resolve import resolve

V5E = topologies.parse("v5e:2x4")
GIB = 2**30
needs_compiler = pytest.mark.skipif(topologies.compiler_library() is None, reason=f"needs {topologies.GET_COMPILER}")


def program(hbm=1 * GIB, flops=1e12, refused=""):
    costs = hlo.Costs(flops=flops, bytes=8.19e9)
    costs.collectives["all-gather"] = 1.8e9
    return compiling.Program(hbm, 0.0, 0.0, 0.0, 0.0, costs, flops, 1.0, refused)


def parts_of(config, vocab_size=None, **arguments):
    """The layout of a config, its learner and how it decodes."""
    layout = make_layout(config, vocab_size, **arguments)
    return layout, make_learner(layout), make_decoding(layout)


def test_the_slowest_resource_limits_a_program():
    chip = V5E.chip
    assert program().bound(chip) == ("HBM", pytest.approx(0.01)) or program().bound(chip)[0] == "ICI"
    assert program(flops=197e12).bound(chip) == ("compute", pytest.approx(1.0))
    assert program().limits(chip)["ICI"] == pytest.approx(0.01)


def test_bytes_given_back_in_place_count_once():
    given_back = compiling.Program(3.0, 1.0, 2.0, 2.0, 5.0, hlo.Costs(), 0.0, 1.0)
    assert given_back.hbm == 3 + 1 + 2 - 2 + 5


def test_a_critic_of_its_own_is_planned_too():
    names, held = {}, {}
    for method in ("PPO", "RLOO"):
        config = qwen3_0p6b_gsm8k.get_config("tiny")
        config.method = method
        config.train.microbatch_size = 8
        parts = parts_of(resolve(config), 32)
        lowered = [next(programs) for programs in [run_plan.lowered_programs(*parts)] for _ in range(2)]
        names[method], held[method] = [name for name, _ in lowered], memory.resident(*parts)["decode"]
    assert names == {"PPO": ["log-probs", "baseline"], "RLOO": ["log-probs", "update"]}
    assert held["PPO"] > 1.9 * held["RLOO"]


def test_others_hold_the_optimizer_state_the_decoding_weights_and_the_cache():
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    held = memory.resident(*parts_of(config))
    weights = 596_049_920  # of Qwen3-0.6B
    copy = 2 * weights  # bf16, whole on every device, since rollout.tensor is 1
    sharded = 4 * weights / 8
    assert held["decode"] == pytest.approx(3 * sharded, rel=1e-3)  # master weights and two slots
    cache = 28 * 2 * 8 * 128 * 2 * (512 + 1024) * 32
    assert held["prefill"] - held["decode"] == pytest.approx(cache, rel=1e-2)
    batches = 4 * 11 * 4096 * 128 * 8 / 8
    assert held["update"] == pytest.approx(copy + batches, rel=1e-3)
    assert config.reference.rule == "every"  # 16 updates, of which a step has four: the reference is another policy
    assert held["log-probs"] - held["update"] == pytest.approx((2 + 1) * sharded, rel=1e-3)
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.reference.every = "4 updates"
    assert memory.resident(*parts_of(config))["log-probs"] == pytest.approx(held["log-probs"] - sharded, rel=1e-3)


@pytest.mark.parametrize("tensor", [None, 2])
def test_a_chip_of_a_host_holds_its_share_of_the_weights_and_its_own_slots(tensor):
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    config.rollout.tensor = tensor
    held = memory.resident(*parts_of(config, host=jax.devices()[:4]))
    cache = 28 * 2 * 8 * 128 * 2 * (512 + 1024) * 32
    assert held["prefill"] - held["decode"] == pytest.approx(cache, rel=1e-2)
    weights = 2 * 596_049_920 / (tensor or 4)
    batches = 4 * 11 * 4096 * 128 * 8 / 8
    assert held["update"] == pytest.approx(weights + batches, rel=1e-3)


def test_decoding_in_eight_bits_is_planned_in_eight_bits(monkeypatch):
    config = resolve(qwen3_0p6b_gsm8k.get_config("tiny"))
    shared = memory.resident(*parts_of(config, 32))["update"]  # without a copy for the sampler
    config.rollout.int8 = True
    parts = parts_of(config, 32)
    monkeypatch.setattr(compiling, "training", lambda *args, **kwargs: iter(()))
    (weights,) = (low.in_avals[0][0] for name, low in run_plan.lowered_programs(*parts) if name == "decode")
    matrices = sum(x.size for x in jax.tree.leaves(weights) if x.dtype == "int8")
    assert matrices == 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128)
    wide = sum(x.size for x in jax.tree.leaves(weights) if x.dtype == "float32")
    held = memory.resident(*parts)["update"] - shared
    assert (matrices + 4 * wide) / 8 < held < matrices / 8 + 4 * wide, "embeddings and matrices are spread, scales not"


def test_a_resident_reference_counts_beside_every_program():
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    before = memory.resident(*parts_of(config))
    config.reference.resident = True
    after = memory.resident(*parts_of(config))
    sharded = 4 * 596_049_920 / 8
    apart = {name: after[name] - before[name] for name in before}
    assert apart.pop("log-probs") == 0, "there for its own pass already"
    assert apart == pytest.approx(dict.fromkeys(apart, sharded), rel=1e-3)


def test_what_is_offloaded_leaves_the_chips():
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    before = memory.resident(*parts_of(config))
    config.offload = "optimizer+reference"
    config.reference.resident = True
    after = memory.resident(*parts_of(config))
    sharded = 4 * 596_049_920 / 8
    assert before["decode"] - after["decode"] == pytest.approx(2 * sharded, rel=1e-3)
    assert before["log-probs"] - after["log-probs"] == pytest.approx(2 * sharded, rel=1e-3), "there for its own pass"


def test_the_figures_of_a_step_come_from_config_and_programs(monkeypatch, capsys):
    config = resolve(qwen3_4b_2k.get_config())
    config.rollout.slots = 48
    layout, _, decoding = parts_of(config, host=jax.devices()[:4])
    names = ("log-probs", "start", "add", "apply", "prefill", "decode")
    programs = {name: program(flops=197e12) for name in names}
    programs["decode"].costs.bytes = 2.5e9 + memory.cache_bytes(layout, decoding)
    lengths = run_plan.lengths_of(config, mean=1000)
    assert (lengths.prompt, lengths.mean, lengths.limit) == (300, 1000, 2048)
    found = run_plan.step_figures(layout, decoding, programs, V5E, lengths)
    assert (found["prompts"], found["completions"], found["slots"]) == (1536, 1536 * 16, 384)
    assert found["slots_of_a_chip"] == 384 / 8
    step = run_plan.decode_step_of(layout, decoding, programs["decode"])
    assert step.fixed == pytest.approx(2.5e9) and step.collectives == 0 and step.network == 1.8e9
    assert step.cached == pytest.approx(192 * 36 * 2 * 8 * 128 * 2 / 4, rel=1e-3)  # of one position, on a chip of four
    monkeypatch.setenv("COLUMNS", "120")
    plan.show(V5E, programs, found)
    text = capsys.readouterr().out
    assert "400 steps, days" in text
    _, binds = text[text.index("fits v5e") :].splitlines()  # the last lines
    phases = found["expected"]["phases"]
    assert binds.startswith(f"binds: {max(phases, key=phases.get)}, ")
    assert "41 evaluations of 3,200 completions" in " ".join(text.split())
    assert found["bound"]["seconds"] < found["fastest"]["seconds"] < found["expected"]["seconds"]
    assert found["expected"]["seconds"] < found["slowest"]["seconds"]
    rows = 512 * 16 * 1300 / 8192 / PACKING  # of all 16 updates
    micro_batch = layout.config.train.microbatch_size or rows_per_update(layout.config)
    assert found["micro_batches"] == 16 * math.ceil(rows / 16 / micro_batch)


def test_each_program_is_announced_before_it_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(run_plan.Topology, "devices", lambda topology: jax.devices()[: topology.chips])
    monkeypatch.setattr(run_plan, "lowered_programs", lambda *parts: iter([("decode", None)]))
    monkeypatch.setattr(run_plan, "compile_program", lambda *a, **k: program())
    run_plan.plan(resolve(qwen3_0p6b_gsm8k.get_config()), V5E, only=["decode"])
    assert capsys.readouterr().err == "compiling decode for v5e:2x4\n"


def test_a_program_that_the_config_lacks_is_an_error_before_any_is_compiled(monkeypatch, capsys):
    """A misspelt --programs would print nothing, and its exit code would say that all fits."""
    monkeypatch.setattr(run_plan.Topology, "devices", lambda topology: jax.devices()[: topology.chips])
    parts = [("start", None), ("decode", None)]
    monkeypatch.setattr(run_plan, "lowered_programs", lambda *_: iter(parts))
    monkeypatch.setattr(run_plan, "compile_program", lambda *a, **k: program())
    with pytest.raises(ValueError, match="this config has no program decod, update; it has start, decode"):
        four = topologies.parse("v5e:2x2")
        run_plan.plan(resolve(qwen3_0p6b_gsm8k.get_config()), four, only=["decode", "update", "decod"])
    assert not capsys.readouterr().err


def test_where_the_weights_cannot_be_had_the_size_gives_the_shapes(monkeypatch, tmp_path, capsys):
    config = resolve(qwen3_0p6b_gsm8k.get_config())
    with config.unlocked():
        config.model.path = str(tmp_path / "none")
    known = run_plan.with_known_shapes(config)
    assert (known.model.path, known.model.size, config.model.path) == (None, "qwen3-0.6b", str(tmp_path / "none"))
    assert capsys.readouterr().err.startswith("planning with the shapes of model.size=qwen3-0.6b: ")
    monkeypatch.setattr(run_plan, "model_config", lambda config, vocab_size: None)
    assert run_plan.with_known_shapes(config) is config
    config.model.size = None
    assert run_plan.with_known_shapes(config) is config, "make_layout says what is missing"


def test_tables_and_json_say_the_same(monkeypatch, capsys):
    programs = {"update": program(), "decode": program(refused="Used 17.50G of 15.75G hbm")}
    monkeypatch.setenv("COLUMNS", "100")
    plan.show(V5E, programs, {})
    text = capsys.readouterr().out
    assert re.search(r"update +│ +1.00 │ .* │ +1.00 │ +0.00 │ +1 s", text), "the peak is a number"
    assert "does not fit v5e:2x4: decode" in text and "decode: Used 17.50G of 15.75G hbm" in text
    found = json.loads(json.dumps(plan.as_json(V5E, programs, {}, {})))
    assert (found["fits"], found["programs"]["update"]["fits"]) == (False, True)
    assert found["programs"]["update"]["costs"]["collectives"] == {"all-gather": 1.8e9}


def test_devices_that_only_sample_are_planned_apart():
    config = tiny.get_config()
    config.rollout.devices = 4
    with pytest.raises(ValueError, match=r"rollout.devices=4 makes two.*--programs=prefill,decode for the part that"):
        run_plan.plan(resolve(config), V5E)
    for by_arithmetic in (estimates.estimate, estimates.search):  # their numbers would mix the parts
        with pytest.raises(ValueError, match="rollout.devices=4 makes two"):
            by_arithmetic(resolve(config), V5E)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mean_tokens=2049"], "--mean_tokens=2049: at least 0, and at most rollout.max_tokens=2048"),
        (["--prompt_tokens=-1"], "--prompt_tokens=-1: at least 0, and at most task.max_prompt_tokens=2048"),
        (["--beside=seed=1", "--search"], "--beside compares by arithmetic alone: leave out --search and --programs"),
        (["--beside=seed=1", "--programs=decode"], "leave out --search and --programs"),
    ],
)
def test_lengths_that_no_completion_has_and_flags_that_do_not_go_together_are_refused(flags, said, capsys):
    assert plan.main(["--config=configs/qwen3_4b_2k.py", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_topology_ends_in_one_line():
    command = [sys.executable, "-m", "rpg_jax.plan", "--config=configs/tiny.py", "--topology=v9:2x2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown topology 'v9:2x2'")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(topologies.compiler_library() is not None, reason="the compiler for TPUs is there")
def test_without_the_compiler_a_plan_says_how_to_get_it():
    with pytest.raises(ValueError, match="python -m rpg_jax.plan --get_compiler"):
        run_plan.plan(resolve(tiny.get_config()), V5E)


@needs_compiler
@pytest.mark.tpu_compile
def test_a_plan_for_a_slice_that_is_not_there():
    topology = topologies.parse("v5e:2x2")
    config = resolve(tiny.get_config())
    programs, step = run_plan.plan(config, topology)
    assert 0 < step["bound"]["seconds"] < step["expected"]["seconds"]
    assert list(programs) == ["log-probs", "update", "prefill", "decode"]
    assert all(p.fits(topology.chip) for p in programs.values())
    update = programs["update"]
    assert update.model_flops < update.costs.flops
    assert update.alias > 0.9 * update.outputs, "the state is donated"
    assert update.costs.collectives["reduce-scatter"] > 0


@needs_compiler
@pytest.mark.tpu_compile
def test_two_slices_are_planned_with_a_copy_of_the_weights_in_each():
    one, two = (
        run_plan.plan(resolve(tiny.get_config()), topologies.parse(name), only=["update"])[0]["update"]
        for name in ("v5e:2x2", "v5e:2x2*2")
    )
    assert two.model_flops == pytest.approx(one.model_flops / 2)
    assert two.arguments > 0.9 * one.arguments, "weights and optimizer state; the rows are half as many"


@needs_compiler
@pytest.mark.tpu_compile
def test_the_decode_program_of_one_of_several_hosts_compiles():
    config, topology = resolve(tiny.get_config()), topologies.parse("v5e:4x4")
    decode = run_plan.plan(config, topology, only=["decode"])[0]["decode"]
    assert topology.hosts == 4 and decode.fits(topology.chip)


@pytest.mark.slow
@needs_compiler
@pytest.mark.tpu_compile
def test_qwen3_4b_at_8k_fits_the_slice_that_its_config_names():
    topology = topologies.parse("v5p:2x2x2")
    programs, _ = run_plan.plan(resolve(qwen3_4b_8k.get_config()), topology)
    assert {name: p.refused for name, p in programs.items() if not p.fits(topology.chip)} == {}
    start = programs["start"]
    assert start.costs.flops < 1.1 * start.model_flops, "nothing but rematerialisation is computed twice"
