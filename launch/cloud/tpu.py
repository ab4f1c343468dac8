"""launch/tpu runs a config on Cloud TPU VMs, from request to teardown."""

from cloud import files, options
from cloud.errors import CommandError, Kind, LaunchError, ignored
from cloud.options import Launch, confirm
from cloud.shell import Shell
from cloud.tpu_vms import UP, WAITING, TpuVms

DESCRIPTION = """Runs a config on Cloud TPU VMs.

  launch/tpu up --type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b -- --config=configs/x.py
"""
COMMANDS = {
    "up": "checks, requests, runs; then brings a preempted TPU back until the run has ended, and deletes it",
    "status": "shows the TPU, its cost, and the command that follows a worker's log",
    "stop": "has the workers save and stop within two minutes; the TPU stays up and costs",
    "delete": "deletes the TPU after asking; runs and checkpoints stay in the bucket",
}
WATCH_SECONDS = 60.0
MAX_RECREATIONS = 50


def main(argv: list[str], shell: Shell | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = options.parser("launch/tpu", DESCRIPTION, COMMANDS)
    parser.add_argument("--give-up-after", help="how long a request may queue, e.g. 12h (default: 30d)")
    return options.run(
        parser, argv, shell, lambda launch: HANDLERS[launch.options.command](launch, TpuVms(launch.job, launch.shell))
    )


def up(launch: Launch, vms: TpuVms) -> None:
    """Requests the TPU unless it is there. Workers look into the bucket when they boot, and then once a minute."""
    options.check(launch, vms=True)
    _send(launch)
    vms.create(launch.staging / "startup.sh")
    launch.shell.report(f"follow it: {vms.log_command}")
    if launch.options.no_watch:
        launch.shell.say("nobody watches: a lost TPU stays lost until launch/tpu up runs again")
    else:
        _watch(launch, vms)


def status(launch: Launch, vms: TpuVms) -> None:
    job = launch.job
    state, reason = vms.state()
    print(f"{job.name}: {state}{f' ({reason})' if reason else ''}, {job.slice}, {job.capacity}")
    if launch.shell.dry_run or state in UP:
        print(f"costs {job.rate}: {job.cost()[1]}\nlog of a worker: {vms.log_command}")
    elif state in WAITING:
        print("costs nothing while it queues")
    print(f"run folder: {job.runs}/{job.name}{' (finished)' if 'finished' in _listed(launch) else ''}")


def stop(launch: Launch, vms: TpuVms) -> None:
    _remove(launch, "run.sh")
    launch.shell.report(
        f"the workers save and stop within two minutes; the TPU costs {launch.job.rate} until launch/tpu delete"
    )


def delete(launch: Launch, vms: TpuVms) -> None:
    job = launch.job
    what = f"{job.name} ({job.slice}, {job.capacity}, {job.rate})"
    confirm(f"delete {what}? Runs stay in {job.bucket}.", launch)
    _remove(launch, "run.sh")  # else an `up` that watches elsewhere would bring it back
    vms.delete()
    launch.shell.report(
        f"deleted; the run stays. Storage still costs: {job.runs}/{job.name} and {job.files} "
        f"(gcloud storage rm --recursive ADDRESS), and {job.bucket}/jax-cache"
    )


def _send(launch: Launch) -> None:
    """Uploads the code, and last the script that workers start as soon as they see it."""
    source, run = files.write(launch.shell, launch.job, launch.staging)
    for name in ("finished", "failed"):
        _remove(launch, name)
    for path in (source, run):
        launch.shell.do(["gcloud", "storage", "cp", "--quiet", str(path), f"{launch.job.files}/"])


def _watch(launch: Launch, vms: TpuVms) -> None:
    """Waits until the run has finished. A lost TPU is requested anew; its startup script resumes the run.

    After a preemption or a stockout it asks again, with growing pauses, up to MAX_RECREATIONS times in a row. A
    cloud that does not answer for a moment is asked again.

    Raises:
      LaunchError: the run was stopped or deleted elsewhere, a worker has given it up, or there is no TPU for it.
    """
    job, shell = launch.job, launch.shell
    shell.say(
        "watching: this command must stay alive, for it alone brings a lost TPU back. On a pod prefer launch/xpk: GKE "
        "restarts and recreates by itself"
    )
    if shell.dry_run:
        print(f"# then every {WATCH_SECONDS:.0f} s, until the first succeeds:")
    recreations, shown = 0, ""
    while True:
        try:
            if _has_finished(launch):
                break
            state, reason = vms.state()
            if shell.dry_run:
                print("# and once it has:")
                break
            if state != shown:
                shell.say(f"{job.name}: {state}")
            shown = state
            if state in UP:
                recreations = 0
            elif state not in WAITING:
                error = vms.failure(state, reason)
                if error.kind not in (Kind.LOST, Kind.STOCKOUT) or recreations == MAX_RECREATIONS:
                    raise error
                pause = min(30.0 * 2**recreations, 900.0)
                recreations += 1
                shell.say(f"{error}; asking again in {pause:.0f} s")
                shell.sleep(pause)
                if _has_finished(launch):  # a worker that finishes deletes the TPU
                    break
                vms.create(launch.staging / "startup.sh")
        except CommandError as error:
            if error.kind is not Kind.TRANSIENT:
                raise
            shell.say(f"{error}; looking again in {WATCH_SECONDS:.0f} s")
        shell.sleep(WATCH_SECONDS)
    shell.report(f"finished: {job.runs}/{job.name}")
    if job.keep:
        shell.say(f"kept: the TPU still costs {job.rate} until launch/tpu delete")
        return
    vms.delete()  # the first worker tries so too, if nobody watches
    shell.report("deleted the TPU (--keep would have kept it); the run stays in the bucket")


def _has_finished(launch: Launch) -> bool:
    """Whether the run has finished.

    Raises:
      LaunchError: a worker has given up the run, and deleted the TPU unless --keep was given; or it was stopped or
        deleted elsewhere.
    """
    there = _listed(launch)
    if "finished" in there or launch.shell.dry_run:
        return "finished" in there
    if "failed" in there:
        reason = launch.shell.ask(["gcloud", "storage", "cat", f"{launch.job.files}/failed"]).strip()
        kept = f"; the TPU costs {launch.job.rate} until launch/tpu delete" if launch.job.keep else ""
        raise LaunchError(
            f"the run has failed: {reason}{kept}", f"read {launch.job.files}/logs; launch/tpu up continues the run"
        )
    if "run.sh" not in there:
        raise LaunchError(f"{launch.job.name} was stopped or deleted elsewhere", "launch/tpu up continues the run")
    return False


def _listed(launch: Launch) -> set[str]:
    """Names of the launch's files in the bucket; in a dry run there are none."""
    with ignored(Kind.NOT_FOUND):
        found = launch.shell.ask(["gcloud", "storage", "ls", f"{launch.job.files}/"])
        return {address.rpartition("/")[2] for address in found.split()}
    return set()


def _remove(launch: Launch, name: str) -> None:
    with ignored(Kind.NOT_FOUND):
        launch.shell.do(["gcloud", "storage", "rm", "--quiet", f"{launch.job.files}/{name}"])


HANDLERS = {f.__name__: f for f in (up, status, stop, delete)}
