"""The notebook imports the package and defines nothing, carries its outputs, and runs from top to bottom."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import pytest

from rpg_jax.runs import config_files
from rpg_jax.runs.resolve import resolve

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "launch" / "colab" / "rpg_small.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def python_of(source: str) -> ast.Module:
    """A cell's tree, with `pass` in place of commands to the shell and to IPython."""
    command = re.compile(r"^( *)(?:\w+ = )?[!%].*$", re.MULTILINE)
    return ast.parse(command.sub(r"\1pass", source.replace("\\\n", " ")))


def test_no_cell_defines_anything():
    for source in CODE:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(python_of(source)) if isinstance(node, kinds)], source


def test_it_is_small_names_no_machine_and_waits_for_nobody():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not [source for source in CODE if "input(" in source]
    assert len(text) < 300_000
    assert "/work" not in text and "/tmp" not in text


class Colab:
    """Carries out the install cell on an image with given devices, packages and versions of JAX; keeps its commands."""

    def __init__(self, monkeypatch, repository="https://github.com/me/rpg_jax"):
        self.devices, self.packages, self.versions = set(), set(), [b"0.11.2", b"0.11.2"]
        self.commands, self.restarted, self.settings = [], [], {"REPOSITORY": repository}
        monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
        monkeypatch.setattr("os.chdir", lambda path: None)
        monkeypatch.setattr("os.path.exists", lambda path: path in self.devices)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name in self.packages or None)
        monkeypatch.setattr("subprocess.run", lambda command, check: self.commands.append(command))
        monkeypatch.setattr("subprocess.check_output", lambda command: self.versions.pop(0))

    def install(self):
        kernel = types.SimpleNamespace(do_shutdown=lambda restart: self.restarted.append(restart))
        shell = {"get_ipython": lambda: types.SimpleNamespace(kernel=kernel)}
        modules = {"os": os, "sys": sys, "subprocess": subprocess, "importlib": importlib, "contextlib": contextlib}
        modules |= {"re": re, "urllib": urllib}
        exec(CODE[1], modules | shell | self.settings)


@pytest.mark.parametrize(
    ("told", "cloned"),
    [
        ("fileId=https%3A//github.com/me/mine/blob/main/launch/colab/rpg_small.ipynb", "https://github.com/me/mine"),
        ("fileId=1aBcD", None),
        (None, None),
    ],
)
def test_the_repository_is_the_one_that_the_notebook_was_opened_from_or_an_error_says_where_to_write_it(
    monkeypatch, told, cloned
):
    def opened(address, timeout):
        if told is None:
            raise OSError("no such service")
        return io.BytesIO(json.dumps([{"path": told}]).encode())

    assert 'os.environ.get("RPG_REPOSITORY", "")' in CODE[0]
    monkeypatch.setattr("urllib.request.urlopen", opened)
    colab = Colab(monkeypatch, "")
    if cloned is None:
        with pytest.raises(ValueError, match='write REPOSITORY = "https://github.com/NAME/rpg_jax"'):
            colab.install()
        assert colab.commands == []
        return
    colab.install()
    assert colab.commands[0][:2] == ["git", "clone"] and colab.commands[0][-2] == cloned


@pytest.mark.parametrize(
    ("device", "package", "extra"),
    [
        ("/dev/nvidiactl", "jax_cuda12_plugin", "cuda12"),
        ("/dev/nvidiactl", "jax_cuda13_plugin", "cuda13"),
        ("/dev/accel0", None, "tpu"),
        ("/dev/vfio", None, "tpu"),
        (None, None, None),
    ],
)
def test_jax_comes_with_what_the_accelerator_needs(monkeypatch, device, package, extra):
    colab = Colab(monkeypatch)
    colab.devices, colab.packages = {device}, {package}
    colab.install()
    assert colab.commands[0][:2] == ["git", "clone"]
    assert ".[jetstream]" in colab.commands[1]
    assert colab.commands[1][-1].startswith(f"jax[{extra}]>=" if extra else "jax>=")
    assert not colab.restarted


def test_a_runtime_whose_jax_was_replaced_restarts(monkeypatch):
    colab = Colab(monkeypatch)
    colab.versions = [b"0.11.2", b"0.12.0"]
    colab.install()
    assert colab.restarted == [True]


TRAINED = [source for source in CODE if "configs/qwen3" in source]


@pytest.mark.parametrize("source", TRAINED, ids=["weights", "adapters"])
@pytest.mark.parametrize(("platform", "kind"), [("cpu", "cpu"), ("tpu", "TPU v5 lite"), ("gpu", "Tesla T4")])
def test_published_weights_are_trained_on_an_accelerator_only_by_a_config_that_resolves(source, platform, kind, capsys):
    given: list[list[str]] = []
    follow = types.SimpleNamespace(follow=lambda command, folder, every: given.append(command))
    names = {"PLATFORM": platform, "MEMORY": 16, "KIND": kind, "RUNS": "runs", "sys": sys, "live": follow}
    names["T4"] = ["--config.model.compute_dtype=float32"] if "T4" in kind else []  # as the first of these cells has it
    exec(compile(python_of(source), "cell", "exec"), names)
    if platform == "cpu":
        assert not given and "no accelerator" in capsys.readouterr().out
        return
    ((_, _, module, config, *changes),) = given
    (path,) = (x for x in changes if x.startswith("--config.model.path=Qwen/"))
    assert module == "rpg_jax.train"
    changes.remove(path)
    known = resolve(config_files.load(config.removeprefix("--config="), changes).config)
    assert path.rpartition("/")[2].lower() == known.model.size
    assert known.model.compute_dtype == ("float32" if kind == "Tesla T4" else "bfloat16")
    assert (known.model.lora.rank > 0) == ("rpg_jax.export" in source and "--adapter" in source)


@pytest.mark.soak
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in (
        "rpg_jax",
        "experiments",
        "examples",
        "configs",
        "launch/colab",
    ):  # a copy, so that its runs stay out of the repository
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "models"))
    model = pytest.importorskip("tiny_gguf").write(tmp_path / "tiny.gguf", "llama3")
    sizes = {
        "RPG_MODEL": str(model),
        "RPG_METHODS": "DAPO,RPG-REINFORCE-URKL",
        "RPG_OVERRIDES": "--config.train.steps=2 --config.evaluation.problems=4 --config.rollout.prompts_per_step=4",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XLA_FLAGS": "",
    }
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "rpg_jax.sample" in "".join(CODE)
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "no accelerator" in printed and "held out accuracy" in printed
    tables = [
        o["data"]["text/markdown"]
        for c in notebook.cells
        for o in c.get("outputs", [])
        if "text/markdown" in o.get("data", {})
    ]
    assert "| question | before | after |" in tables[0] and "DAPO" in tables[1]
    assert "What is 7 + 8?" in printed and (tmp_path / "runs" / "exported" / "config.json").exists()
