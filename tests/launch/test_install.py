"""launch/install.py against fake interpreters: what is installed when, and the one line behind each failure."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import pytest

from rpg_jax.rollout.jetstream import INSTALL

SOURCE = Path(__file__).parents[2] / "launch" / "install.py"

FAKE_PIP = """\
#!/bin/sh
case "$1" in -c) exit 0 ;; esac  # the probe that asks whether pip is there
echo "pip $*" >> "$0.log"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """The installer of a repository in a path with a space, whose new venvs hold a fake pip that logs its calls."""
    root = tmp_path / "a repository"
    (root / "launch").mkdir(parents=True)
    (root / "launch" / "install.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    (root / "requirements.txt").write_text("a\n", encoding="utf-8")
    (root / "requirements-dev.txt").write_text("b\n", encoding="utf-8")
    (root / "requirements-jetstream.lock").write_text("c\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("install", root / "launch" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "make_venv", lambda python: fake_venv(module))
    monkeypatch.setattr(sys, "argv", ["install.py"])
    return module


def fake_venv(module, pip=FAKE_PIP):
    python = module.VENV / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(pip, encoding="utf-8")
    python.chmod(0o755)
    (module.VENV / "bin" / "python.log").unlink(missing_ok=True)


def calls(module):
    log = module.VENV / "bin" / "python.log"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def fails(module, capsys):
    """The single line on stderr after the announcement of a failing installation."""
    assert module.main() == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("installing into")]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_workers_have_the_trackers_and_others_do_not(install, monkeypatch):
    for name in ("requirements-tpu.lock", "requirements-trackers.lock"):
        (install.ROOT / name).write_text("d\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["install.py", "--requirements=requirements-tpu.lock"])
    monkeypatch.setattr(install, "suitable_python", lambda requirements: sys.executable)
    assert install.main() == 0
    both = "--requirement=requirements-tpu.lock --requirement=requirements-trackers.lock"
    assert calls(install)[0].endswith(both) and install.state() == install.digest("requirements-tpu.lock")
    (install.ROOT / "requirements-trackers.lock").write_text("e\n", encoding="utf-8")
    assert install.state() != install.digest("requirements-tpu.lock")


def test_jetstream_comes_without_its_requirements(install):
    assert install.main() == 0
    ours, jetstream = calls(install)
    assert "--requirement=requirements-dev.txt" in ours and "--no-deps" not in ours
    assert jetstream.endswith("--no-deps --require-hashes --requirement=requirements-jetstream.lock")


@pytest.mark.parametrize(
    ("file", "package"), [("requirements-jetstream.lock", INSTALL.split()[-1]), ("launch/uv.lock", "uv==")]
)
def test_what_is_installed_beside_the_lockfile_is_pinned_by_its_hash(file, package):
    lines = (SOURCE.parents[1] / file).read_text(encoding="utf-8").splitlines()
    [pinned] = [line for line in lines if not line.startswith("#")]
    assert pinned.startswith(package) and re.search(" --hash=sha256:[0-9a-f]{64}$", pinned)
    assert "require-hashes" in (text := SOURCE.read_text(encoding="utf-8")) and file in text


def test_the_python_of_a_tpu_vm_has_uv_fetch_the_one_that_the_lockfile_is_for(install, monkeypatch, capsys):
    ran = []

    def run(command, **_):
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, code, "/root/uv/python3.12\n", "ERROR: no wheel for uv")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.sys, "version_info", (3, 11, 7))
    assert install.suitable_python("requirements-dev.txt") == sys.executable and not ran
    code = 0
    assert install.suitable_python("requirements-tpu.lock") == "/root/uv/python3.12"
    assert [command[:4] for command in ran] == [
        ["-m", "pip", "install", "--quiet"],
        ["-m", "uv", "python", "install"],
        ["-m", "uv", "python", "find"],
    ]
    assert "--require-hashes" in ran[0] and "--requirement=launch/uv.lock" in ran[0]
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 12))
    code = 1
    with pytest.raises(install.InstallError, match="no wheel for uv; or install Python 3.12 yourself"):
        install.suitable_python("requirements-dev.txt")


def test_second_start_installs_nothing(install):
    install.main()
    before = calls(install)
    assert install.main() == 0
    assert calls(install) == before


def test_changed_requirements_are_installed_into_the_same_venv(install):
    install.main()
    (install.ROOT / "requirements.txt").write_text("a>2\n", encoding="utf-8")
    kept = install.VENV / "kept"
    kept.touch()
    assert install.main() == 0
    assert len(calls(install)) == 4 and kept.exists()


def test_interrupted_installation_is_made_anew(install):
    install.main()
    install.STAMP.write_text("installing", encoding="utf-8")
    assert install.main() == 0
    assert len(calls(install)) == 2  # the log went with the old venv
    assert install.state() == install.digest("requirements-dev.txt")


def test_venv_whose_interpreter_is_gone_is_made_anew(install):
    install.main()
    (install.VENV / "bin" / "python").unlink()
    assert install.main() == 0
    assert install.works()


def test_other_requirements_are_another_environment(install, monkeypatch):
    (install.ROOT / "requirements-tpu.txt").write_text("b\n", encoding="utf-8")
    install.main()
    monkeypatch.setattr(sys, "argv", ["install.py", "--requirements=requirements-tpu.txt"])
    install.main()
    assert "--requirement=requirements-tpu.txt" in calls(install)[2]


def test_check_answers_without_installing(install, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["install.py", "--check"])
    assert install.main() == 1
    assert not install.VENV.exists()


def test_full_disk_stops_before_anything_is_made(install, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: usage(10e9, 9.5e9, 0.5e9))
    assert "0.5 GB free" in fails(install, capsys)
    assert not install.VENV.exists()


@pytest.mark.parametrize(
    "said, means",
    [
        ("WARNING: Retrying: NewConnectionError('Temporary failure in name resolution')", "no network"),
        (
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            "the disk filled up",
        ),
        ("Collecting a\nERROR: No matching distribution found for a==9", "No matching distribution found for a==9"),
    ],
)
def test_a_failing_pip_is_one_clear_line_and_leaves_no_stamp(install, monkeypatch, capsys, said, means):
    pip = FAKE_PIP + textwrap.dedent(f"""\
        cat <<'END'
        {said.splitlines()[0]}
        {said.splitlines()[-1]}
        END
        exit 1
    """)
    monkeypatch.setattr(install, "make_venv", lambda python: fake_venv(install, pip))
    assert means in fails(install, capsys)
    assert install.state() == "installing"


def test_two_at_once_install_once(install):
    fake_venv(install, FAKE_PIP + 'until [ -e "$0.go" ]; do sleep 0.02; done\n')
    command = [sys.executable, str(install.ROOT / "launch" / "install.py")]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not calls(install):
            assert first.poll() is None
            time.sleep(0.01)
        second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert second.stderr.readline().startswith("waiting for another installation")
    finally:
        (install.VENV / "bin" / "python.go").touch()
    said = [process.communicate()[1] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert len(calls(install)) == 2 and "waiting" not in said[0]
