"""examples/rpg_loop.py: short, without `rpg_jax.runs`, and it learns."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from examples import rpg_loop
from rpg_jax import data
from rpg_jax.types import Completion
from tests.end_to_end.whole_runs import completed, environment

SOURCE = Path(rpg_loop.__file__).read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)


def completion(text):
    return Completion(rpg_loop.encode(text), np.zeros(len(text), np.float32), "stop", 0)


def test_it_has_at_most_300_lines_and_nothing_of_runs():
    assert len(SOURCE.splitlines()) <= 300
    names = [alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import) for alias in node.names]
    names += [
        f"{node.module}.{alias.name}"
        for node in ast.walk(TREE)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    own = {name.split(".")[1] for name in names if name.startswith("rpg_jax.")}
    assert own == {"data", "losses", "models", "rollout", "types"}


def test_no_function_is_inside_another_and_no_class_has_methods():
    inside = [
        node.name
        for outer in ast.walk(TREE)
        if isinstance(outer, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(outer)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) and node is not outer
    ]
    assert inside == []


def test_a_row_trains_the_tokens_of_the_completion_and_no_other():
    rows = rpg_loop.rows_of([rpg_loop.encode("1+2="), rpg_loop.encode("99+99=")], [rpg_loop.encode("3\n")] * 2)
    for tokens, mask in zip(rows.tokens, rows.mask, strict=True):
        assert rpg_loop.decode(tokens[1:][mask > 0]) == "3\n"


def test_only_the_right_answer_and_its_end_are_rewarded():
    problem = data.Problem(prompt_id=0, prompt="12+34=", answer="64", source="arithmetic")
    for text, expected in {"64\n": 1.0, "46\n": 0.0, "64": 0.0, "640\n": 0.0}.items():
        assert rpg_loop.reward(problem, completion(text)) == expected


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.slow)])
def test_the_held_out_accuracy_rises(seed, shared, tmp_path):
    """From 0.44 to 0.62 and from 0.50 to 0.73 when this was written; the standard error of each number is 0.03."""
    arguments = ["-m", "examples.rpg_loop", f"--seed={seed}", f"--picture={tmp_path / 'curve.png'}"]
    said = completed(arguments, environment(shared, optimised=True)).stdout
    accuracies = [float(number) for number in re.findall(r"held-out (\S+)", said)]
    assert len(accuracies) == 9 and accuracies[0] >= 1 / 3
    assert np.mean(accuracies[-3:]) > accuracies[0] + 0.1
    gaps = [float(number) for number in re.findall(r"gap (\S+)", said)]
    assert max(gaps) < 1e-4  # nats; float32 rounds a log-probability of three layers to about 1e-5
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
