"""Runs the trainer or a server on a host of a TPU slice, within its hours: `supervise.py OPTIONS -- MODULE ARGUMENTS`.

On GKE it runs in a pod, whose JobSet starts all pods again after a failure. On a TPU VM (--files), where nobody does,
it installs, starts again after failures, notes in the bucket how the run has ended, and has the TPU deleted (--free).
Command lines hold the names of secrets alone: their values go from Secret Manager into the environment of the command,
and the machine's own service account asks for them. Standard library only, from Python 3.10.
"""

import argparse
import base64
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

METADATA = os.environ.get("GCE_METADATA_URL", "http://metadata.google.internal") + "/computeMetadata/v1/instance"
SECRET_MANAGER = os.environ.get("SECRET_MANAGER_URL", "https://secretmanager.googleapis.com")
LOG = Path(os.environ.get("LOG_FILE", "/var/log/rpg.log"))
PAUSE = float(os.environ.get("PAUSE", "15"))
PYTHON = os.environ.get("PYTHON", ".venv/bin/python")
USAGE_ERROR, GAVE_UP = 2, 3  # as in rpg_jax/runs/cli.py: a restart ends the same
OVER = 124
LAST = (USAGE_ERROR, GAVE_UP, OVER)
OVER_SAYS = "the hours of --max-hours or --budget are over; the run is saved"
TRIES = 6
HOUR = 3600.0  # of work makes a failure the first one again
SOON = 600.0


def ask(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
        return response.read()


def attribute(name: str) -> str:
    """A line that Google writes for the TPU VM."""
    return ask(f"{METADATA}/attributes/{name}", {"Metadata-Flavor": "Google"}).decode()


def coordinator() -> str:
    """The host at which all processes meet: on GKE the environment names it, on a TPU VM its attributes do."""
    if hosts := os.environ.get("MEGASCALE_COORDINATOR_ADDRESS") or os.environ.get("TPU_WORKER_HOSTNAMES"):
        return hosts.split(",")[0].split(":")[0]
    several = re.search(r"^MEGASCALE_COORDINATOR_ADDRESS: *'([^:']+)", attribute("tpu-env"), re.MULTILINE)
    return several[1] if several else attribute("worker-network-endpoints").split(",")[0].split(":")[2]


def secret(project: str, name: str) -> str:
    """The latest version of a secret."""
    account = ask(f"{METADATA}/service-accounts/default/token", {"Metadata-Flavor": "Google"})
    url = f"{SECRET_MANAGER}/v1/projects/{project}/secrets/{name}/versions/latest:access"
    answer = ask(url, {"Authorization": f"Bearer {json.loads(account)['access_token']}"})
    return base64.b64decode(json.loads(answer)["payload"]["data"]).decode().strip()


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What the command finds in its environment; raises OSError, KeyError or ValueError if that cannot be read."""
    found = dict(os.environ)
    if options.command[0] == "rpg_jax.serve":  # by itself, also where GKE takes servers for slices of one job
        found = {name: value for name, value in found.items() if not name.startswith("MEGASCALE_")}
    found.setdefault("JAX_PLATFORMS", "tpu")  # no silent run on the CPU
    found["JAX_COMPILATION_CACHE_DIR"] = f"{options.bucket}/jax-cache"
    found["JAX_COORDINATOR_ADDRESS"] = f"{coordinator()}:8476"  # Google's firewall does not open jax's default, 8482
    for variable, _, name in (pair.partition("=") for pair in options.secrets):
        try:
            found[variable] = secret(options.project, name)
        except (OSError, KeyError, ValueError) as error:
            fix = "give this machine's service account roles/secretmanager.secretAccessor on it"
            raise OSError(f"secret {name!r} of {options.project!r} could not be read ({error}); {fix}") from error
    return found


class Supervisor:
    """Runs one command, and passes the signal that stops it on; the command saves."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.stopped, self.process = options, False, None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: object) -> None:
        self.stopped = True
        if self.process is None:
            sys.exit(128 + number)
        self.process.send_signal(number)

    def attempt(self) -> int:
        """Runs the command once and returns its exit code; OVER where its hours ended it."""
        left = self.options.deadline - time.time() if self.options.deadline else None
        if left is not None and left <= 0:
            return OVER
        try:
            variables = environment(self.options)
        except (OSError, KeyError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        self.process = subprocess.Popen([PYTHON, "-m", *self.options.command], env=variables)
        try:
            code = self.process.wait(left)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
            code = OVER
        self.process = None
        return code if code >= 0 else 128 - code

    def in_pod(self) -> int:
        """The JobSet starts all pods again at once: what fails within minutes waits a minute."""
        began = time.monotonic()
        code = self.attempt()
        if code not in (0, *LAST) and not self.stopped and time.monotonic() - began < SOON:
            time.sleep(4 * PAUSE)
        if code == OVER:
            print(OVER_SAYS, flush=True)
            return GAVE_UP
        return code

    def on_vm(self) -> int:
        worker, failures = attribute("agent-worker-number"), 0
        install = [sys.executable, "launch/install.py", "--requirements=requirements-tpu.lock"]
        while True:
            began = time.monotonic()
            code = subprocess.run(install).returncode or self.attempt()
            if code == 0:
                if worker == "0":
                    self._note("finished", time.strftime("%FT%TZ", time.gmtime()))
                    self._free()
                return 0
            failures = 1 if time.monotonic() - began > HOUR else failures + 1
            if self.stopped:
                return code
            if code in LAST or failures == TRIES:
                break
            print(f"exit code {code}; starting again", flush=True)
            time.sleep(PAUSE * 2**failures)
        subprocess.run(["gcloud", "storage", "cp", str(LOG), f"{self.options.files}/logs/worker-{worker}.log"])
        reason = f"worker {worker} ended with exit code {code} at attempt {failures}"
        self._note("failed", OVER_SAYS if code == OVER else reason)
        time.sleep(PAUSE)  # the other workers copy their logs
        self._free()
        return code

    def _note(self, name: str, text: str) -> None:
        """Writes a file for which launch/tpu looks."""
        for _ in range(5):
            copy = ["gcloud", "storage", "cp", "-", f"{self.options.files}/{name}"]
            if subprocess.run(copy, input=f"{text}\n", text=True).returncode == 0:
                return
            time.sleep(PAUSE)

    def _free(self) -> None:
        """Deletes the TPU, by one worker or by several."""
        if self.options.free and subprocess.run(shlex.split(self.options.free)).returncode:
            print("the TPU is still there and costs: launch/tpu delete", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket", required=True, help="gs:// address of the compilation cache")
    parser.add_argument("--deadline", type=int, default=0, help="seconds since 1970; 0 is none")
    parser.add_argument("--project", help="of the secrets")
    parser.add_argument("--secret", action="append", default=[], dest="secrets", metavar="VARIABLE=name")
    parser.add_argument("--files", help="on a TPU VM: the launch's gs:// folder")
    parser.add_argument("--free", help="on a TPU VM: the command that deletes it")
    separator = argv.index("--")
    options = parser.parse_args(argv[:separator])
    options.command = argv[separator + 1 :]
    os.chdir(Path(__file__).resolve().parents[2])
    supervisor = Supervisor(options)
    return supervisor.on_vm() if options.files else supervisor.in_pod()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
