"""Interrupted after a step and continued, every part of a run that has a state of its own is bit for bit the same."""

import json
import re

import pytest

from tests.end_to_end.every_variant import VARIANTS
from tests.end_to_end.whole_runs import completed, environment


def metrics(folder):
    """The lines of steps without what a clock measured or an evaluation added."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clocked = ("time/", "host/", "seconds", "tokens_per_second", "eval/")
    return [{k: v for k, v in r.items() if not k.startswith(clocked)} for r in records]


def rollouts(folder):
    """The bytes of every rollout file; the resumed run starts with those of a step that it does again."""
    found = {path.stem: path.read_bytes() for path in (folder / "rollouts").iterdir()}
    assert sorted(found) == ["000001", "000002"]
    return found


@pytest.mark.soak  # every variant twice
def test_every_optimizer_reference_and_critic_resumes_to_the_same_bits(warm, tmp_path):
    arguments = "-m", "tests.end_to_end.every_variant", tmp_path, warm / "warm_starts"
    done = completed(arguments, environment(warm))
    for name in VARIANTS:
        checksums = re.findall(rf"^{name}-\w+\n(?:.*\n)*?weights checksum: (\w+)", done.stdout, re.M)
        assert f"{name}-resumed after step 1" in done.stdout
        assert len(checksums) == 2 and len(set(checksums)) == 1, (name, checksums)
        straight, resumed = (metrics(tmp_path / f"{name}-{how}") for how in ("straight", "resumed"))
        assert straight == resumed and [r["step"] for r in straight] == [0, 1, 2, 3], name
        assert rollouts(tmp_path / f"{name}-straight") == rollouts(tmp_path / f"{name}-resumed"), name
        assert all(r["skipped_updates"] == 0 and r["grad_norm"] > 0 for r in straight[1:]), name
        assert all(r["sampler_gap"] < 1e-4 for r in straight[1:]), name
    references = {
        name: [r["reference_update"] for r in metrics(tmp_path / f"{name}-straight")[1:]] for name in VARIANTS
    }
    assert references["every"] == [0, 3, 6] and references["kl"] == [2, 4, 6]
    records = metrics(tmp_path / "ppo-straight")[1:]
    assert abs(records[0]["explained_variance"]) < 1e-3, "values start at 0 everywhere"
    assert records[-1]["critic_grad_norm"] > 0 and records[-1]["value"] != 0
