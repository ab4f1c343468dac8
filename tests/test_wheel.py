"""A wheel holds the package, its configs, its data and its commands, and works in an empty folder."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = ("rpg_jax", "configs", "setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what a wheel is built from, since setuptools writes beside its sources."""
    pytest.importorskip("setuptools", reason="requirements-dev.txt has it")
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def unpacked(source, tmp_path_factory):
    """A folder with the files of a wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    build = [sys.executable, "setup.py", "-q", "build_py", f"--build-lib={folder}"]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    return folder


def run(unpacked, folder, *arguments):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def expected_files():
    """What a wheel holds beside what describes it."""
    package = ROOT / "rpg_jax"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    files |= {f"rpg_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")} | {
        "rpg_jax/configs/choices.json"
    }
    files |= {f"rpg_jax/{path.relative_to(ROOT)}" for path in (ROOT / "configs").glob("chains_start*/*")}
    files |= {path.relative_to(ROOT).as_posix() for path in package.rglob("*.json")}
    return (
        files
        | {f"rpg_jax/report/web/{path.name}" for path in (package / "report/web").iterdir()}
        | {"rpg_jax/py.typed"}
    )


def test_it_holds_every_module_the_configs_and_the_data_and_nothing_else(unpacked):
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert files == expected_files() and "rpg_jax/configs/base.py" in files and "rpg_jax/report/web/page.html" in files


def test_it_finds_its_configs_from_an_empty_folder_and_names_them(unpacked, tmp_path):
    done = run(unpacked, tmp_path, "rpg_jax.plan", "--config=configs/none.py")
    assert done.returncode == 2 and "there are configs/calculator.py, " in done.stderr and done.stderr.count("\n") == 1
    done = run(unpacked, tmp_path, "rpg_jax.plan", "--config=small", "--config.rollout.slot=1")
    assert done.stderr.startswith("error: no config field 'rollout.slot'; did you mean rollout.slots?")


def test_every_command_is_a_module_and_every_module_with_a_config_or_a_run_a_command():
    package = ROOT / "rpg_jax"
    there = {}
    for file in (*package.glob("*.py"), package / "data/__main__.py", package / "report/__main__.py"):
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "main"
            for node in ast.parse(file.read_text(encoding="utf-8")).body
        ):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            there[f"rpg-{module.removesuffix('.__main__').rpartition('.')[2]}"] = f"{module}:main"
    there["rpg-train"] = "rpg_jax.runs.train_command:main"  # in Python `rpg_jax.train` is a function
    assert PROJECT["scripts"] == there


def test_a_package_has_the_same_range_wherever_it_is_named():
    lines = [line for file in ROOT.glob("requirements*.txt") for line in file.read_text(encoding="utf-8").splitlines()]
    lines += [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    ranges = {}
    for wanted in (Requirement(line.partition("#")[0]) for line in lines if line and line[0].isalnum()):
        if wanted.specifier:  # without one it is another's extra
            ranges.setdefault(wanted.name, set()).add(str(wanted.specifier))
    assert {name: found for name, found in ranges.items() if len(found) > 1} == {}


def test_its_help_lists_every_field(unpacked, tmp_path):
    done = run(unpacked, tmp_path, "rpg_jax.train", "--help")
    assert done.returncode == 0 and "configs/tiny.py" in done.stdout and "rollout.slots" in done.stdout


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """A wheel as pip builds it, by the setuptools of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}"]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_it_is_one_package_with_a_version_its_extras_and_its_commands(wheel):
    with zipfile.ZipFile(wheel) as files:
        named = {name for name in files.namelist() if ".dist-info/" not in name}
        told = {Path(name).name: files.read(name).decode() for name in files.namelist() if name not in named}
    version = re.search(r'__version__ = "(.+)"', (ROOT / "rpg_jax" / "__init__.py").read_text(encoding="utf-8"))[1]
    assert named == expected_files() and wheel.name.startswith(f"rpg_jax-{version}-")
    assert f"\nVersion: {version}\n" in told["METADATA"]
    scripts = configparser.ConfigParser()
    scripts.read_string(told["entry_points.txt"])
    assert dict(scripts["console_scripts"]) == PROJECT["scripts"]
    needed = re.findall(r"^Requires-Dist: ([\w.-]+)", told["METADATA"], re.MULTILINE)
    assert {"jax", "flax", "grpcio", "aiohttp"} <= set(needed) and "google-jetstream" not in needed


@pytest.mark.soak  # installs a gigabyte from the index
def test_from_an_empty_environment_its_commands_train_evaluate_and_report_without_and_with_jetstream(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}

    def call(program, *arguments):
        command = [tmp_path / "env" / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    call("pip", "install", "-q", wheel)
    told = call(
        "python", "-c", "import rpg_jax, importlib.metadata as m; print(rpg_jax.__version__, m.version('rpg_jax'))"
    )
    assert len(set(told.stdout.split())) == 1
    tiny = ["--config=tiny", "--config.train.steps=2", "--config.warm_start.enabled=False", "--config.run.name=one"]
    trained = call("rpg-train", *tiny)
    assert "held out accuracy" in trained.stdout and trained.stderr.count("lockstep takes over") == 1
    assert (tmp_path / "runs" / "one" / "summary.md").exists()
    assert "mean" in call("rpg-evaluate", "--run=runs/one", "--k=2", "--problems=8").stdout.lower()
    call("rpg-report", "runs/one", "--out=page.html")
    call("pip", "install", "-q", f"{wheel}[jetstream]")
    call("pip", "install", "-q", "--no-deps", "google-jetstream==0.2.2")
    again = call("rpg-train", *tiny[:-1], "--config.run.name=two")
    assert "lockstep takes over" not in again.stderr
