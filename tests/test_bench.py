from __future__ import annotations

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from rpg_jax import bench
from rpg_jax.benchmarks import measure_kernels, subject
from rpg_jax.benchmarks.measure_kernels import Case


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_host_memory_is_in_bytes_where_the_system_counts_bytes_too(monkeypatch, system, unit):
    monkeypatch.setattr(subject.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 << 20))
    monkeypatch.setattr(subject.sys, "platform", system)
    assert subject.peak_bytes() == (3 << 20) * unit


@pytest.mark.slow  # a benchmark
def test_bench_rollout_reports_every_driver_as_one_json_object(capsys):
    assert bench.main(["rollout", "--preset=tiny", "--repeats=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 64 * 8 * 5
    for prefix in ("", "lockstep_"):
        assert abs(result[f"{prefix}tokens_per_s"] * result[f"{prefix}seconds"] - result["tokens"]) < 1
    assert 0 < result["decode_seconds"] < result["seconds"] * 1.01
    assert result["occupancy"] == result["lockstep_occupancy"] == 1.0
    assert result["peak_bytes"] > 1e7


@pytest.mark.slow  # a benchmark
def test_bench_step_reports_the_update(capsys):
    small = ["--preset=tiny", "--config.rollout.prompts_per_step=2"]
    assert bench.main(["step", *small, "--repeats=1", "--json"]) == 0
    [step] = map(json.loads, capsys.readouterr().out.splitlines())
    assert step["tokens"] == 2 * 8 * (12 + 5) and step["of_first"] == 1.0
    assert abs(step["tokens_per_s"] * step["seconds"] - step["tokens"]) < 1
    assert step["peak_bytes"] > step["trained_bytes"] + step["slots_bytes"]


@pytest.mark.slow  # a benchmark
def test_bench_step_puts_adapters_beside_full_training(capsys):
    small = ["--preset=tiny", "--config.rollout.prompts_per_step=2", "--repeats=1", "--beside=model.lora.rank=4"]
    assert bench.main(["step", *small, "--json"]) == 0
    full, lora = map(json.loads, capsys.readouterr().out.splitlines())
    assert (full["setting"], lora["setting"]) == ("as given", "model.lora.rank=4")
    assert lora["of_first"] == pytest.approx(lora["seconds"] / full["seconds"])
    assert full["trained"] == full["parameters"] == lora["parameters"] > 9 * lora["trained"]
    assert full["base_bytes"] == 0 and lora["base_bytes"] == full["trained_bytes"]
    for one in (full, lora):  # two slots for each number of AdamW, and counters
        assert one["slots_bytes"] == pytest.approx(2 * one["trained_bytes"], abs=64)
        assert one["sync_bytes"] == one["trained_bytes"], "float32"
        assert one["in_place_bytes"] == pytest.approx(3 * one["trained_bytes"], abs=64), "the state is donated"
    assert 0 < lora["program_flops"] < full["program_flops"] and lora["model_flops"] < full["model_flops"]


def test_results_that_come_together_are_columns(monkeypatch, capsys):
    found = [{"setting": "as given", "seconds": 0.5, "trained": 4096}, {"setting": "b", "seconds": 2.0, "trained": 1}]
    monkeypatch.setattr("rpg_jax.benchmarks.measure_step.run", lambda options: iter([found]))
    assert bench.main(["step"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["setting", "as", "given", "b"], ["seconds", "0.5000", "2.0000"], ["trained", "4,096", "1"]]


def test_a_result_may_have_other_fields_than_the_first(monkeypatch, capsys):
    found = [{"seconds": 0.5, "of_torch": 2.0}, {"seconds": 2.0, "peak": 1}]
    monkeypatch.setattr("rpg_jax.benchmarks.measure_step.run", lambda options: iter([found]))
    assert bench.main(["step"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["seconds", "0.5000", "2.0000"], ["of_torch", "2.0000"], ["peak", "1"]]


def test_bench_refuses_what_it_does_not_know(capsys):
    for wrong, message in (
        (["step", "--repeats=0"], "--repeats: 0 must be at least 1"),
        (["step", "--beside=model.lora.rank"], "write FIELD=VALUE,FIELD=VALUE"),
        (["step", "--beside=model.lora.rnak=4"], "rnak"),
        (["step", "--preset=w1", "--config=configs/tiny.py"], "not both"),
        (["step", "--config.model.remta=full"], "remta"),
        (["rollout", "--config.model.remat=full"], "unknown flag --config.model.remat"),
    ):
        assert bench.main(wrong) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.slow  # eleven kernels, interpreted
def test_bench_kernels_compares_every_kernel_of_a_tpu_on_a_cpu(capsys):
    assert bench.main(["kernels", "--repeats=1", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {result["kernel"] for result in results} == {"splash", "ragged", "megablox"} and len(results) == 11
    assert all(result["passed"] and result["interpreted"] and result["xla_seconds"] > 0 for result in results)
    assert {result["difference"] for result in results if result["name"] == "ragged append"} == {0.0}


def test_a_kernel_that_differs_or_does_not_compile_ends_with_three_after_the_others(monkeypatch, capsys):
    def start(implementation, ours):
        if ours == "none":
            raise NotImplementedError("heads of 16")
        row = jnp.ones((4, 8)).at[2].add(ours if implementation == "k" else 0)
        return lambda: {"out": row}

    def case(name, ours):
        return Case(name, "k", "m", "float32", lambda implementation, dtype: start(implementation, ours), {}, 1e-4)

    made = [case("refused", "none"), case("wrong", 0.1), case("nan", float("nan")), case("rounded", 1e-6)]
    monkeypatch.setattr(measure_kernels, "cases", lambda platform: iter(made))
    assert bench.main(["kernels", "--repeats=1", "--json"]) == 3
    out, error = capsys.readouterr()
    refused, wrong, nan, rounded = map(json.loads, out.splitlines())
    assert refused["error"] == "NotImplementedError: heads of 16" and not refused["passed"]
    assert wrong["difference"] == pytest.approx(0.1, rel=1e-3) and not wrong["passed"], "one vector of four"
    assert nan["difference"] == "inf" and not nan["passed"]
    assert rounded["difference"] < 1e-5 and rounded["passed"]
    assert error.splitlines()[-1].endswith(", ".join(f"{name} in float32 of m" for name in ("refused", "wrong", "nan")))


@pytest.mark.parametrize(("chosen", "kernels"), [("cudnn", ["cudnn", "cudnn"]), ("xla", [])])
def test_a_gpu_has_the_kernel_that_its_runs_take(monkeypatch, chosen, kernels):
    monkeypatch.setattr(measure_kernels, "chosen", lambda *_: chosen)
    assert [case.kernel for case in measure_kernels.cases("gpu")] == kernels


def test_a_tpu_has_every_kernel_at_heads_of_64_and_128():
    shapes = [(case.name, case.model, [*case.sizes.values()]) for case in measure_kernels.cases("tpu")]
    assert ("splash attention", "Qwen2.5-0.5B", [2, 4096, 14, 2, 64]) in shapes
    assert ("ragged attention", "Qwen3-8B", [64, 2048, 32, 8, 128]) in shapes and len(shapes) == 11
