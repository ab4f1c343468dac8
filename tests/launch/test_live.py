from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "launch" / "colab"))
import live

STEP = """
import json, pathlib
line = json.dumps({"step": 1, "reward": 0.5, "accuracy": 0.5})
(pathlib.Path("RUN") / "metrics.jsonl").write_text(line + chr(10))
"""


def test_the_curves_of_a_run_are_shown_once_it_has_a_step(tmp_path, monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []
    monkeypatch.setattr(display, "display", lambda image, display_id: shown.append(image))
    live.follow([sys.executable, "-c", STEP.replace("RUN", str(tmp_path))], tmp_path, every=0.05)
    assert [image.data[:4] for image in shown] == [b"\x89PNG"]


def test_a_failed_run_says_why(tmp_path):
    pytest.importorskip("IPython.display")
    with pytest.raises(ValueError, match="ended with 3:\nno such config"):
        live.follow([sys.executable, "-c", "print('no such config'); raise SystemExit(3)"], tmp_path, every=0.05)


def test_of_a_command_the_last_line_stays(capsys):
    pytest.importorskip("IPython.display")
    live.run([sys.executable, "-c", "print('1/3 runs'); print('page in 3 s')"])
    assert capsys.readouterr().out.replace("\r", "\n").splitlines()[-1].endswith("page in 3 s")


def test_a_failed_command_says_why():
    pytest.importorskip("IPython.display")
    with pytest.raises(ValueError, match="ended with 3:\nno such method"):
        live.run([sys.executable, "-c", "print('no such method'); raise SystemExit(3)"])


def test_a_command_ends_with_the_cell_that_runs_it(monkeypatch, capsys):
    def interrupt(wait):
        raise KeyboardInterrupt

    display = pytest.importorskip("IPython.display")
    monkeypatch.setattr(display, "clear_output", interrupt)
    began, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: began.append(popen(*a, **k)) or began[0])
    with pytest.raises(KeyboardInterrupt):
        live.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"])
    assert began[0].wait(timeout=20) == -signal.SIGTERM
