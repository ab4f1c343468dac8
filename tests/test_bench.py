from __future__ import annotations

import json

import pytest

from rpg_jax import bench


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
