"""Completes .venv: `python launch/install.py [--requirements=FILE]`; --check only tells whether it is complete.

The script runs before anything is installed, so it uses the standard library alone. `.venv/.installed` holds the state:
"installing" (interrupted) or a digest of all requirements. Without this file, .venv is not ours or was never finished.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
BASE = "requirements.txt"  # the other requirements files include it
JETSTREAM = "requirements-jetstream.lock"
TRACKERS = "requirements-trackers.lock"  # a lockfile is for workers, which have the trackers too
UV = "launch/uv.lock"
FREE_GB = 2.5  # 1.1 GB installed, and about as much while wheels are unpacked

NETWORK_DOWN = re.compile(
    r"name resolution|NewConnectionError|NameResolutionError|Max retries|Network is unreachable|"
    r"Connection refused|ConnectTimeout|ReadTimeout|ProxyError|connection broken",
    re.IGNORECASE,
)


class InstallError(Exception):
    """One line for the user: what is wrong, and the fix."""


def digest(requirements: str) -> str:
    """A digest that changes whenever the environment must be installed again."""
    names = (BASE, *together(requirements), JETSTREAM)
    asked_for = [requirements.encode(), *((ROOT / name).read_bytes() for name in names)]
    return hashlib.sha256(b"\0".join(asked_for)).hexdigest()


def together(requirements: str) -> list[str]:
    """The files that pip resolves in one command."""
    return [requirements, TRACKERS] if requirements.endswith(".lock") else [requirements]


def state() -> str:
    return STAMP.read_text(encoding="utf-8").strip() if STAMP.exists() else ""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock. The system drops it when the process ends, however it ends."""
    with path.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another installation in this folder to finish ...", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def works() -> bool:
    """Whether the interpreter of .venv starts and has pip: a venv dies with the Python that made it."""
    probe = "import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    try:
        return subprocess.run([str(VENV / "bin" / "python"), "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def suitable_python(requirements: str) -> str:
    """This Python, if the packages of `requirements` are for it and it makes environments; else one that uv fetches.

    The images of TPU VMs have Python 3.10. Lockfiles are for 3.12.
    """
    versions = [(3, 12)] if requirements.endswith(".lock") else [(3, 11), (3, 12), (3, 13)]
    if sys.version_info[:2] in versions and importlib.util.find_spec("ensurepip"):
        return sys.executable
    print(f"fetching Python 3.12 by uv: this is {sys.version.split()[0]}", file=sys.stderr, flush=True)
    uv = [sys.executable, "-m", "uv", "python"]
    for command in (
        [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", f"--requirement={UV}"],
        [*uv, "install", "--quiet", "3.12"],
        [*uv, "find", "3.12"],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise InstallError(f"{explain(done.stdout + done.stderr)}; or install Python 3.12 yourself")
    return done.stdout.strip()


def make_venv(python: str) -> None:
    if VENV.is_symlink() or (VENV.exists() and not VENV.is_dir()):
        raise InstallError(f"{VENV} is in the way: remove it")
    made = subprocess.run(
        [python, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, errors="replace"
    )
    if made.returncode:
        raise InstallError(explain(made.stdout + made.stderr))


def explain(output: str) -> str:
    """The reason for a failed installation, in one line."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return f"the disk filled up while installing: {FREE_GB} GB are needed here, and room in TMPDIR"
    if NETWORK_DOWN.search(output):
        return "no network: the package index cannot be reached (behind a proxy, set HTTPS_PROXY or PIP_INDEX_URL)"
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.strip().splitlines()
    return f"installation failed: {lines[-1].removeprefix('ERROR:').strip() if lines else 'pip said nothing'}"


def pip_install(*arguments: str) -> None:
    """Runs pip and shows its progress on one line; raises InstallError with the reason of a failure."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar=off", "--retries=2", "--prefer-binary"]
    command += ["--no-compile", *arguments]  # saves a quarter of the time; Python compiles a module at its first import
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    seen, packages = [], 0
    for line in process.stdout:
        seen.append(line)
        packages += line.startswith("Collecting ")
        if line.startswith("Collecting "):
            show(f"resolving {packages} packages: {line.split()[1]}")
        elif line.lstrip().startswith("Downloading"):
            show(f"downloading {Path(line.split()[1]).name}")
        elif line.startswith("Installing collected packages"):
            show(f"unpacking {line.count(',') + 1} packages")
    if process.wait():
        raise InstallError(explain("".join(seen)))


def show(text: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def install(requirements: str) -> None:
    started = time.monotonic()
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB:
        raise InstallError(f"no room for the environment: {free:.1f} GB free in {ROOT}, {FREE_GB} GB needed")
    print("installing into .venv (about a minute, once) ...", file=sys.stderr)
    if state() == "installing" or not works():
        make_venv(suitable_python(requirements))
    STAMP.write_text("installing", encoding="utf-8")
    pip_install(*(f"--requirement={file}" for file in together(requirements)))
    pip_install("--no-deps", "--require-hashes", f"--requirement={JETSTREAM}")
    STAMP.write_text(digest(requirements), encoding="utf-8")
    show("")
    print(f"installed in {time.monotonic() - started:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requirements", default="requirements-dev.txt", help="a file at the repository's root")
    parser.add_argument("--check", action="store_true", help="install nothing; exit with 0 if nothing is missing")
    options = parser.parse_args()
    wanted = digest(options.requirements)
    if options.check:
        return int(state() != wanted)
    try:
        with locked(ROOT / ".venv.lock"):
            if state() != wanted or not works():
                install(options.requirements)
    except (InstallError, OSError) as error:
        show("")
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        show("")
        print("interrupted; the next start repairs the environment", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
