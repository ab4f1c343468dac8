"""Everything that can be known to be wrong before it costs money: each check is one line with its fix."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cloud import reach
from cloud.errors import CommandError, Kind, LaunchError
from cloud.job import CAPACITIES, ROOT, Job
from cloud.shell import Shell

PYTHON = ROOT / ".venv" / "bin" / "python"
MULTI_REGIONS = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}
NAME = re.compile(r"[a-z]([-a-z0-9]{0,37}[a-z0-9])?")
SECRETIVE = re.compile(r"(?i)(token|secret|password|api_?key)[\w.]*=.")


def check(job: Job, shell: Shell, *, plan: bool = True, trainer: bool = True) -> list[str]:
    """Runs all checks and returns what they found to report.

    The ones that need no cloud run first, all of them, so that one start shows every mistake; raises LaunchError with
    one line for each.
    """
    notes, problems = [], []
    offline = [name_is_a_label, type_and_zone, capacity_is_one, bucket_is_an_address, no_secret_values]
    fits = [config_fits, plan_says_it_fits][: 1 + plan] if trainer else []
    for checker in [*offline, *fits]:
        try:
            notes += checker(job)
        except LaunchError as error:
            problems.append(str(error))
    if problems:
        raise LaunchError("\n".join(dict.fromkeys(problems)))
    for cloud_checker in (type_is_offered, bucket_is_near, secrets_exist):
        notes += cloud_checker(job, shell)
    return [*notes, *quota_and_cost(job)]


def name_is_a_label(job: Job) -> Iterator[str]:
    if not NAME.fullmatch(job.name):
        raise LaunchError(
            f"--name={job.name!r} is no DNS label", "use up to 39 of a-z, 0-9 and -, a letter first, no - at the end"
        )
    yield f"name {job.name}"


def type_and_zone(job: Job) -> Iterator[str]:
    zones = job.slice.generation.zones
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]", job.zone):
        raise LaunchError(f"--zone={job.zone!r} is no zone", f"{job.type} is in {', '.join(zones)}")
    if job.zone not in zones:
        raise LaunchError(f"no {job.slice.generation.name} in zone {job.zone}", f"use --zone={'|'.join(zones)}")
    if job.slices < 1:
        raise LaunchError(f"--slices={job.slices}", "use 1 or more")
    if job.slices > 1 and job.direct:
        raise LaunchError(f"--direct cannot create {job.slices} slices", "leave it out: multislice needs the queue")
    yield f"{job.slices} × {job.slice}" if job.slices > 1 else str(job.slice)


def capacity_is_one(job: Job) -> Iterator[str]:
    if job.capacity not in CAPACITIES:
        raise LaunchError(f"--capacity={job.capacity!r}", f"use one of {', '.join(CAPACITIES)}")
    yield f"capacity {job.capacity}"


def bucket_is_an_address(job: Job) -> Iterator[str]:
    if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9](/[-_.A-Za-z0-9]+)*", job.bucket):
        raise LaunchError(
            f"--bucket={job.bucket!r} is no bucket", "use gs://NAME or gs://NAME/folder, without / at the end"
        )
    yield from ()


def no_secret_values(job: Job) -> Iterator[str]:
    for argument in job.trainer:
        if SECRETIVE.search(argument):
            raise LaunchError(
                f"{argument.partition('=')[0]} looks like a secret on the command line",
                "store it: gcloud secrets create NAME --data-file=-, then pass --secret=VARIABLE=NAME",
            )
    for variable, name in job.secrets:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) or not re.fullmatch(r"[-\w]{1,255}", name):
            raise LaunchError(f"--secret={variable}=…", "write --secret=VARIABLE=name-in-secret-manager, never a value")
    yield from ()


def config_fits(job: Job) -> Iterator[str]:
    """The config resolves, workers have what it names, its mesh covers the chips and its batches divide."""
    for argument in job.trainer:
        if argument.startswith(("--config.run.name=", "--config.run.dir=")):
            raise LaunchError(f"{argument} is the launch's to set", "use --name and --bucket")
    paths = [a.partition("=")[2].partition(":")[0] for a in job.trainer if a.startswith("--config=")]
    if not paths or not (ROOT / paths[-1]).is_file():
        raise LaunchError(
            f"no config {paths[-1]!r}" if paths else "no --config", "pass -- --config=configs/NAME.py after --"
        )
    reach.config_is_sent(paths[-1])
    if job.slices < 1:
        return
    if not PYTHON.exists():
        yield "config not checked: there is no .venv here (bash launch/test.sh makes one)"
        return
    done = resolve(job.trainer, job.slice.chips * job.slices, job.slices)
    if done.returncode:
        raise LaunchError(f"the config does not resolve: {done.stderr.strip().splitlines()[-1]}")
    resolved = json.loads(done.stdout)
    config = resolved["config"]
    if config["model"]["size"] and not config["model"]["path"]:
        raise LaunchError(
            f"model.size={config['model']['size']} says only shapes, and training starts from weights",
            "pass --config.model.path=OWNER/NAME, as on the Hugging Face hub, or gs://BUCKET/FOLDER",
        )
    reach.all_is_there(config)
    yield "mesh " + (" × ".join(f"{axis} {n}" for axis, n in resolved["mesh"].items() if n > 1) or "of one chip")
    yield batches_divide(config, resolved["row_shards"])


def resolve(trainer: tuple[str, ...], chips: int, slices: int) -> subprocess.CompletedProcess:
    """Has the repository's Python print config, mesh and shards of rows as JSON; here is only the standard library."""
    where = [f"--chips={chips}", f"--slices={slices}"]
    command = [str(PYTHON), str(Path(__file__).parent / "resolve.py"), *where, *trainer]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def batches_divide(config: dict, shards: int) -> str:
    """The rows of a batch; they must divide over the shards that the sharding rules make of them."""
    rollout, train = config["rollout"], config["train"]
    prompts, updates = rollout["prompts_per_step"], train["updates_per_step"]
    if prompts % updates:
        raise LaunchError(
            f"rollout.prompts_per_step={prompts} does not split into train.updates_per_step={updates}",
            "make it a multiple",
        )
    rows = train["microbatch_size"] or prompts // updates * rollout["group_size"]
    if rows % shards:
        field = "train.microbatch_size" if train["microbatch_size"] else "rows of an update"
        raise LaunchError(
            f"{field} = {rows} does not divide over {shards} shards of rows",
            f"make it a multiple of {shards}, or give chips to --config.mesh.tensor",
        )
    return f"{rows} rows over {shards} shards"


def plan_says_it_fits(job: Job) -> Iterator[str]:
    """`python -m rpg_jax.plan` compiles the programs for these slices: whether they fit, and how long the run takes."""
    if not PYTHON.exists() or not (ROOT / "rpg_jax" / "plan.py").exists():
        return
    if not tpu_compiler_is_installed():
        yield "plan: not asked; for that, python3 launch/install.py --requirements=requirements-tpu.txt"
        return
    topology = job.slice.plan_topology + (f"*{job.slices}" if job.slices > 1 else "")
    command = [str(PYTHON), "-m", "rpg_jax.plan", *job.trainer, "--json", f"--topology={topology}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        raise LaunchError(f"plan: {(done.stderr.strip() or 'no message').splitlines()[-1]}", "--no-plan skips this")
    found = json.loads(done.stdout)
    if not found["fits"]:
        misfits = ", ".join(name for name, program in found["programs"].items() if not program["fits"])
        change = ", ".join(f"{field}={value}" for field, value in (found["smallest_change"] or {}).items())
        fix = f"{change} would fit" if change else "take a larger --type or smaller batches"
        raise LaunchError(f"plan: {misfits} would not fit {topology}", f"{fix}; --no-plan skips this")
    steps, days = found["step"]["steps"], found["step"]["days_of_the_run"]
    dollars = 24 * days * job.cost()[0]
    yield f"plan: fits {topology}; its {steps} steps take at least {days:.1f} days, about ${dollars:,.0f}"


def tpu_compiler_is_installed() -> bool:
    """Whether .venv has libtpu, which compiles for TPUs on any machine."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('libtpu') is None)"
    return subprocess.run([str(PYTHON), "-c", probe], capture_output=True).returncode == 0


def type_is_offered(job: Job, shell: Shell) -> Iterator[str]:
    """Login, project, API, zone and type in one harmless question."""
    command = ["gcloud", "compute", "tpus", "accelerator-types", "list", *job.place]
    found = shell.ask([*command, f"--filter=type={job.type}", "--format=value(type)"], dry_answer=job.type)
    if job.type not in found.split():
        raise LaunchError(f"{job.type} is not offered to project {job.project} in {job.zone}", "try another zone")
    yield f"project {job.project}, zone {job.zone}"


def bucket_is_near(job: Job, shell: Shell) -> Iterator[str]:
    root = "/".join(job.bucket.split("/")[:3])
    command = ["gcloud", "storage", "buckets", "describe", root, "--format=value(location)"]
    try:
        location = shell.ask(command, dry_answer=job.region.upper()).strip()
    except CommandError as error:
        if error.kind is Kind.NOT_FOUND:
            fix = f"gcloud storage buckets create {root} --location={job.region} --project={job.project}"
            raise LaunchError(f"bucket {root} does not exist", f"make it: {fix}") from None
        raise
    near = location.lower() == job.region or job.region.startswith(MULTI_REGIONS.get(location, "none"))
    if not near:
        raise LaunchError(
            f"bucket {root} is in {location.lower()}, the TPU in {job.region}: slow checkpoints, paid traffic",
            f"use a bucket in {job.region}",
        )
    yield f"bucket {job.bucket} in {location.lower()}"


def secrets_exist(job: Job, shell: Shell) -> Iterator[str]:
    for _, name in job.secrets:
        command = ["gcloud", "secrets", "describe", name, f"--project={job.project}", "--format=value(name)"]
        try:
            shell.ask(command)
        except CommandError as error:
            if error.kind is Kind.NOT_FOUND:
                fix = f'printf %s "$VALUE" | gcloud secrets create {name} --data-file=- --project={job.project}'
                raise LaunchError(f"no secret {name!r} in project {job.project}", f"store it: {fix}") from None
            raise
        yield f"secret {name}"


def quota_and_cost(job: Job) -> Iterator[str]:
    """What the request draws on. v4 and v5p quotas count TensorCores, the others chips."""
    generation = job.slice.generation
    unit = "TensorCores" if generation.cores_per_chip == 2 else "chips"
    kind = {"on-demand": "on-demand", "spot": "preemptible", "reserved": "reserved"}[job.capacity]
    need = job.slice.chips * job.slices * generation.cores_per_chip
    yield f"needs quota: {need} {kind} {generation.name} {unit} in {job.zone}"
    dollars, source = job.cost()
    yield f"costs about ${dollars:.2f} an hour: {source}"
