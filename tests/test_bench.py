from __future__ import annotations

import json

import pytest

from rpg_jax import bench


@pytest.mark.slow  # a benchmark
def test_bench_serve_reports_a_closed_and_an_open_load(capsys):
    load = ["--requests=24", "--clients=8", "--rate=2000", "--max-active=12"]
    assert bench.main(["serve", "--preset=tiny", "--json", *load]) == 0
    closed, opened = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (closed["load"], opened["load"]) == ("closed", "open")
    assert closed["served"] == closed["requests"] == 24 and closed["errors"] == {}
    assert closed["tokens"] == 24 * 5
    assert 0 < closed["first_token_p50"] <= closed["latency_p50"] <= closed["latency_p99"] < closed["seconds"]
    assert opened["served"] + opened["errors"].get("RESOURCE_EXHAUSTED", 0) == 24


@pytest.mark.slow  # a benchmark
def test_bench_rollout_reports_every_driver_as_one_json_object(capsys):
    assert bench.main(["rollout", "--preset=tiny", "--repeats=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 64 * 8 * 5
    for prefix in ("", "lockstep_", "bare_loop_"):
        assert abs(result[f"{prefix}tokens_per_s"] * result[f"{prefix}seconds"] - result["tokens"]) < 1
    assert 0 < result["decode_seconds"] < result["seconds"] * 1.01
    assert result["occupancy"] == result["lockstep_occupancy"] == 1.0
    assert result["peak_bytes"] > 1e7
