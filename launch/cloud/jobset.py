"""The JobSet of a run on GKE: `kubectl apply` takes it where XPK is not wanted, and a reader can review it."""

import json
import string

from cloud.job import ROOT, Job

TEMPLATE = ROOT / "launch" / "gke" / "jobset.yaml"
CHIPS_PER_POD = 4
GRACE_SECONDS = 60
STALLED = 75  # as in rpg_jax/runs/processes.py
NO_RESTART = (2, 3)  # as in rpg_jax/runs/cli.py, a user error and a run that is lost: a restart ends the same
RESTART_ON = (1, STALLED, *range(127, 256))  # an exception (a lost peer is one), a stall, signals


def entrypoint(job: Job) -> list[str]:
    """Arguments of the image's entry point."""
    secrets = [f"{variable}={name}" for variable, name in job.secrets]
    return [job.bucket, str(job.deadline()), *secrets, "--", *job.command]


def pods_per_slice(job: Job) -> int:
    """GKE's node pools have four chips per VM, except for slices of one chip."""
    return max(1, job.tpu.slice.chips // CHIPS_PER_POD)


def manifest(job: Job, image: str, max_restarts: int, reservation: str | None = None) -> str:
    """The JobSet in YAML. Strings are quoted as in JSON, which YAML reads. Lines without a value are left out."""
    tpu, indent = job.tpu, " " * 20
    capacity = {
        "spot": 'cloud.google.com/gke-spot: "true"',
        "reserved": f"cloud.google.com/reservation-name: {json.dumps(reservation)}",
        "on-demand": "",
    }
    text = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=job.name,
        image=image,
        project=json.dumps(tpu.project),
        slices=tpu.slices,
        pods=pods_per_slice(job),
        chips=min(CHIPS_PER_POD, tpu.slice.chips),
        accelerator=tpu.slice.generation.gke_accelerator,
        topology=tpu.slice.topology,
        capacity=capacity[tpu.capacity],
        service_account=f"serviceAccountName: {json.dumps(tpu.service_account)}" if tpu.service_account else "",
        arguments=f"\n{indent}".join(f"- {json.dumps(argument)}" for argument in entrypoint(job)),
        max_restarts=max_restarts,
        pod_restarts=max_restarts if job.serves_for else 0,  # servers do not wait for each other
        grace_seconds=GRACE_SECONDS,
        no_restart=json.dumps(NO_RESTART),
    )
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())
