"""Commands of the package in processes of their own, as a user starts them.

The processes of one test run keep compiled programs and the warm start of micro.py in one folder.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MICRO = "tests/end_to_end/micro.py"


def environment(shared, *, optimised=False, devices=1):
    """The environment of a process that keeps its compiled programs in the folder `shared`.

    Programs of `optimised` processes are those of users, which take six times as long to compile as others. Tests need
    them to compare the bits that users get, or to run for long.
    """
    flags = [] if optimised else os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "host_platform_device_count" not in flag]
    env = {k: v for k, v in os.environ.items() if not (optimised and k == "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    return env | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
        "NPROC": str(3 * devices) if devices > 1 else "",  # as in tests/conftest.py
        "JAX_COMPILATION_CACHE_DIR": str(shared / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }


def kept_for(folder, name):
    """The folder `shared` of `environment` for processes of one kind: one for all tests, elsewhere in `folder`."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", folder)) / name


def completed(arguments, env, cwd=ROOT):
    """`python ARGUMENTS`, which must end with 0."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextlib.contextmanager
def alone(shared):
    """While entered, no other worker of the test run is in here."""
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def with_warm_start(shared):
    """Makes sure that `shared`/warm_starts has the warm start of micro.py, by a run that also compiles its programs."""
    with alone(shared):
        if not (shared / "w" / "summary.md").exists():
            flags = [
                f"--config.run.dir={shared}",
                f"--config.warm_start.dir={shared}/warm_starts",
                "--config.run.name=w",
            ]
            completed(["-m", "rpg_jax.train", f"--config={MICRO}", *flags], environment(shared))
    return shared
