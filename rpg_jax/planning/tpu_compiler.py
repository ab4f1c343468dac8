"""The compiler for TPUs, libtpu, in a folder of its own.

Where Python can import libtpu, every command of a machine without a TPU looks for one first and complains. So only
`plan` knows this folder, and the environment stays as it is. On a TPU's machine libtpu is installed for Python.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

GET = "python -m rpg_jax.plan --get_compiler"


def folder() -> Path:
    """Where `get` puts the compiler: beside the packages of this environment, by the version of JAX."""
    return Path(sys.prefix) / "tpu_compiler" / importlib.metadata.version("jax")


def requirement() -> str:
    """The versions of libtpu that the installed JAX takes, e.g. "libtpu==0.0.42.*"."""
    needed = importlib.metadata.requires("jax") or []
    return next(line.partition(";")[0].strip() for line in needed if line.startswith("libtpu"))


def library() -> Path | None:
    """The compiler's shared library: Python's own, or the library in `folder`. None if both are missing."""
    if found := importlib.util.find_spec("libtpu"):
        return Path(found.origin or "").with_name("libtpu.so")
    own = folder() / "libtpu" / "libtpu.so"
    return own if own.is_file() else None


def get() -> str:
    """Installs the compiler into `folder` by pip if it is missing. Returns a line that names the place.

    Raises ValueError if pip failed, and has printed why.
    """
    if found := library():
        return f"the compiler for TPUs is there: {found}"
    home = folder()
    part = home.with_name(f"{home.name}.part")  # an interrupted download leaves no folder that looks whole
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    shutil.rmtree(part, ignore_errors=True)
    if subprocess.run([*pip, f"--target={part}", requirement()]).returncode:
        raise ValueError(f"{requirement()} cannot be installed into {home}: pip says why above")
    for old in home.parent.iterdir():  # compilers for other versions of JAX
        if old != part:
            shutil.rmtree(old)
    part.rename(home)
    return f"the compiler for TPUs, {requirement()}, is in {home}; only plan uses it"
