"""Runs cloud commands: prints them first, retries where that helps, runs none in a dry run."""

import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cloud.errors import CommandError, Kind, LaunchError

FIXES = {
    Kind.LOGIN: "run: gcloud auth login",
    Kind.DISABLED: "run: gcloud services enable tpu.googleapis.com storage.googleapis.com",
    Kind.PERMISSION: "ask for roles/tpu.admin, roles/iam.serviceAccountUser, roles/storage.objectAdmin in this project",
    Kind.QUOTA: "ask for more at console.cloud.google.com/iam-admin/quotas, or take a smaller --type or another zone",
    Kind.STOCKOUT: "try --capacity=spot or another zone",
    Kind.TRANSIENT: "the cloud kept failing; run the same command again later",
}


class Shell:
    """Runs commands; in a dry run prints them instead.

    Only temporary failures are tried again, up to `tries` times, after waits of 2, 4, 8 … at most 60 s with jitter. A
    missing quota or permission does not change when asked again.
    """

    def __init__(self, dry_run: bool = False, tries: int = 5, sleep=time.sleep):
        self.dry_run, self.tries, self.sleep = dry_run, tries, sleep

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def report(self, text: str) -> None:
        """Says what was achieved; a dry run achieves nothing."""
        if not self.dry_run:
            self.say(text)

    def ask(self, command: list[str], dry_answer: str = "") -> str:
        """Runs a command that changes nothing and returns its output; in a dry run returns `dry_answer`."""
        return self._run(command, dry_answer, announce=False)

    def do(self, command: list[str], tries: int | None = None) -> str:
        """Runs a command that changes something and returns its output; always prints it first."""
        return self._run(command, "", announce=True, tries=tries)

    def follow(self, command: list[str]) -> int:
        """Hands the terminal to a command (ssh, logs) and returns its exit code."""
        self._print(command)
        if self.dry_run:
            return 0
        self._require(command[0])
        try:
            return subprocess.run(command).returncode
        except KeyboardInterrupt:
            return 0

    def attempt(self, command: list[str]) -> tuple[int, str, str]:
        """Runs a command once: (exit code, stdout, stderr)."""
        self._require(command[0])
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr

    def write(self, path: Path, content: str, executable: bool = False) -> None:
        """Writes a file of the launch, also in a dry run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o755 if executable else 0o644)
        if self.dry_run:
            print(f"# writes {path}")

    def _run(self, command: list[str], dry_answer: str, announce: bool, tries: int | None = None) -> str:
        tries = tries or self.tries
        if self.dry_run or announce:
            self._print(command)
        if self.dry_run:
            return dry_answer
        for attempt in range(1, tries + 1):
            code, stdout, stderr = self.attempt(command)
            if code == 0:
                return stdout
            error = CommandError(command, stderr)
            if error.kind is not Kind.TRANSIENT or attempt == tries:
                break
            wait = min(2.0**attempt, 60.0) * random.uniform(0.8, 1.2)
            self.say(f"{error}; trying again in {wait:.0f} s ({attempt}/{tries - 1})")
            self.sleep(wait)
        raise CommandError(command, stderr, FIXES.get(error.kind, ""))

    def _print(self, command: list[str]) -> None:
        line = " ".join(shlex.quote(word) for word in command)
        print(line if self.dry_run else f"$ {line}", file=sys.stdout if self.dry_run else sys.stderr, flush=True)

    def _require(self, program: str) -> None:
        if shutil.which(program) is None:
            how = {
                "gcloud": "https://cloud.google.com/sdk/docs/install",
                "xpk": "pip install xpk",
                "kubectl": "gcloud components install kubectl",
                "docker": "https://docs.docker.com/engine/install",
            }
            raise LaunchError(f"{program} is not on PATH", f"install it: {how.get(program, program)}")
