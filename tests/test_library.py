"""docs/library.md: its programs run from another folder, and a run from Python is the command's run."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax.environments import Turn
from rpg_jax.runs import config_files
from tests import test_export
from tests.end_to_end.whole_runs import completed, environment

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
LOOP, TORCH, PROOF, RUN, POLICY = BLOCKS
run = test_export.run

SMALL = {
    "run.name": "library",
    "train.steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "evaluation.every": 2,
    "task.template": "{question}=",
    "warm_start.enabled": False,
    "rewards.right_above": 0.5,
}
ROWS = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(6) for b in range(5)]
REWARD = """
def close(completion, answer, prompt):
    return 1 / (1 + abs(int(completion) - int(answer))) if completion.isdecimal() else 0.0
"""


def test_importing_the_package_loads_nothing_else():
    code = "import sys, rpg_jax; dir(rpg_jax); assert not {'jax', 'numpy', 'ml_collections'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_public_name_is_there_and_described():
    for name in rpg_jax.__all__:
        if name == "__version__":
            continue
        assert getattr(rpg_jax, name).__doc__, name
    assert callable(rpg_jax.train)
    with pytest.raises(ImportError, match="rpg_jax.train is a function; the command's is rpg_jax.runs.train_command"):
        importlib.import_module("rpg_jax.train")
    assert callable(rpg_jax.train), "the module has not taken the function's place"
    with pytest.raises(AttributeError, match="no attribute 'trian'; it has Policy, Result"):
        rpg_jax.trian  # noqa: B018


def test_a_change_of_a_config_names_the_field_or_its_type():
    tiny = config_files.load("tiny").config
    assert config_files.changed(tiny, {"train.steps": 3, "run.name": "x"}).train.steps == 3
    with pytest.raises(ValueError, match="no config field 'optimizer.lr'; did you mean optimizer.learning_rate"):
        config_files.changed(tiny, {"optimizer.lr": 1e-3})
    with pytest.raises(ValueError, match="train.steps='many' must be of the type int$"):
        config_files.changed(tiny, {"train.steps": "many"})
    with pytest.raises(ValueError, match=r"""loss.arguments={'tau': 1} must be of the type str, as '{"tau": 1}'$"""):
        config_files.changed(tiny, {"loss.arguments": {"tau": 1}})


def test_what_is_said_twice_or_not_at_all_is_refused():
    with pytest.raises(ValueError, match="reward=… and overrides of rewards.parts say the same thing twice"):
        rpg_jax.train("tiny", reward="exact", overrides={"rewards.parts": "exact"})
    with pytest.raises(ValueError, match="data=… and overrides of task.train say the same thing twice"):
        rpg_jax.train("tiny", data=ROWS, overrides={"task.train": "x.jsonl"})
    with pytest.raises(ValueError, match=r"held_out=\[…\] needs data=\[…\] to train on"):
        rpg_jax.train("tiny", held_out=ROWS)
    with pytest.raises(ValueError, match="the name of a set has no comma and no equals sign, got 'a=b'"):
        rpg_jax.train("tiny", data=ROWS, held_out={"a=b": ROWS})


@pytest.mark.slow  # a process of its own
def test_the_loop_of_the_page_learns_in_another_folder(shared, tmp_path):
    said = python(LOOP, tmp_path, shared)
    assert float(re.search(r"reward (\S+),", said)[1]) > 0.8  # it starts at 0.1


@pytest.mark.slow  # a process of its own
def test_the_pages_comparison_with_pytorch_holds(shared, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    assert python(TORCH, tmp_path, shared) == "equal\n"


@pytest.mark.slow  # a process of its own
def test_the_page_proves_a_gradient_and_finds_one_that_is_wrong(shared, tmp_path):
    leave_one_out, median = re.findall(r": (\S+) of the gradient", python(PROOF, tmp_path, shared))
    assert float(leave_one_out) < 1e-12 and float(median) > 0.1


@pytest.mark.slow  # a run
def test_the_pages_run_and_its_policy_work_in_another_folder(shared, tmp_path):
    assert '"train.steps": 20' in RUN
    said = python(RUN.replace('"train.steps": 20', '"train.steps": 2') + POLICY, tmp_path, shared)
    assert "runs/tiny-rpg-reinforce-urkl-data=" in said and (tmp_path / "exported" / "tokenizer.json").is_file()


@pytest.mark.slow  # two runs
def test_a_run_from_python_is_the_commands_run(shared, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import own

    steps, overrides = [], {**SMALL, "run.dir": "python"}
    result = rpg_jax.train("tiny", data=iter(ROWS), reward=own.close, overrides=overrides, on_step=steps.append)
    assert [step.number for step in steps] == [1, 2]
    for step, line in zip(steps, result.metrics[1:], strict=True):
        assert step.metrics["reward"] == line["reward"] and ("eval/accuracy" in step.metrics) == (step.number == 2)
    config = json.loads((tmp_path / "python" / "library" / "config.json").read_text(encoding="utf-8"))
    assert result.finished and config["rewards"]["parts"] == "own:close:1.0"
    fields = {**SMALL, "run.dir": "command", "rewards.parts": config["rewards"]["parts"], "task.name": "files"}
    fields["rewards.overlong_shaping"] = False  # a reward that is handed over is not shaped
    fields |= {name: config["task"][name.partition(".")[2]] for name in ("task.train", "task.held_out_sets")}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    env = environment(shared, devices=jax.device_count()) | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    completed(["-m", "rpg_jax.train", "--config=tiny", *flags], env, cwd=tmp_path)
    lines = (tmp_path / "command" / "library" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(result.metrics) == 3
    for line, mine in zip(lines, result.metrics, strict=True):
        for name, value in json.loads(line).items():
            if not name.startswith(("time/", "host/")) and name not in ("seconds", "tokens_per_second"):
                assert mine[name] == value, name


class Again:
    """A wrong answer may be corrected; an async function, which only this process can call."""

    def __init__(self):
        self.heard = []

    def reset(self, problem):
        return problem.messages

    async def step(self, problem, messages, completion):
        self.heard.append([message["content"] for message in messages])
        right = completion.strip() == problem.answer
        return Turn("" if right else problem.prompt, 1.0 if right else -0.1, right)


@pytest.mark.slow  # a run
def test_an_environment_that_is_handed_over_plays_in_this_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again, changes = Again(), {"environment.max_turns": 3, "rollout.max_tokens": 48, "rewards.overlong_shaping": False}
    result = rpg_jax.train("tiny", data=ROWS, environment=again, overrides={**SMALL, **changes})
    config = json.loads((Path(result.folder) / "config.json").read_text(encoding="utf-8"))
    assert result.finished and config["environment"]["name"] == "tests.test_library:Again"
    assert config["rewards"]["parts"] == "environment" and -0.3 <= result.metrics[-1]["reward"] <= 1
    later = [said for said in again.heard if len(said) > 1]
    assert later and all(said[0] == said[2] for said in later)  # what it asks again is in the conversation
    with pytest.raises(ValueError, match="environment=… and overrides of environment.name say the same thing twice"):
        rpg_jax.train("tiny", environment=again, overrides={"environment.name": "again:Again"})


@pytest.mark.slow  # a model is compiled
def test_a_policy_samples_what_it_says_and_scores_what_it_sampled(run):
    policy = rpg_jax.Policy.from_run(run[0])
    samples = [s for group in policy.sample(["1+2=", "3+4="], k=2, seed=1) for s in group]
    scored = policy.logprobs(["1+2=", "1+2=", "3+4=", "3+4="], samples)
    for sample, own in zip(samples, scored, strict=True):
        np.testing.assert_allclose(own, sample.logprobs, atol=1e-5)  # float32, programs of other shapes
    other = rpg_jax.Policy.from_run(run[0], overrides={"loss.name": "mine:loss"})  # a loss that is not imported here
    np.testing.assert_array_equal(other.logprobs(["1+2="], samples[:1]), policy.logprobs(["1+2="], samples[:1]))
    text = policy.logprobs(["1+2="], ["12"])[0]
    assert text.shape == (2,) and policy.logprobs([], []) == []
    assert [s.text for s in policy.sample(["1+2="], k=1, temperature=0, max_tokens=1)[0]][0] in "0123456789+="
    with pytest.raises(ValueError, match="1 prompts and 2 completions"):
        policy.logprobs(["1+2="], ["1", "2"])
    with pytest.raises(ValueError, match="completion 0 has no token"):
        policy.logprobs(["1+2="], [""])
    with pytest.raises(ValueError, match="'11111111' has 8 tokens, more than task.max_prompt_tokens=6"):
        policy.sample(["1" * 8])


def python(program: str, folder: Path, shared: Path) -> str:
    """What a program prints that runs in `folder`, with this package on its path."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    return completed(["program.py"], environment(shared), cwd=folder).stdout
