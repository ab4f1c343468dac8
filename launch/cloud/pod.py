"""The life of a TPU: queued, created, lost, found again, deleted; and commands on all of its workers."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cloud.errors import CommandError, Kind, LaunchError, classify
from cloud.job import Job
from cloud.shell import FIXES, Shell

QUEUES = ["gcloud", "compute", "tpus", "queued-resources"]
NODES = ["gcloud", "compute", "tpus", "tpu-vm"]

WAITING = {"ACCEPTED", "CREATING", "WAITING_FOR_RESOURCES", "PROVISIONING", "STARTING", "REPAIRING", "RESTARTING"}
UP = {"ACTIVE", "READY"}
LOST = {"SUSPENDED", "SUSPENDING", "PREEMPTED", "TERMINATED", "STOPPED", "STOPPING"}
ABSENT = "ABSENT"


class Pod:
    """The TPU of one job, whether it exists or not."""

    def __init__(self, job: Job, shell: Shell):
        self.job, self.shell = job, shell
        self._interrupted = False

    def create_command(self, startup: Path) -> list[str]:
        job, generation = self.job, self.job.slice.generation
        if job.direct:
            command = [*NODES, "create", job.name, *job.place, f"--version={generation.runtime}"]
        else:
            command = [*QUEUES, "create", job.name, *job.place, f"--runtime-version={generation.runtime}"]
            command += [f"--node-id={job.name}"] if job.slices == 1 else [f"--node-count={job.slices}"]
            command += [f"--node-prefix={job.name}"] if job.slices > 1 else []
            command += [f"--valid-until-duration={job.valid_for}"]
        command += [f"--accelerator-type={job.type}", f"--metadata-from-file=startup-script={startup}"]
        command += {"spot": ["--spot"], "reserved": ["--reserved"], "on-demand": []}[job.capacity]
        command += [f"--service-account={job.service_account}"] if job.service_account else []
        command += [f"--network={job.network}"] if job.network else []
        command += ["--internal-ips"] if job.internal_ips else []
        command += [] if job.direct else ["--async"]  # a queue answers at once; a direct request says what it lacks
        return [*command, f"--labels=rpg-run={job.name}", "--quiet"]

    def state(self) -> tuple[str, str]:
        """(state, reason) of the queued resource, or of a VM under it that is worse; ABSENT where there is none."""
        job = self.job
        if not job.direct:
            described = self._describe(QUEUES, job.name)
            if described is None:
                return ABSENT, ""
            state = described.get("state", {}).get("state", "UNKNOWN")
            if state != "ACTIVE":
                failed = described.get("state", {}).get("failedData", {}).get("error", {})
                return state, failed.get("message", "")
        for node in job.nodes:
            described = self._describe(NODES, node)
            if described is None:
                return (ABSENT, "") if job.direct else ("SUSPENDED", f"{node} is gone")
            if described.get("state") not in UP:
                return described.get("state", "UNKNOWN"), f"{node}: {described.get('healthDescription', '')}".strip(
                    ": "
                )
        return "ACTIVE", ""

    def create(self, startup: Path) -> None:
        """Requests the TPU unless it is there; one that was preempted or failed makes room for a new request."""
        state, reason = self.state() if not self.shell.dry_run else (ABSENT, "")
        if state in UP | WAITING:
            self._is_what_was_asked()
            self.shell.say(f"{self.job.name} exists ({state})")
            return
        if state != ABSENT:
            self.shell.say(f"{self.job.name} is {state}{f' ({reason})' if reason else ''}: requesting it anew")
            self.delete()
        try:
            self.shell.do(self.create_command(startup))
        except CommandError as error:
            if error.kind is not Kind.EXISTS:  # another start of the same command was faster
                raise

    def wait(self, timeout: float, poll: float = 20.0) -> None:
        """Returns when the TPU is up.

        Raises:
          LaunchError: it failed, was lost, was never requested, or is not up in time.
        """
        if self.shell.dry_run:
            self.state()
            return
        begun, shown = time.monotonic(), ""
        while True:
            state, reason = self.state()
            if state in UP:
                self.shell.say(f"{self.job.name} is up after {time.monotonic() - begun:.0f} s")
                return
            if state not in WAITING:
                raise self._why_not(state, reason)
            if state != shown:
                self.shell.say(f"{self.job.name}: {state} …")
                shown = state
            if time.monotonic() - begun > timeout:
                raise LaunchError(
                    f"{self.job.name} is still {state} after {timeout:.0f} s",
                    "it stays in the queue: wait again, or delete it",
                )
            self.shell.sleep(poll)

    def on_all_workers(self, command: str, tries: int = 3) -> str:
        """Runs a command on every worker of every slice and returns what they said.

        A worker counts as reached when it printed `worker N done` or `worker N: …`. Those that did not are tried again,
        by number; LaunchError names the ones that stay silent.
        """
        with ThreadPoolExecutor(1 if self.shell.dry_run else 8) as pool:
            try:
                return "".join(pool.map(lambda node: self._on_node(node, command, tries), self.job.nodes))
            except KeyboardInterrupt:
                self._interrupted = True  # only this thread hears of it, and the others would go on trying
                raise

    def delete(self) -> None:
        """Deletes the TPU; one that is gone already is fine."""
        if self.job.direct:
            commands = [[*NODES, "delete", self.job.name, *self.job.place, "--quiet"]]
        else:
            commands = [[*QUEUES, "delete", self.job.name, *self.job.place, "--force", "--quiet"]]
        for command in commands:
            try:
                self.shell.do(command)
            except CommandError as error:
                if error.kind is not Kind.NOT_FOUND:
                    raise

    def ssh_command(self, node: str, worker: str, command: str | None = None) -> list[str]:
        ssh = [*NODES, "ssh", node, *self.job.place, f"--worker={worker}", "--quiet"]
        ssh += ["--internal-ip"] if self.job.internal_ips else []
        return ssh if command is None else [*ssh, f"--command={command}"]

    def _on_node(self, node: str, command: str, tries: int) -> str:
        if self.shell.dry_run:
            return self.shell.do(self.ssh_command(node, "all", command))
        missing, said, stderr = set(range(self.job.slice.hosts)), "", ""
        for attempt in range(1, tries + 1):
            everyone = len(missing) == self.job.slice.hosts
            for worker in ["all"] if everyone else map(str, sorted(missing)):
                _, stdout, stderr = self.shell.attempt(self.ssh_command(node, worker, command))
                said += stdout
                missing -= {int(n) for n in re.findall(r"^worker (\d+)(?: done|:)", stdout, re.MULTILINE)}
            if not missing:
                return said
            error = CommandError(self.ssh_command(node, "all"), stderr)
            if error.kind in (Kind.LOGIN, Kind.PERMISSION, Kind.NOT_FOUND):
                raise CommandError(
                    self.ssh_command(node, "all"), stderr, FIXES.get(error.kind, "is it up? launch/tpu status")
                )
            if self._interrupted:
                break
            if attempt < tries:
                self.shell.say(
                    f"{node}: no answer from worker {_listed(missing)}; trying again ({attempt}/{tries - 1})"
                )
                self.shell.sleep(10.0 * attempt)
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")
        raise LaunchError(
            f"{node}: worker {_listed(missing)} of {self.job.slice.hosts} failed {tries} times: {last}",
            f"look: launch/tpu ssh --name={self.job.name} --worker={min(missing)}, then sudo tail /var/log/syslog",
        )

    def _describe(self, family: list[str], name: str) -> dict | None:
        try:
            answer = self.shell.ask([*family, "describe", name, *self.job.place, "--format=json"], dry_answer="{}")
        except CommandError as error:
            if error.kind is Kind.NOT_FOUND:
                return None
            raise
        return json.loads(answer or "{}")

    def _is_what_was_asked(self) -> None:
        if self.job.direct:
            existing = [self._describe(NODES, self.job.name) or {}]
        else:
            specs = (self._describe(QUEUES, self.job.name) or {}).get("tpu", {}).get("nodeSpec", [])
            existing = [spec.get("node", {}) for spec in specs]
        types = {node["acceleratorType"].rpartition("/")[2] for node in existing if node.get("acceleratorType")}
        if types - {self.job.type}:
            raise LaunchError(
                f"{self.job.name} exists as {', '.join(types)}, not {self.job.type}",
                "delete it first or take another --name",
            )

    def _why_not(self, state: str, reason: str) -> LaunchError:
        said = f"{self.job.name} is {state}" + (f": {reason}" if reason else "")
        if state == ABSENT:
            return LaunchError(f"{self.job.name} does not exist in {self.job.zone}", "create it: launch/tpu create")
        if state in LOST:
            return LaunchError(said, "launch/tpu up requests it anew and the run resumes", Kind.LOST)
        kind = classify(reason)
        return LaunchError(said, FIXES.get(kind, "delete it and create it again"), kind)


def _listed(workers: set[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
