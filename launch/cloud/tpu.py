"""launch/tpu: a config on Cloud TPU VMs, from request to teardown."""

from __future__ import annotations

import itertools
import re
import sys

from cloud import accelerators, files, options, preflight
from cloud.errors import CommandError, Kind, LaunchError
from cloud.options import Launch, confirm
from cloud.pod import ABSENT, UP, WAITING, Pod
from cloud.shell import Shell

DESCRIPTION = """Runs a config on Cloud TPU VMs.

  launch/tpu up --type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b -- --config=configs/x.py
"""
COMMANDS = {
    "up": "all of it: create, wait, setup, run; then brings a preempted TPU back until the run has finished",
    "create": "checks everything, uploads the code and requests the TPU",
    "wait": "until the TPU is up",
    "setup": "installs on all workers",
    "run": "trains on all workers, in the background; continues where the run of this name was",
    "logs": "follows the log of one worker (--worker, --slice)",
    "status": "of the TPU and of each worker, and what it costs",
    "ssh": "a shell on one worker, or what follows -- as a command",
    "stop": "saves and stops the training; the TPU stays, and costs",
    "delete": "the TPU, after asking; runs and checkpoints stay in the bucket",
    "types": "lists the accelerator types",
}
WATCH_SECONDS = 60.0
VISIT_EVERY = 10  # looks at the TPU's state to one at its workers


def main(argv: list[str], shell: Shell | None = None) -> int:
    """Runs one command; user errors are one line each and exit code 1."""
    parser = options.parser("launch/tpu", DESCRIPTION, COMMANDS)
    parser.add_argument("--direct", action="store_true", default=None, help="create the VM at once instead of queueing")
    parser.add_argument("--valid-for", help="how long a request may queue (default 24h)")
    parser.add_argument("--worker", default="0", help="for logs and ssh: number of the host in its slice, or all")
    parser.add_argument(
        "--slice", type=int, default=0, dest="slice_number", help="for logs and ssh: number of the slice"
    )
    parser.add_argument("--no-watch", action="store_true", help="up: return once the run has started")
    parser.add_argument("--max-recreations", type=int, default=50, help="up: how often a lost TPU is requested again")
    if argv[:1] == ["types"]:
        print(accelerators.table())
        return 0
    try:
        launch = options.parse(parser, argv, shell)
        HANDLERS[launch.options.command](launch, Pod(launch.job, launch.shell))
    except LaunchError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted here; in the cloud everything goes on (launch/tpu status, stop, delete)", file=sys.stderr)
        return 130
    return 0


def create(launch: Launch, pod: Pod) -> None:
    _checked(launch)
    _send(launch, training=False)
    pod.create(launch.staging / "startup.sh")


def wait(launch: Launch, pod: Pod) -> None:
    pod.wait(launch.options.timeout)


def setup(launch: Launch, pod: Pod) -> None:
    pod.on_all_workers(_on_worker(launch, "setup"))
    launch.shell.report("installed on all workers")


def run(launch: Launch, pod: Pod) -> None:
    _checked(launch)
    _send(launch, training=True)
    _start(launch, pod)


def up(launch: Launch, pod: Pod) -> None:
    _checked(launch)
    _send(launch, training=True)
    _bring_up(launch, pod)
    setup(launch, pod)
    _start(launch, pod)
    if not launch.options.no_watch:
        _watch(launch, pod)


def logs(launch: Launch, pod: Pod) -> None:
    launch.shell.follow(pod.ssh_command(_node(launch), launch.options.worker, "sudo tail -n 200 -F /var/log/rpg.log"))


def ssh(launch: Launch, pod: Pod) -> None:
    command = " ".join(launch.options.after) or None
    launch.shell.follow(pod.ssh_command(_node(launch), launch.options.worker, command))


def status(launch: Launch, pod: Pod) -> None:
    job = launch.job
    state, reason = pod.state()
    print(f"{job.name}: {state}{f' ({reason})' if reason else ''}, {job.slice}, {job.capacity}")
    if launch.shell.dry_run or state in UP:
        print(pod.on_all_workers(_on_worker(launch, "status"), tries=1), end="")
        dollars, source = job.cost()
        print(f"costs about ${dollars:.2f} an hour: {source}")
    elif state in WAITING:
        print("costs nothing while it queues")
    print(f"run folder: {job.runs}/{job.name}{' (finished)' if _is_there(launch, 'finished') else ''}")


def stop(launch: Launch, pod: Pod) -> None:
    _remove(launch, "run.sh")  # else the next boot would start it again
    pod.on_all_workers(_on_worker(launch, "stop"))
    dollars, _ = launch.job.cost()
    launch.shell.report(f"stopped; the TPU is still up and costs about ${dollars:.2f} an hour until launch/tpu delete")


def delete(launch: Launch, pod: Pod) -> None:
    job = launch.job
    dollars, _ = job.cost()
    confirm(
        f"delete {job.name} ({job.slice}, {job.capacity}, about ${dollars:.2f} an hour)? Runs stay in {job.bucket}.",
        launch,
    )
    try:
        _remove(launch, "run.sh")  # else an `up` that watches elsewhere would bring it back
        pod.delete()
        left = pod.state()[0] if not launch.shell.dry_run else ABSENT
    except CommandError as error:
        raise LaunchError(f"{error}\n{job.name} is still there and costs about ${dollars:.2f} an hour") from None
    if left != ABSENT:
        launch.shell.say(f"{job.name} is still {left}; look again with launch/tpu status")
    launch.shell.report(
        f"deleted; the run stays. Storage still costs: {job.runs}/{job.name} and {job.files} "
        f"(gcloud storage rm --recursive ADDRESS), and {job.bucket}/jax-cache"
    )


def _checked(launch: Launch) -> None:
    needs_trainer = bool(launch.job.trainer) or launch.options.command != "create"
    for note in preflight.check(launch.job, launch.shell, plan=not launch.options.no_plan, trainer=needs_trainer):
        launch.shell.say(f"  {note}")
    if not launch.shell.dry_run:
        launch.job.save(launch.staging / "job.json")


def _send(launch: Launch, training: bool) -> None:
    """Uploads the code and the scripts; with run.sh there, every boot trains."""
    written = files.write(launch.shell, launch.job, launch.staging)
    chosen = written if training else [path for path in written if path.name != "run.sh"]
    launch.shell.do(["gcloud", "storage", "cp", "--quiet", *map(str, chosen), f"{launch.job.files}/"])
    if training:
        _remove(launch, "finished")


def _bring_up(launch: Launch, pod: Pod) -> None:
    """Requests the TPU until it is up: again when preempted or out of stock, with growing pauses, up to the cap."""
    for recreation in range(launch.options.max_recreations + 1):
        try:
            pod.create(launch.staging / "startup.sh")
            return pod.wait(launch.options.timeout)
        except LaunchError as error:
            if error.kind not in (Kind.LOST, Kind.STOCKOUT) or recreation == launch.options.max_recreations:
                raise
            pause = min(30.0 * 2**recreation, 900.0)
            launch.shell.say(f"{error}; asking again in {pause:.0f} s")
            launch.shell.sleep(pause)
            _still_wanted(launch)


def _start(launch: Launch, pod: Pod) -> None:
    """All workers or none: where some do not start, the others would wait for them for ever."""
    try:
        pod.on_all_workers(_on_worker(launch, "run"))
    except LaunchError as error:
        launch.shell.say("not all workers started: stopping the others")
        try:
            pod.on_all_workers(_on_worker(launch, "stop"), tries=1)
        except LaunchError as second:
            launch.shell.say(str(second))
        raise error
    launch.shell.report(f"running; follow it: launch/tpu logs --name={launch.job.name}")


def _watch(launch: Launch, pod: Pod) -> None:
    """Until the run has finished: a TPU that is lost is requested anew, and its startup script resumes the run.

    Raises:
      LaunchError: the run was stopped or deleted elsewhere, or a worker has given it up.
    """
    if launch.shell.dry_run:
        print(f"# then every {WATCH_SECONDS:.0f} s, until the first succeeds:")
    looks = itertools.count(1)
    while not _is_there(launch, "finished"):
        _still_wanted(launch)
        state, reason = pod.state()
        if launch.shell.dry_run:
            return
        if state not in UP:
            launch.shell.say(f"{launch.job.name} is {state}{f' ({reason})' if reason else ''}")
            _bring_up(launch, pod)
        elif next(looks) % VISIT_EVERY == 0:
            _all_at_work(launch, pod)
        launch.shell.sleep(WATCH_SECONDS)
    dollars, _ = launch.job.cost()
    launch.shell.say(f"finished: {launch.job.runs}/{launch.job.name}")
    launch.shell.say(f"the TPU still costs about ${dollars:.2f} an hour until launch/tpu delete")


def _still_wanted(launch: Launch) -> None:
    if not _is_there(launch, "run.sh") and not launch.shell.dry_run:
        raise LaunchError(f"{launch.job.name} was stopped or deleted elsewhere", "launch/tpu up continues the run")


def _all_at_work(launch: Launch, pod: Pod) -> None:
    """Raises LaunchError where the trainer failed too often to be started again: nothing else ends the waiting."""
    try:
        said = pod.on_all_workers(_on_worker(launch, "status"), tries=1)
    except LaunchError:
        return  # out of reach for now; what is lost shows in its state
    if gave_up := re.findall(r"^worker \d+: failed: .*$", said, re.MULTILINE):
        dollars, _ = launch.job.cost()
        raise LaunchError(
            f"the run has failed; {gave_up[0]}",
            f"look: launch/tpu logs --name={launch.job.name}, then up again; the TPU costs about ${dollars:.2f} an "
            "hour until launch/tpu delete",
        )


def _is_there(launch: Launch, name: str) -> bool:
    """Whether a file of the launch is in the bucket; nothing is in a dry run."""
    try:
        launch.shell.ask(["gcloud", "storage", "ls", f"{launch.job.files}/{name}"])
    except CommandError as error:
        if error.kind is not Kind.NOT_FOUND:
            raise
        return False
    return not launch.shell.dry_run


def _remove(launch: Launch, name: str) -> None:
    try:
        launch.shell.do(["gcloud", "storage", "rm", "--quiet", f"{launch.job.files}/{name}"])
    except CommandError as error:
        if error.kind is not Kind.NOT_FOUND:
            raise


def _on_worker(launch: Launch, what: str) -> str:
    """A file first: a script piped into bash is eaten by the first of its commands that reads its input."""
    script = "rpg-startup.sh"
    return f"gcloud storage cp --quiet {launch.job.files}/startup.sh {script} && sudo bash {script} {what}"


def _node(launch: Launch) -> str:
    nodes = launch.job.nodes
    if not 0 <= launch.options.slice_number < len(nodes):
        raise LaunchError(f"--slice={launch.options.slice_number}", f"there are slices 0 to {len(nodes) - 1}")
    return nodes[launch.options.slice_number]


HANDLERS = {f.__name__: f for f in (up, create, wait, setup, run, logs, status, ssh, stop, delete)}
