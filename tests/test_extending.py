"""docs/extending.md, carried out: its blocks change a copy of the repository, its commands run there at tiny sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(
    part.split("\n", 1) for part in (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split("\n## ")[1:]
)

SMALL = {  # a run of seconds, whatever the example: sizes and times, nothing that an example is about
    "train.steps": 2,
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.slots": 16,
    "model.num_layers": 1,
    "warm_start.enabled": False,
    "dynamic_sampling.enabled": False,
    "evaluation.problems": 8,
    "evaluation.k": 2,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    tests = ("tests/conftest.py", "tests/losses", "tests/test_docs.py")
    for name in ("rpg_jax", "configs", "docs", "pyproject.toml", *tests):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    return folder


@pytest.fixture(scope="module")
def changed():
    """Sections whose files are in the copy."""
    return set()


def change(folder: Path, section: str, *kinds: str) -> None:
    """Carries out the blocks of some kinds of a section, in its order."""
    for kind, text in BLOCK.findall(SECTIONS[section]):
        if kind in kinds:
            carry_out(folder, kind, text)


def carry_out(folder: Path, kind: str, text: str) -> None:
    """Adds a block of Python to the file, or to the table in it, that it names, or runs a block of commands."""
    if kind == "python":
        comment, text = text.split("\n", 1)
        name, _, table = comment.removeprefix("# ").partition(", in ")
        before = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else ""
        if table:
            rows = re.compile(rf"(^{table}\b.*?)(^ *\}}$)", re.MULTILINE | re.DOTALL)
            after, found = rows.subn(lambda m: m[1] + text + m[2], before)
            assert found == 1, f"{found} tables {table} in {name}"
        else:
            after = f"{before}\n\n{text}" if before else text
        (folder / name).write_text(after, encoding="utf-8")
        return
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(folder))
    for line in text.splitlines():
        if line.startswith("export "):
            name, value = line.removeprefix("export ").split("=", 1)
            environment[name] = value
            continue
        program, *arguments = line.split()
        assert program == "python"
        if trains := {"rpg_jax.train", "rpg_jax.reproduce"} & set(arguments):
            arguments += ["--"] * ("rpg_jax.reproduce" in trains)
            arguments += [f"--config.{field}={value}" for field, value in SMALL.items()]
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.soak
@pytest.mark.parametrize("section", SECTIONS)
def test_the_worked_example_works(copy, changed, section):
    names = list(SECTIONS)
    for earlier in names[: names.index(section)]:  # the last uses the third's config
        if earlier not in changed:
            change(copy, earlier, "python")
    before = set(copy.glob("runs/*/metrics.jsonl"))
    change(copy, section, "python", "sh")
    changed.update(names[: names.index(section) + 1])
    runs = set(copy.glob("runs/*/metrics.jsonl")) - before
    assert len(runs) == SECTIONS[section].count("\npython -m rpg_jax.train")
    for run in runs:
        assert json.loads(run.read_text(encoding="utf-8").splitlines()[-1])["step"] == SMALL["train.steps"]


def test_the_page_has_four_examples():
    assert list(SECTIONS) == ["A new divergence", "A new task", "A new model size", "A new chip layout"]
