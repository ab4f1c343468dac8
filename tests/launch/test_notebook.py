"""The notebook imports the package and defines nothing, carries its outputs, and runs from top to bottom."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "launch" / "colab" / "rpg_small.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def python_of(source: str) -> ast.Module:
    """A cell's tree, with `pass` in place of commands to the shell and to IPython."""
    command = re.compile(r"^( *)(?:\w+ = )?[!%].*$", re.MULTILINE)
    return ast.parse(command.sub(r"\1pass", source.replace("\\\n", " ")))


def test_no_cell_defines_anything():
    for source in CODE:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(python_of(source)) if isinstance(node, kinds)], source


def test_it_is_small_and_names_no_machine():
    text = NOTEBOOK.read_text()
    assert len(text) < 300_000
    assert "/work" not in text and "/tmp" not in text


@pytest.mark.soak
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in ("rpg_jax", "configs", "tests/end_to_end"):  # a copy, so that its runs stay out of the repository
        shutil.copytree(ROOT / name, tmp_path / name)
    sizes = {
        "RPG_STEPS": "2",
        "RPG_CONFIG": "tests/end_to_end/micro.py",
        "RPG_METHODS": "DAPO,RPG-REINFORCE-URKL",
        "RPG_TABLE_STEPS": "1",
        "RPG_TABLE_OVERRIDES": "--config.evaluation.problems=4 --config.evaluation.k=2 --config.model.num_layers=1 "
        "--config.model.embed_dim=64 --config.rollout.prompts_per_step=8 --config.warm_start.enabled=False "
        "--config.dynamic_sampling.enabled=False",
        "XLA_FLAGS": "",
    }
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "rpg_jax.sample" in "".join(CODE)
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "no accelerator" in printed or "held out accuracy" in printed
    assert "17+25=" in printed and (tmp_path / "runs" / "exported" / "config.json").exists()
