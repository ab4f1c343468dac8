"""Runs cloud commands: prints them first, runs none in a dry run."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from cloud.errors import CommandError, LaunchError


class Shell:
    """Runs commands once; in a dry run prints them. gcloud itself asks a server that fails for a moment again."""

    def __init__(self, dry_run: bool = False, sleep=time.sleep):
        self.dry_run, self.sleep = dry_run, sleep

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def report(self, text: str) -> None:
        """Says what was achieved; a dry run achieves nothing."""
        if not self.dry_run:
            self.say(text)

    def ask(self, command: list[str], dry_answer: str = "") -> str:
        """Runs a command that changes nothing and returns its output; in a dry run returns `dry_answer`."""
        if self.dry_run:
            self._print(command)
            return dry_answer
        code, stdout, stderr = self.attempt(command)
        if code:
            raise CommandError(command, stderr)
        return stdout

    def do(self, command: list[str]) -> str:
        """Runs a command that changes something and returns its output; always prints it first."""
        if not self.dry_run:
            self._print(command)
        return self.ask(command)

    def attempt(self, command: list[str]) -> tuple[int, str, str]:
        """Runs a command: (exit code, stdout, stderr)."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            fix = "install it (docs/cloud.md says where it comes from)"
            raise LaunchError(f"{command[0]} is not on PATH", fix) from None
        return done.returncode, done.stdout, done.stderr

    def write(self, path: Path, content: bytes, executable: bool = False) -> None:
        """Writes a file of the launch, also in a dry run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if executable else 0o644)
        if self.dry_run:
            print(f"# writes {path}")

    def _print(self, command: list[str]) -> None:
        line = shlex.join(command)
        print(line if self.dry_run else f"$ {line}", file=sys.stdout if self.dry_run else sys.stderr, flush=True)
