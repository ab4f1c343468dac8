"""Requests and deletes the TPU VMs of a job, and tells their state."""

import json
import shlex
from pathlib import Path

from cloud.accelerators import RUNTIMES
from cloud.errors import Kind, LaunchError, classify, ignored
from cloud.job import Job
from cloud.shell import Shell

TPUS = ["compute", "tpus"]
WAITING = {"ACCEPTED", "CREATING", "WAITING_FOR_RESOURCES", "PROVISIONING", "STARTING", "REPAIRING", "RESTARTING"}
UP = {"ACTIVE", "READY"}
ABSENT = "ABSENT"
LOST = {ABSENT, "SUSPENDED", "SUSPENDING", "PREEMPTED", "TERMINATED", "STOPPED", "STOPPING"}


class TpuVms:
    """The TPU VMs of one job, one for each slice; they need not exist. A worker is one host of a TPU VM."""

    def __init__(self, job: Job, shell: Shell):
        self.job, self.shell = job, shell

    def create_command(self, startup: Path) -> list[str]:
        job, alpha = self.job, []
        capacity = {"spot": ["--spot"], "reserved": ["--reserved"]}.get(job.capacity, [])
        if job.capacity == "flex-start":
            alpha, limit = ["alpha"], 3600 * (job.hours or 0)
            capacity = ["--provisioning-model=flex-start", f"--max-run-duration={limit:.0f}s"]
        nodes = [f"--node-id={job.name}"]
        if job.slices > 1:
            nodes = [f"--node-count={job.slices}", f"--node-prefix={job.name}"]
        command = ["gcloud", *alpha, *TPUS, "queued-resources", "create", job.name, *job.place, *nodes, *capacity]
        command += [f"--runtime-version={RUNTIMES[job.slice.prefix]}", f"--accelerator-type={job.type}"]
        command += [f"--valid-until-duration={job.give_up_after}", f"--metadata-from-file=startup-script={startup}"]
        command += [f"--service-account={job.service_account}"] if job.service_account else []
        command += [f"--network={job.network}"] if job.network else []
        command += ["--internal-ips"] if job.internal_ips else []
        return [*command, "--async", f"--labels=rpg-run={job.name}", "--quiet"]

    def state(self) -> tuple[str, str]:
        """(state, reason) of the queued resource, or of a TPU VM in it that is not up; ABSENT if there is none.

        Raises LaunchError if the TPU of this name is of another type.
        """
        described = self._describe("queued-resources", self.job.name)
        if described is None:
            return ABSENT, ""
        nodes = [spec.get("node", {}) for spec in described.get("tpu", {}).get("nodeSpec", [])]
        for found in (node["acceleratorType"].rpartition("/")[2] for node in nodes if node.get("acceleratorType")):
            if found != self.job.type:
                problem = f"{self.job.name} exists as {found}, not {self.job.type}"
                raise LaunchError(problem, "delete it first or take another --name")
        state = described.get("state", {}).get("state", "UNKNOWN")
        if state != "ACTIVE":
            return state, described.get("state", {}).get("failedData", {}).get("error", {}).get("message", "")
        for vm in self.job.vms:
            described = self._describe("tpu-vm", vm) or {"state": "SUSPENDED", "healthDescription": "is gone"}
            if (state := described.get("state", "UNKNOWN")) not in UP:
                return state, f"{vm}: {described.get('healthDescription', '')}".strip(": ")
        return "ACTIVE", ""

    def create(self, startup: Path) -> None:
        """Requests the TPU unless it is there; deletes a preempted or failed TPU first."""
        state, reason = self.state() if not self.shell.dry_run else (ABSENT, "")
        if state in UP | WAITING:
            self.shell.say(f"{self.job.name} exists ({state})")
            return
        if state != ABSENT:
            self.shell.say(f"{self.job.name} is {state}{f' ({reason})' if reason else ''}: requesting it anew")
            self.delete()
        with ignored(Kind.EXISTS):  # another start of the same command was faster
            self.shell.do(self.create_command(startup))

    def delete(self) -> None:
        """Deletes the TPU; it may be gone already. Says what it costs if it cannot be deleted."""
        command = ["gcloud", *TPUS, "queued-resources", "delete", self.job.name, *self.job.place, "--force", "--quiet"]
        try:
            with ignored(Kind.NOT_FOUND):
                self.shell.do(command)
        except LaunchError:
            self.shell.say(f"{self.job.name} is still there and costs {self.job.rate}")
            raise

    @property
    def log_command(self) -> str:
        """gcloud's command that follows the log of the first worker."""
        ssh = ["gcloud", *TPUS, "tpu-vm", "ssh", self.job.vms[0], *self.job.place, "--worker=0"]
        ssh += ["--internal-ip"] if self.job.internal_ips else []
        return shlex.join([*ssh, "--command=sudo tail -n 200 -F /var/log/rpg.log"])

    def failure(self, state: str, reason: str) -> LaunchError:
        """What to say, and to do, about a TPU that is neither up nor in the queue."""
        said = f"{self.job.name} is {state}" + (f": {reason}" if reason else "")
        if state in LOST:
            return LaunchError(said, "launch/tpu up requests it anew and the run resumes", Kind.LOST)
        kind = classify(reason)
        fix = "try --capacity=spot or another zone" if kind is Kind.STOCKOUT else "delete it and create it again"
        return LaunchError(said, fix, kind)

    def _describe(self, family: str, name: str) -> dict | None:
        with ignored(Kind.NOT_FOUND):
            command = ["gcloud", *TPUS, family, "describe", name, *self.job.place, "--format=json"]
            return json.loads(self.shell.ask(command, dry_answer="{}") or "{}")
        return None
