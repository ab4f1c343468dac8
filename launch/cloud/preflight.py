"""Checks a launch before it costs money. Each mistake is one line with its fix."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cloud import account, reach, words
from cloud.accelerators import count
from cloud.errors import CommandError, Kind, LaunchError
from cloud.job import ROOT, SERVERS_SECRETS, Job
from cloud.shell import Shell

PYTHON = ROOT / ".venv" / "bin" / "python"
FLEX_START_HOURS = 7 * 24
STOPPED_SECONDS = 60  # of supervise.py and of a pod's grace; Google gives a preempted TPU VM 30
TRACKERS = ("wandb", "tensorboard")  # in requirements-trackers.lock
STDERR = 2  # the output of a dry run is its commands alone
ROOM_GB = 80  # of a worker's boot disk of 100 GiB; its image, packages and logs are assumed to take the rest
MULTI_REGIONS = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}


def check(job: Job, shell: Shell, *, plan: bool, vms: bool) -> list[str]:
    """Runs all checks and returns their notes for the user.

    Checks that need no cloud run first, and all of them run: one start shows every mistake.

    Raises:
      LaunchError: a check failed; the message has one line for each mistake.
    """
    offline = [*words.FORMS, type_and_slices, capacity_has_its_limit, servers_are_whole, first_hour_has_one_host]
    offline += [servers_have_jobs_of_their_own] if vms else []
    fits = [config_fits, plan_says_it_fits][: 1 + (plan and not job.serves_for)]
    notes = words.passes(job, [*offline, *([] if job.is_first_hour else fits)])
    for cloud_checker in (type_is_offered, bucket_is_near, secrets_exist, *([account.may] if vms else [])):
        notes += cloud_checker(job, shell)
    return [*notes, *cost(job)]


def type_and_slices(job: Job) -> Iterator[str]:
    if job.slices < 1:
        raise LaunchError(f"--slices={job.slices}", "use 1 or more")
    yield f"{job.slices} × {job.slice}" if job.slices > 1 else str(job.slice)


def capacity_has_its_limit(job: Job) -> Iterator[str]:
    if job.capacity == "flex-start" and not 0 < (job.hours or 0) <= FLEX_START_HOURS:
        raise LaunchError(
            f"--capacity=flex-start needs a limit of at most {FLEX_START_HOURS} hours, when Google takes it back",
            "pass --max-hours or --budget",
        )
    yield f"capacity {job.capacity}"


def servers_are_whole(job: Job) -> Iterator[str]:
    """Checks that every slice of a job that serves is one host, whose chips one server uses, and who may ask it."""
    if not job.serves_for:
        return
    if job.serves_for == job.name:
        raise LaunchError(f"--serves-for={job.serves_for} is this job itself", f"--name={job.name}-servers")
    if job.slice.hosts > 1:
        raise LaunchError(f"--type={job.type} with --serves-for has several hosts", "take a slice of one host")
    if missing := [name for name in SERVERS_SECRETS if name not in dict(job.secrets)]:
        flags = " ".join(f"--secret={name}=name-in-secret-manager" for name in missing)
        raise LaunchError("--serves-for: other machines ask these servers", f"{flags} (docs/servers.md makes them)")
    if not any(argument.startswith("--weights_from=/") for argument in job.trainer):
        raise LaunchError(
            "--serves-for: weights do not go through a bucket",
            "-- --weights_from=/FOLDER, one that the trainer and all servers have mounted",
        )
    yield f"serves for {job.serves_for}, whose command needs servers.* and secrets as docs/servers.md has them"


def servers_have_jobs_of_their_own(job: Job) -> None:
    """Checks that a job of TPU VMs is one server: its slices are requested, preempted and deleted together."""
    if job.serves_for and job.slices > 1:
        raise LaunchError(
            f"--slices={job.slices} with --serves-for: where one slice is lost or has ended, all are requested anew or "
            "deleted",
            f"without --slices start one job a server, as --name={job.name}-0 and --name={job.name}-1",
        )


def first_hour_has_one_host(job: Job) -> Iterator[str]:
    """Checks that the first hour runs on one host: its steps are commands of one process."""
    if not job.is_first_hour:
        return
    if job.serves_for:
        raise LaunchError("first-hour with --serves-for", "leave out one of them")
    if job.slices > 1 or job.slice.hosts > 1:
        raise LaunchError(f"first-hour on {job.slices} × {job.type}, several hosts", "take --type=v6e-1")
    yield f"the first hour; its report will be in {job.runs}/{job.name}"


def config_fits(job: Job) -> Iterator[str]:
    """Checks that the config resolves, workers have its files, its mesh covers the chips and its batches divide."""
    for argument in job.trainer:
        if argument.startswith(("--config.run.name=", "--config.run.dir=")):
            raise LaunchError(f"{argument}: the launcher sets this field", "use --name and --bucket")
        if argument.startswith("--config.run.overwrite"):
            runs = f"{job.runs}/{job.name}"
            fix = f"take another --name, or gcloud storage mv {runs} {runs}-replaced"
            raise LaunchError(f"{argument}: every restart would start over", fix)
    paths = [a.partition("=")[2].partition(":")[0] for a in job.trainer if a.startswith("--config=")]
    if not paths or not (ROOT / paths[-1]).is_file():
        raise LaunchError(
            f"no config {paths[-1]!r}" if paths else "no --config", "pass -- --config=configs/NAME.py after --"
        )
    if not reach.is_sent(paths[-1]):
        problem = f"git does not track {paths[-1]}, and workers get only what it tracks"
        raise LaunchError(problem, f"git add {paths[-1]}")
    if job.slices < 1:
        return
    if not PYTHON.exists():
        yield "config not checked: there is no .venv here (python3 launch/install.py makes one)"
        return
    slices = 1 if job.serves_for else job.slices  # each is a server by itself
    serves = ("--serves",) if job.serves_for else ()
    done = resolve((*job.config, *serves), job.slice.chips * slices, slices)
    if done.returncode:
        raise LaunchError(f"the config does not resolve: {done.stderr.strip().splitlines()[-1]}")
    resolved = json.loads(done.stdout)
    config = resolved["config"]
    if config["model"]["size"] and not config["model"]["path"]:
        raise LaunchError(
            f"model.size={config['model']['size']} says only shapes, and training starts from weights",
            "pass --config.model.path=OWNER/NAME, as on the Hugging Face hub, or gs://BUCKET/FOLDER",
        )
    if config["run"]["stop_seconds"] >= STOPPED_SECONDS and not job.serves_for:
        raise LaunchError(
            f"run.stop_seconds={config['run']['stop_seconds']:g}: a worker ends {STOPPED_SECONDS} seconds after it is "
            "asked to, saved or not",
            "leave it at 25, and set --config.checkpoint.every=1 where updates take minutes",
        )
    reach.all_is_there(config)
    weights_fit_the_disk(resolved["weights"])
    yield "mesh " + (" × ".join(f"{axis} {n}" for axis, n in resolved["mesh"].items() if n > 1) or "of one chip")
    if job.serves_for:
        return
    yield batches_divide(config, resolved["row_shards"])
    trackers_work(job, config["log"])


def weights_fit_the_disk(copied: dict[str, float]) -> None:
    """Checks that a worker has room for the weights that it copies, by address; checkpoints go to the bucket alone."""
    if (total := sum(copied.values()) / 1e9) > ROOM_GB:
        raise LaunchError(
            f"{' and '.join(copied)}: {total:.0f} GB of weights, and a worker's disk has room for about {ROOM_GB}",
            "pass --config.model.path=/FOLDER, and a teacher's --config.reference.path, that all workers have mounted",
        )


def trackers_work(job: Job, log: dict) -> None:
    """Checks that workers can log as the config asks: the packages are locked, and W&B has its key."""
    asked = [name.strip() for name in (log.get("tracker") or "").split(",") if name.strip()]
    if unknown := [name for name in asked if name not in TRACKERS]:
        raise LaunchError(
            f"log.tracker={unknown[0]}: workers have locked packages alone", f"take {' or '.join(TRACKERS)}"
        )
    if "wandb" in asked and "WANDB_API_KEY" not in dict(job.secrets):
        raise LaunchError(
            "log.tracker=wandb needs a key on the workers", "pass --secret=WANDB_API_KEY=name-in-secret-manager"
        )


def resolve(trainer: tuple[str, ...], chips: int, slices: int) -> subprocess.CompletedProcess:
    """Has the Python of .venv print config, mesh and row shards as JSON: the launcher's Python has no packages."""
    where = [f"--chips={chips}", f"--slices={slices}"]
    command = [str(PYTHON), str(Path(__file__).parent / "resolve.py"), *where, *trainer]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")


def batches_divide(config: dict, shards: int) -> str:
    """Checks that the rows of a batch divide over the shards that the sharding rules make."""
    rollout, train = config["rollout"], config["train"]
    rows = train["microbatch_size"] or rollout["prompts_per_step"] // train["updates_per_step"] * rollout["group_size"]
    if rows % shards:
        field = "train.microbatch_size" if train["microbatch_size"] else "rows of an update"
        raise LaunchError(
            f"{field} = {rows} does not divide over {shards} shards of rows",
            f"make it a multiple of {shards}, or give chips to --config.mesh.tensor",
        )
    return f"{rows} rows over {count(shards, 'shard')}"


def plan_says_it_fits(job: Job) -> Iterator[str]:
    """Has `python -m rpg_jax.plan` compile the programs for these slices and show what fits, days and dollars."""
    if not PYTHON.exists():
        return
    if not tpu_compiler_is_installed():
        yield "plan: not asked; it needs .venv/bin/python -m rpg_jax.plan --get_compiler"
        return
    topology = f"{job.slice.generation}:{job.slice.topology}"
    topology += f"*{job.slices}" if job.slices > 1 else ""
    command = [str(PYTHON), "-m", "rpg_jax.plan", *job.trainer, f"--topology={topology}"]
    if subprocess.run(command, cwd=ROOT, stdout=STDERR).returncode:
        fix = "take a setting that it names, or a larger --type; --no-plan skips this"
        raise LaunchError(f"plan: not on {topology}, for the reason above", fix)
    yield f"plan: fits {topology}; the tables above have its days and dollars at list prices"


def tpu_compiler_is_installed() -> bool:
    """Whether .venv can compile for TPUs."""
    probe = "import sys; from rpg_jax.planning import topologies; sys.exit(topologies.compiler_library() is None)"
    return subprocess.run([str(PYTHON), "-c", probe], cwd=ROOT, capture_output=True).returncode == 0


def type_is_offered(job: Job, shell: Shell) -> Iterator[str]:
    """Checks login, project, API, zone and type with one harmless question."""
    command = ["gcloud", "compute", "tpus", "accelerator-types", "list", *job.place]
    found = shell.ask([*command, f"--filter=type={job.type}", "--format=value(type)"], dry_answer=job.type)
    if job.type not in found.split():
        raise LaunchError(
            f"{job.type} is not offered to project {job.project} in {job.zone}",
            "list zones and their types: gcloud compute tpus locations list, accelerator-types list --zone=ZONE",
        )
    yield f"project {job.project}, zone {job.zone}"


def bucket_is_near(job: Job, shell: Shell) -> Iterator[str]:
    root = "/".join(job.bucket.split("/")[:3])
    command = ["gcloud", "storage", "buckets", "describe", root, "--format=json(location,soft_delete_policy)"]
    try:
        answer = json.loads(shell.ask(command, dry_answer=json.dumps({"location": job.region.upper()})))
        location = answer["location"]
    except CommandError as error:
        if error.kind is Kind.NOT_FOUND:
            fix = f"gcloud storage buckets create {root} --location={job.region} --project={job.project} "
            fix += "--soft-delete-duration=0"
            raise LaunchError(f"bucket {root} does not exist", f"make it: {fix}") from None
        raise
    if location.lower() != job.region and not job.region.startswith(MULTI_REGIONS.get(location, "none")):
        raise LaunchError(
            f"bucket {root} is in {location.lower()}, the TPU in {job.region}: slow checkpoints, paid traffic",
            f"use a bucket in {job.region}",
        )
    yield f"bucket {job.bucket} in {location.lower()}"
    if days := int(answer.get("soft_delete_policy", {}).get("retentionDurationSeconds", 0)) / 86400:
        yield (
            f"{root} keeps every replaced checkpoint for {days:g} days more, which costs (400 steps of a 4B model that "
            f"are all saved: 19 TB); without: gcloud storage buckets update {root} --clear-soft-delete"
        )


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


def cost(job: Job) -> Iterator[str]:
    yield f"costs {job.rate}: {job.cost()[1]}"
    if job.hours:
        yield f"at most ${job.cost()[0] * job.hours:,.0f}: saved, ended and freed {job.hours:.4g} hours from now"
    else:
        yield "no limit: --max-hours=N or --budget=USD saves, ends and frees it"
