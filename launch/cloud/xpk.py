"""launch/xpk runs a config on Google Kubernetes Engine through XPK 1.16 (clusters, queues, JobSets)."""

import hashlib
import json
import shlex

from cloud import files, options
from cloud.errors import Kind, LaunchError, ignored
from cloud.options import Launch, confirm
from cloud.shell import Shell

DESCRIPTION = """Runs a config on Cloud TPU under GKE, through XPK.

  launch/xpk up --cluster=mine --type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b -- --config=configs/x.py
"""
COMMANDS = {
    "up": "checks, makes the cluster unless it is there, builds and pushes the image, submits the workload and waits;\n"
    "           then deletes the cluster that it made, and keeps one that was there",
    "status": "shows the workload and the cost of the cluster",
    "stop": "saves and removes the workload; the cluster stays up and costs",
    "delete": "deletes the cluster after asking; runs and checkpoints stay in the bucket",
}
GRACE_SECONDS = 60
MAX_RESTARTS = 20  # of the workload, after failures or preemptions
RESTART_ON = (1, 75)
"""An exception (a lost peer is one) and a stall, as in rpg_jax/runs/processes.py; XPK adds signals, 127 to 255."""
MONTH = 30 * 24 * 3600


def main(argv: list[str], shell: Shell | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = options.parser("launch/xpk", DESCRIPTION, COMMANDS)
    parser.add_argument("--cluster", help="GKE cluster (default: the run's name)")
    parser.add_argument("--image", help="default: an image of this commit in the region's Artifact Registry")
    parser.add_argument("--reservation", help="the reservation's name, for --capacity=reserved")
    return options.run(parser, argv, shell, lambda launch: HANDLERS[launch.options.command](launch))


def up(launch: Launch) -> None:
    capacity = _capacity(launch)
    options.check(launch, vms=False)
    is_new, failure = _make_cluster(launch, capacity), None
    try:
        _submit(launch)
        if not launch.options.no_watch:
            until = [f"--wait-for-job-completion={launch.job.name}", f"--timeout={MONTH}"]
            launch.shell.do(["xpk", "workload", "list", *_cluster(launch), *until])
    except LaunchError as error:  # nothing was submitted, the workload has failed, or the command that waits has
        failure = error
    if is_new and not launch.job.keep and not launch.options.no_watch and not _exists(launch):
        _delete(launch)
    else:
        launch.shell.report(f"the cluster still costs {launch.job.rate} until launch/xpk delete")
    if failure is not None:
        raise failure


def _make_cluster(launch: Launch, capacity: str) -> bool:
    """Makes the cluster; returns whether it is new. A cluster that exists is left as it is: it may be shared.

    XPK adds node pools to a cluster that exists, and deletes those of another type; with --quiet it does not ask.
    """
    job = launch.job
    command = ["gcloud", "container", "clusters", "describe", _name(launch), *_region(launch), "--format=value(name)"]
    with ignored(Kind.NOT_FOUND):
        if launch.shell.ask(command):
            launch.shell.say(f"cluster {_name(launch)} exists: left as it is; XPK says whether the workload fits it")
            return False
    command = ["xpk", "cluster", "create", *_cluster(launch), f"--tpu-type={job.type}", f"--num-slices={job.slices}"]
    command += [capacity, "--enable-workload-identity"]
    command += [f"--custom-cluster-arguments=--network={job.network}"] if job.network else []
    launch.shell.do([*command, "--quiet"])
    return True


def _submit(launch: Launch) -> None:
    """`xpk workload create`. XPK replaces the image's entry point by its own, so the command names ours."""
    job, shell = launch.job, launch.shell
    if _exists(launch):
        shell.report(f"{job.name} is submitted already (launch/xpk stop removes it)")
        return
    if not launch.options.image:
        _build(launch)
    command = ["exec", "/rpg/.venv/bin/python", "/rpg/launch/cloud/supervise.py", *job.supervised]
    create = ["xpk", "workload", "create", *_cluster(launch), f"--workload={job.name}", f"--tpu-type={job.type}"]
    create += [f"--num-slices={job.slices}", f"--docker-image={_image(launch)}", f"--command={shlex.join(command)}"]
    create += [f"--max-restarts={MAX_RESTARTS}", f"--termination-grace-period-seconds={GRACE_SECONDS}"]
    create += [f"--restart-on-exit-codes={','.join(map(str, RESTART_ON))}"]
    launch.staging.mkdir(parents=True, exist_ok=True)
    shell.do([*create, f"--output-manifest-file={launch.staging / 'jobset.yaml'}"])
    pods = f"--selector=jobset.sigs.k8s.io/jobset-name={job.name} --max-log-requests=1000"
    shell.report(f"submitted; follow it: kubectl logs --follow --prefix {pods}")


def _build(launch: Launch) -> None:
    """Builds the image and pushes it into the region's registry, which it makes where there is none."""
    job, shell, image = launch.job, launch.shell, _image(launch)
    registry = ["rpg", f"--location={job.region}", f"--project={job.project}"]
    with ignored(Kind.EXISTS):
        create = ["gcloud", "artifacts", "repositories", "create", *registry]
        shell.do([*create, "--repository-format=docker", "--quiet"])
    shell.do(["gcloud", "auth", "configure-docker", image.partition("/")[0], "--quiet"])
    context = files.image_context(shell, launch.staging)  # not the folder itself, where keys may lie
    build = ["docker", "build", f"--file={context / 'launch' / 'gke' / 'Dockerfile'}", "--platform=linux/amd64"]
    shell.do([*build, f"--build-arg=COMMIT={files.commit()}", f"--tag={image}", str(context)])
    shell.do(["docker", "push", image])


def status(launch: Launch) -> None:
    workload = ["xpk", "workload", "list", *_cluster(launch), f"--filter-by-job={launch.job.name}"]
    print(launch.shell.ask(workload), end="")
    print(f"while its nodes are up the cluster costs {launch.job.rate}: {launch.job.cost()[1]}")
    print(f"run folder: {launch.job.runs}/{launch.job.name}")


def stop(launch: Launch) -> None:
    launch.shell.do(["xpk", "workload", "delete", *_cluster(launch), f"--workload={launch.job.name}", "--force"])
    launch.shell.report(f"stopped; the cluster is still up and costs {launch.job.rate} until launch/xpk delete")


def delete(launch: Launch) -> None:
    job = launch.job
    confirm(f"delete cluster {_name(launch)}: {job.slices} × {job.slice}, {job.rate}?", launch)
    _delete(launch)


def _delete(launch: Launch) -> None:
    job = launch.job
    try:
        with ignored(Kind.NOT_FOUND):
            launch.shell.do(["xpk", "cluster", "delete", *_cluster(launch), "--force"])
    except LaunchError:
        launch.shell.say(f"the cluster is still there and costs {job.rate}")
        raise
    launch.shell.report(
        f"deleted; the run stays. Storage still costs: {job.runs}/{job.name} (gcloud storage rm --recursive ADDRESS), "
        f"{job.bucket}/jax-cache, and the image {_image(launch)}"
    )


def _exists(launch: Launch) -> bool:
    """Whether a workload of this name is queued or running; XPK would refuse the name."""
    if launch.shell.dry_run:
        return False
    launch.shell.ask(["gcloud", "container", "clusters", "get-credentials", _name(launch), *_region(launch)])
    found = launch.shell.ask(["kubectl", "get", "jobset", launch.job.name, "--ignore-not-found", "--output=json"])
    status = json.loads(found).get("status", {}) if found.strip() else {}
    ended = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"}
    return bool(found.strip()) and not ended & {"Completed", "Failed"}


def _capacity(launch: Launch) -> str:
    if launch.job.service_account or launch.job.internal_ips:
        problem = "--service-account and --internal-ips: pods have the account and the addresses of the cluster"
        raise LaunchError(problem, "leave them out")
    if launch.job.capacity == "reserved":
        if not launch.job.reservation:
            raise LaunchError("--capacity=reserved needs the reservation's name", "pass --reservation=NAME")
        return f"--reservation={launch.job.reservation}"
    if launch.job.capacity == "flex-start":
        raise LaunchError("--capacity=flex-start is a queued resource, which a cluster does not have", "use launch/tpu")
    return f"--{launch.job.capacity}"


def _name(launch: Launch) -> str:
    return launch.job.cluster or launch.job.name


def _cluster(launch: Launch) -> list[str]:
    return [f"--cluster={_name(launch)}", *launch.job.place]


def _region(launch: Launch) -> list[str]:
    return [f"--region={launch.job.region}", f"--project={launch.job.project}"]


def _image(launch: Launch) -> str:
    job, commit = launch.job, files.commit()
    tag = commit[:12]
    if commit.endswith("-dirty"):  # each edit has an image: an earlier run at this commit keeps its own
        tag += f"-{hashlib.sha256(files.source_archive()).hexdigest()[:12]}"
    return launch.options.image or f"{job.region}-docker.pkg.dev/{job.project}/rpg/rpg:{tag}"


HANDLERS = {f.__name__: f for f in (up, status, stop, delete)}
