"""A wheel holds the package, its configs and its data, and starts in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("rpg_jax", "configs", "setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the files of a wheel. They are built from a copy, since setuptools writes beside its sources."""
    pytest.importorskip("setuptools", reason="requirements-dev.txt has it")
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, copy / name)
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "setup.py", "-q", "build_py", f"--build-lib={folder}"]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    return folder


def run(installed, folder, *arguments):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_it_holds_every_module_the_configs_and_the_data_and_nothing_else(installed):
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rpg_jax").rglob("*.py")}
    expected |= {f"rpg_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    expected |= {f"rpg_jax/report/web/{path.name}" for path in (ROOT / "rpg_jax" / "report" / "web").iterdir()}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "rpg_jax").rglob("*.json")}
    assert files == expected and "rpg_jax/configs/base.py" in files and "rpg_jax/report/web/page.html" in files


def test_it_finds_its_configs_from_an_empty_folder_and_names_them(installed, tmp_path):
    done = run(installed, tmp_path, "rpg_jax.plan", "--config=configs/none.py")
    assert done.returncode == 2 and "there are configs/countdown.py, " in done.stderr and done.stderr.count("\n") == 1
    done = run(installed, tmp_path, "rpg_jax.plan", "--config=small", "--config.rollout.slot=1")
    assert done.stderr.startswith("error: no config field 'rollout.slot'; did you mean rollout.slots?")


@pytest.mark.slow  # imports JAX
def test_its_help_lists_every_field(installed, tmp_path):
    done = run(installed, tmp_path, "rpg_jax.train", "--help")
    assert done.returncode == 0 and "configs/tiny.py" in done.stdout and "rollout.slots" in done.stdout


@pytest.mark.soak
def test_it_trains_in_an_empty_folder(installed, tmp_path):
    done = run(installed, tmp_path, "rpg_jax.train", "--config.train.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held out accuracy" in done.stdout
    assert (tmp_path / "runs" / "tiny-rpg-reinforce-urkl-seed0" / "summary.md").exists()
