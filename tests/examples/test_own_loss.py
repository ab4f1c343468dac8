"""examples/own_loss.py: from Python and from the command line, stopped and continued, and in the report, as ours."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import own_loss
from rpg_jax import losses
from tests.end_to_end.whole_runs import ROOT, completed, environment

SMALL = {
    "run.name": "own",
    "train.steps": 4,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "evaluation.every": 2,
    "evaluation.problems": 8,
    "checkpoint.every": 2,
    "model.num_layers": 1,
    "warm_start.enabled": False,
}
FIELDS = {
    "loss.name": "examples.own_loss:tempered",
    "loss.arguments": '{"tau": 0.5}',
    "loss.advantage": "examples.own_loss:median_baseline",
    "dynamic_sampling.enabled": False,
}


def test_it_has_at_most_80_lines():
    assert len(Path(own_loss.__file__).read_text(encoding="utf-8").splitlines()) <= 80


def test_the_loss_is_the_formula_of_its_docstring():
    with jax.enable_x64(True):
        check_formula()


def check_formula():
    old, new, ref = np.log([[0.2, 0.5]]), np.log([[0.3, 0.4]]), np.log([[0.25, 0.5]])
    loss, metrics = losses.of_arrays(own_loss.tempered)(
        new, old, np.array([2.0]), np.ones((1, 2)), ref_logprobs=ref, tau=0.5, kl_coef=0.1
    )
    expected = np.mean([-2 * 1.5**0.5 / 0.5 + 0.05 * np.log(1.2) ** 2, -2 * 0.8**0.5 / 0.5 + 0.05 * np.log(0.8) ** 2])
    np.testing.assert_allclose(loss, expected, rtol=1e-12)  # float64
    assert losses.divided(metrics)["far_fraction"] == 1.0  # log 1.5 and log 0.8 are both beyond 0.2


def test_the_advantage_leaves_out_what_has_no_reward():
    rewards, counted = jnp.array([[0.0, 1.0, 5.0, 9.0]]), jnp.array([[True, True, True, False]])
    np.testing.assert_array_equal(own_loss.median_baseline(rewards), [[-3, -2, 2, 6]])
    np.testing.assert_array_equal(own_loss.median_baseline(rewards, counted)[:, :3], [[-1, 0, 4]])
    assert np.isfinite(own_loss.median_baseline(rewards, jnp.zeros((1, 4), bool))).all()


def command(folder, fields):
    flags = [f"--config.{name}={value}" for name, value in {**SMALL, **FIELDS, **fields}.items()]
    return ["-m", "rpg_jax.train", "--config=tiny", f"--config.run.dir={folder}", *flags]


def numbers(folder):
    """The metrics of every step without those that measure the machine."""
    lines = map(json.loads, (folder / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    aside = ("time/", "host/", "seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(aside)} for line in lines]


@pytest.mark.slow  # five processes
def test_a_run_from_python_and_one_from_the_command_line_that_stopped_are_the_same_bits(shared, tmp_path):
    env = environment(shared)
    program = f"from examples import own_loss; own_loss.main(**{{**{SMALL}, 'run.dir': {str(tmp_path / 'python')!r}}})"
    program = program.replace("'train.steps': 4", "'steps': 4")
    python = completed(["-c", program], env).stdout
    completed(command(tmp_path / "command", {"train.steps": 2}), env)
    resumed = completed(command(tmp_path / "command", {}), env).stdout
    assert "continuing" in resumed and "after step 2" in resumed
    checksums = [re.findall(r"weights checksum: (\w+)", said) for said in (python, resumed)]
    assert checksums[0] == checksums[1] and len(checksums[0]) == 1
    assert numbers(tmp_path / "python") == numbers(tmp_path / "command")
    assert all("far_fraction" in line and "kl_gradient_share" in line for line in numbers(tmp_path / "python")[1:])

    changed = {"loss.arguments": '{"tau": 0.25}', "train.steps": 4}
    completed(command(tmp_path / "other", changed), env)
    runs = [tmp_path / "python" / "own", tmp_path / "other" / "own"]
    completed(["-m", "rpg_jax.report", *runs], env)
    page = (runs[0] / "report.html").read_text(encoding="utf-8")
    assert "loss.arguments" in page and "0.25" in page, "the table of what differs"
    summary = (runs[0] / "summary.md").read_text(encoding="utf-8")
    assert "| loss | `examples.own_loss:tempered` |" in summary
    assert '| hyperparameters of the loss | `{"tau": 0.5}` |' in summary


def test_the_command_of_its_head_has_the_names_of_the_functions():
    head = ast.get_docstring(ast.parse(Path(own_loss.__file__).read_text(encoding="utf-8")))
    for name, value in FIELDS.items():
        assert f"--config.{name}=" in head and str(value) in head
    assert (ROOT / "examples" / "own_loss.py").is_file()
