"""Requests, watches and deletes the TPU VMs of a job, and runs commands on all of their workers."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cloud.errors import CommandError, Kind, LaunchError, classify, ignored
from cloud.job import Job
from cloud.shell import FIXES, Shell

QUEUED_RESOURCES = ["gcloud", "compute", "tpus", "queued-resources"]
TPU_VM = ["gcloud", "compute", "tpus", "tpu-vm"]

WAITING = {"ACCEPTED", "CREATING", "WAITING_FOR_RESOURCES", "PROVISIONING", "STARTING", "REPAIRING", "RESTARTING"}
UP = {"ACTIVE", "READY"}
LOST = {"SUSPENDED", "SUSPENDING", "PREEMPTED", "TERMINATED", "STOPPED", "STOPPING"}
ABSENT = "ABSENT"


class TpuVms:
    """The TPU VMs of one job, one for each slice; they need not exist. A worker is one host of a TPU VM."""

    def __init__(self, job: Job, shell: Shell):
        self.job, self.tpu, self.shell = job, job.tpu, shell
        self._interrupted = False

    def create_command(self, startup: Path) -> list[str]:
        name, tpu, runtime = self.job.name, self.tpu, self.tpu.slice.generation.runtime
        alpha = ["alpha"] if tpu.capacity == "flex-start" else []
        command = ["gcloud", *alpha, *QUEUED_RESOURCES[1:], "create", name, *tpu.place, f"--runtime-version={runtime}"]
        command += [f"--node-id={name}"] if tpu.slices == 1 else [f"--node-count={tpu.slices}"]
        command += [f"--node-prefix={name}"] if tpu.slices > 1 else []
        command += [f"--valid-until-duration={tpu.valid_for}"]
        command += [f"--accelerator-type={tpu.type}", f"--metadata-from-file=startup-script={startup}"]
        flex = ["--provisioning-model=flex-start", f"--max-run-duration={3600 * (self.job.hours or 0):.0f}s"]
        command += {"spot": ["--spot"], "reserved": ["--reserved"], "flex-start": flex}.get(tpu.capacity, [])
        command += [f"--service-account={tpu.service_account}"] if tpu.service_account else []
        command += [f"--network={tpu.network}"] if tpu.network else []
        command += ["--internal-ips"] if tpu.internal_ips else []
        return [*command, "--async", f"--labels=rpg-run={name}", "--quiet"]

    def state(self) -> tuple[str, str]:
        """(state, reason) of the queued resource, or of a TPU VM in it that is not up; ABSENT if there is none."""
        described = self._describe(QUEUED_RESOURCES, self.job.name)
        if described is None:
            return ABSENT, ""
        state = described.get("state", {}).get("state", "UNKNOWN")
        if state != "ACTIVE":
            failed = described.get("state", {}).get("failedData", {}).get("error", {})
            return state, failed.get("message", "")
        for vm in self.job.vms:
            described = self._describe(TPU_VM, vm)
            if described is None:
                return "SUSPENDED", f"{vm} is gone"
            if (state := described.get("state", "UNKNOWN")) not in UP:
                return state, f"{vm}: {described.get('healthDescription', '')}".strip(": ")
        return "ACTIVE", ""

    def create(self, startup: Path) -> None:
        """Requests the TPU unless it is there; deletes a preempted or failed TPU first."""
        state, reason = self.state() if not self.shell.dry_run else (ABSENT, "")
        if state in UP | WAITING:
            self._check_type()
            self.shell.say(f"{self.job.name} exists ({state})")
            return
        if state != ABSENT:
            self.shell.say(f"{self.job.name} is {state}{f' ({reason})' if reason else ''}: requesting it anew")
            self.delete()
        with ignored(Kind.EXISTS):  # another start of the same command was faster
            self.shell.do(self.create_command(startup))

    def wait(self, timeout: float, poll: float = 20.0) -> None:
        """Returns when the TPU is up.

        Raises:
          LaunchError: the TPU failed, was lost, was never requested, or is not up in time.
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
                raise self._failure(state, reason)
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
        """Runs a command on every worker of every slice and returns what they printed.

        A worker was reached if it printed `worker N done` or `worker N: …`. The others are tried again, by number.

        Raises:
          LaunchError: some workers stay silent; the message has their numbers.
        """
        with ThreadPoolExecutor(1 if self.shell.dry_run else 8) as pool:
            try:
                return "".join(pool.map(lambda vm: self._on_workers(vm, command, tries), self.job.vms))
            except KeyboardInterrupt:
                self._interrupted = True  # only this thread gets it: without the flag the others would try again
                raise

    def delete(self) -> None:
        """Deletes the TPU; it may be gone already."""
        with ignored(Kind.NOT_FOUND):
            self.shell.do([*QUEUED_RESOURCES, "delete", self.job.name, *self.tpu.place, "--force", "--quiet"])

    def ssh_command(self, vm: str, worker: str, command: str | None = None) -> list[str]:
        ssh = [*TPU_VM, "ssh", vm, *self.tpu.place, f"--worker={worker}", "--quiet"]
        ssh += ["--internal-ip"] if self.tpu.internal_ips else []
        return ssh if command is None else [*ssh, f"--command={command}"]

    def _on_workers(self, vm: str, command: str, tries: int) -> str:
        if self.shell.dry_run:
            return self.shell.do(self.ssh_command(vm, "all", command))
        workers = self.tpu.slice.hosts
        missing, said, stderr = set(range(workers)), "", ""
        for attempt in range(1, tries + 1):
            for worker in ["all"] if len(missing) == workers else map(str, sorted(missing)):
                _, stdout, stderr = self.shell.attempt(self.ssh_command(vm, worker, command))
                said += stdout
                missing -= {int(n) for n in re.findall(r"^worker (\d+)(?: done|:)", stdout, re.MULTILINE)}
            if not missing:
                return said
            kind = classify(stderr)
            if kind in (Kind.LOGIN, Kind.PERMISSION, Kind.NOT_FOUND):
                raise CommandError(self.ssh_command(vm, "all"), stderr, FIXES.get(kind, "is it up? launch/tpu status"))
            if self._interrupted:
                break
            if attempt < tries:
                self.shell.say(f"{vm}: no answer from worker {_listed(missing)}; trying again ({attempt}/{tries - 1})")
                self.shell.sleep(10.0 * attempt)
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")
        raise LaunchError(
            f"{vm}: worker {_listed(missing)} of {workers} failed {tries} times: {last}",
            f"look: launch/tpu ssh --name={self.job.name} --worker={min(missing)}, then sudo tail /var/log/syslog",
        )

    def _describe(self, family: list[str], name: str) -> dict | None:
        with ignored(Kind.NOT_FOUND):
            answer = self.shell.ask([*family, "describe", name, *self.tpu.place, "--format=json"], dry_answer="{}")
            return json.loads(answer or "{}")
        return None

    def _check_type(self) -> None:
        """Raises LaunchError if the TPU of this name is of another type."""
        specs = (self._describe(QUEUED_RESOURCES, self.job.name) or {}).get("tpu", {}).get("nodeSpec", [])
        existing = [spec.get("node", {}) for spec in specs]
        types = {vm["acceleratorType"].rpartition("/")[2] for vm in existing if vm.get("acceleratorType")}
        if types - {self.tpu.type}:
            raise LaunchError(
                f"{self.job.name} exists as {', '.join(types)}, not {self.tpu.type}",
                "delete it first or take another --name",
            )

    def _failure(self, state: str, reason: str) -> LaunchError:
        said = f"{self.job.name} is {state}" + (f": {reason}" if reason else "")
        if state == ABSENT:
            return LaunchError(f"{self.job.name} does not exist in {self.tpu.zone}", "create it: launch/tpu create")
        if state in LOST:
            return LaunchError(said, "launch/tpu up requests it anew and the run resumes", Kind.LOST)
        kind = classify(reason)
        return LaunchError(said, FIXES.get(kind, "delete it and create it again"), kind)


def _listed(workers: set[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
