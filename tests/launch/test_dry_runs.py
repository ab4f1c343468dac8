"""Every recipe as a golden file: the commands a Cloud TPU user would expect, and the files they use.

After a wanted change: `REGENERATE=1 pytest tests/launch/test_dry_runs.py`, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloud import job

GOLDEN = Path(__file__).parent / "golden"
REPOSITORY = str(Path(__file__).parents[2])
TINY = "-- --config=configs/tiny.py --config.mesh.fsdp=-1 --config.method=RPG-REINFORCE-URKL"
V5P = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b"
V6E = "--type=v6e-16 --zone=us-east5-b --bucket=gs://mine/team --name=rpg-4b --project=p --slices=2"
SECRETS = (
    "--secret=RPG_JAX_API_KEY=servers-key --secret=RPG_JAX_CERTIFICATE=servers-certificate "
    "--secret=RPG_JAX_PRIVATE_KEY=servers-private-key"
)

RECIPES = {
    "tpu-up": ("tpu", f"up --dry-run {V5P} {TINY}"),
    "tpu-up-spot-multislice": ("tpu", f"up --dry-run {V6E} --capacity=spot --secret=WANDB_API_KEY=wandb-key {TINY}"),
    "tpu-up-reserved": (
        "tpu",
        f"up --no-watch --dry-run {V5P} --capacity=reserved --service-account=a@b --network=n {TINY}",
    ),
    "tpu-up-internal": ("tpu", f"up --no-watch --dry-run {V5P} --internal-ips --keep {TINY}"),
    "tpu-up-flex-start": (
        "tpu",
        f"up --dry-run --type=v6e-8 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b --capacity=flex-start "
        f"--budget=500 {TINY}",
    ),
    "tpu-up-first-hour": (
        "tpu",
        "up --dry-run --type=v6e-1 --zone=us-east5-b --bucket=gs://mine --name=hour --max-hours=3 "
        "-- first-hour --quick",
    ),
    "tpu-stop": ("tpu", f"stop --dry-run {V5P}"),
    "tpu-delete": ("tpu", f"delete --dry-run {V6E}"),
    "tpu-status": ("tpu", f"status --dry-run {V5P}"),
    "xpk-up": ("xpk", f"up --dry-run {V5P} --cluster=c --capacity=spot {TINY}"),
    "xpk-up-no-watch": ("xpk", f"up --no-watch --dry-run {V6E} --cluster=c --image=i:1 --secret=KEY=my-key {TINY}"),
    "xpk-up-no-watch-reserved": (
        "xpk",
        f"up --no-watch --dry-run {V5P} --image=i:1 --capacity=reserved --reservation=r {TINY}",
    ),
    "tpu-up-servers": (
        "tpu",
        "up --dry-run --type=v5p-8 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b-w0 --capacity=spot "
        f"--serves-for=rpg-4b {SECRETS} {TINY} --idle=600 --weights_from=/mnt/weights",
    ),
    "xpk-up-no-watch-servers": (
        "xpk",
        "up --no-watch --dry-run --type=v5p-8 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b-w --slices=8 "
        f"--capacity=spot --cluster=c --image=i:1 --serves-for=rpg-4b {SECRETS} {TINY} --weights_from=/mnt/weights",
    ),
    "xpk-delete": ("xpk", f"delete --dry-run {V5P} --cluster=c"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_dry_run_prints_what_would_run(cloud, name, monkeypatch):
    monkeypatch.setattr(job, "time", SimpleNamespace(time=lambda: 1.8e9))  # limits count from now
    program, line = RECIPES[name]
    assert cloud.run(line, program) == 0
    assert cloud.calls == [], "a dry run ran something"
    text = cloud.out
    path = cloud.home / "staging" / "run.sh"
    if path.exists():
        text += f"\n=== run.sh\n{path.read_text(encoding='utf-8')}"
    text = text.replace(str(cloud.home / "staging"), "STAGING").replace(REPOSITORY, "REPOSITORY")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("REGENERATE"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_dry_run_command_is_one_the_real_programs_take(cloud):
    """The fake refuses flags that gcloud and xpk do not have; here their answers are the scripted successes."""
    cloud.script({"match": "storage ls", "code": 0, "stdout": "gs://mine/launch/rpg-4b/finished"})
    assert cloud.run(f"up {V5P} {TINY}") == 0
    assert cloud.run(f"up {V5P} --cluster=c {TINY}", "xpk") == 0
    for command in ("status", "stop", "delete --yes"):
        assert cloud.run(f"{command} --name=rpg-4b") == 0, cloud.err
    for command in ("up --no-watch", "status", "stop", "delete --yes"):
        assert cloud.run(f"{command} --name=rpg-4b", "xpk") == 0, cloud.err
