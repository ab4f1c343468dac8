"""A cloud that is not there: fake commands first on PATH, and the launchers run in this process without waiting."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))

from cloud import account, files, preflight, resolve, tpu, xpk  # noqa: E402
from cloud.shell import Shell  # noqa: E402


@functools.cache
def _resolve(trainer: tuple[str, ...], chips: int, slices: int) -> subprocess.CompletedProcess:
    """As `preflight.resolve`, in this process, which has JAX already."""
    try:
        found = resolve.resolved([f"--chips={chips}", f"--slices={slices}", *trainer])
    except ValueError as error:
        return subprocess.CompletedProcess([], 1, "", str(error))
    return subprocess.CompletedProcess([], 0, json.dumps(found), "")


class Cloud:
    """Runs launcher commands against the fake and tells what was called, said and waited for."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]):
        self.home, self.capsys, self.waits = home, capsys, []

    def script(self, *rules: dict) -> None:
        """Rules of fake_cloud.py; `times` is 1 unless given."""
        (self.home / "script.json").write_text(
            json.dumps([{"times": 1, "code": 1, **rule} for rule in rules]), encoding="utf-8"
        )

    def run(self, line: str, program: str = "tpu") -> int:
        """`tpu up --name=x -- --config=...`: exit code; output is kept in `out` and `err`."""
        argv = shlex.split(line)
        argv.insert(argv.index("--") if "--" in argv else len(argv), f"--staging={self.home / 'staging'}")
        shell = Shell("--dry-run" in argv, sleep=self.waits.append)
        code = {"tpu": tpu, "xpk": xpk}[program].main(argv, shell)
        self.out, self.err = self.capsys.readouterr()
        return code

    @property
    def calls(self) -> list[str]:
        log = self.home / "calls.jsonl"
        return (
            [" ".join(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]
            if log.exists()
            else []
        )

    def called(self, part: str) -> list[str]:
        return [call for call in self.calls if part in call]

    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@pytest.fixture
def cloud(tmp_path, monkeypatch, capsys):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gcloud", "xpk", "kubectl", "docker"):
        fake = Path(__file__).parent / "fake_cloud.py"
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{fake}" {name} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLOUD", str(tmp_path))
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT", raising=False)
    monkeypatch.setattr(files, "source_archive", lambda: b"archive")
    monkeypatch.setattr(files, "commit", lambda: "0123456789abcdef")
    monkeypatch.setattr(preflight, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(preflight, "resolve", _resolve)
    monkeypatch.setattr(account, "granted", lambda token, url, permissions: permissions)
    monkeypatch.setattr(preflight, "tpu_compiler_is_installed", lambda: False)  # a plan takes minutes
    return Cloud(tmp_path, capsys)
