"""The shell entry points, run with fake interpreters on PATH in a repository whose path has a space."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "grep", "mkdir", "mktemp", "cp", "chmod", "cat", "rm")

WORKING = """\
#!/bin/sh
case "$1 $2" in
  "-c "*) exit 0 ;;
  "launch/install.py --check") exit 0 ;;
  "launch/install.py "*) echo "{name} installs" >&2; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m mypy") printf '<%s>' "$@"; exit "${{MYPY_STATUS:-0}}" ;;
  "-m pytest") printf '<%s>' "$@"; exit "${{PYTEST_STATUS:-0}}" ;;
  *) printf '<%s>' "$@" ;;
esac
"""
SHIM = "#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n"
OLD = "#!/bin/sh\n[ \"$1\" != --version ] || {{ echo 'Python 3.9.2'; exit 0; }}\nexit 1\n"


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "a repository"
    shutil.copytree(REPOSITORY / "launch", root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / ".ci", root / ".ci")
    path = tmp_path / "bin"
    path.mkdir()
    for tool in TOOLS:
        (path / tool).symlink_to(shutil.which(tool))
    return root


def run(repository, script, *arguments, pythons=None, **environment):
    """Runs a script where only `pythons` (name -> kind of fake) are installed."""
    path = repository.parent / "bin"
    for name, kind in (pythons or {"python3": WORKING}).items():
        (path / name).write_text(kind.format(name=name), encoding="utf-8")
        (path / name).chmod(0o755)
    environment = {"PATH": str(path), "HOME": os.environ.get("HOME", "/"), **environment}
    command = ["bash", str(repository / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def test_names_on_path_that_do_not_run_are_passed_over(repository):
    pythons = {"python3.13": SHIM, "python3.12": WORKING, "python3.11": WORKING, "python3": OLD}
    result = run(repository, "launch/local.sh", pythons=pythons)
    assert result.returncode == 0
    assert result.stderr == "python3.12 installs\n"


def test_named_interpreter_comes_first(repository):
    other = repository.parent / "other"
    other.write_text(WORKING.format(name="other"), encoding="utf-8")
    other.chmod(0o755)
    assert run(repository, "launch/local.sh", PYTHON=str(other)).stderr == "other installs\n"


@pytest.mark.parametrize(
    "pythons, found",
    [
        ({"python3.13": SHIM, "python3": OLD}, "python3.13 (does not start), python3 (Python 3.9.2)"),
        ({"unrelated": WORKING}, "none"),
    ],
)
def test_missing_or_old_python_is_one_clear_line(repository, pythons, found):
    result = run(repository, "launch/local.sh", pythons=pythons)
    assert result.returncode == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: Python 3.11, 3.12 or 3.13 is needed") and f"found {found}." in line


def test_a_named_interpreter_that_fails_is_not_replaced_silently(repository):
    result = run(repository, "launch/local.sh", PYTHON="/no/such/python")
    assert result.returncode == 1 and "/no/such/python" in result.stderr


def test_overrides_reach_the_trainer_unchanged(repository):
    result = run(repository, "launch/local.sh", "--config.name=a b", "--config.loss.kl_coef=1")
    assert result.stdout == "<-m><rpg_jax.train><--config=configs/tiny.py><--config.name=a b><--config.loss.kl_coef=1>"


def test_another_config_replaces_the_tiny_one(repository):
    assert run(repository, "launch/local.sh", "--config=x.py").stdout == "<-m><rpg_jax.train><--config=x.py>"


def test_second_start_finds_the_environment_complete(repository):
    run(repository, "launch/local.sh")
    assert "installs" not in run(repository, "launch/local.sh").stderr


def test_test_command_lints_checks_types_and_passes_pytest_its_arguments(repository):
    result = run(repository, "launch/test.sh", "-k", "two words")
    assert result.stdout.startswith("<-m><ruff><check><.><-m><ruff><format><--check><.><-m><pytest>")
    assert result.stdout.endswith("<-k><two words><-m><mypy>")
    assert result.returncode == 0


def test_wrong_types_fail_the_test_command_though_the_tests_pass(repository):
    assert run(repository, "launch/test.sh", MYPY_STATUS="1").returncode == 1


@pytest.mark.parametrize("status", [0, 1, 5])
def test_ci_ends_as_pytest_ends(repository, status):
    result = run(repository, ".ci/run", PYTEST_STATUS=str(status), HOME=str(repository))
    assert result.returncode == status
    assert "<-m><pytest>" in result.stdout


def test_without_the_python_of_pods_ci_says_so_in_one_line(repository):
    result = run(repository, ".ci/pods", pythons={"python3.12": SHIM, "python3.11": WORKING}, HOME=str(repository))
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == "not tested: the versions that pods run, since no Python 3.12 was found\n"
