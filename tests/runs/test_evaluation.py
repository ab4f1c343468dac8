"""An evaluation killed anywhere goes on to the same bytes, and samples only what is missing."""

import argparse
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from configs import tiny
from rpg_jax import evaluate, storage
from rpg_jax.data import Problem
from rpg_jax.data.groups import Group
from rpg_jax.models.config import DecoderConfig, Rope, Yarn
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.runs import config_files, evaluation
from rpg_jax.runs.resolve import resolve
from rpg_jax.types import Completion

SETS = {
    "even": [Problem(i, f"p{i}", str(i), "math_dapo", samples=2) for i in range(5)],
    "odd": [Problem(i, f"q{i}", str(i), "math_dapo", samples=1 + i // 2) for i in range(3)],
}
MODEL = DecoderConfig(99, 2, 16, 2, 1, 8, 32)


class FakeSampler:
    """Answers "Answer: ä{prompt_id + index % 2}"; counts the calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, problems, *, step, group_size):
        self.calls += 1
        return [self.group(problem, group_size) for problem in problems]

    def group(self, problem, size):
        completions = [Completion(np.arange(i + 1), np.zeros(i + 1), "stop", 0) for i in range(size)]
        texts = [f"ä\nAnswer: {problem.prompt_id + i % 2}" for i in range(size)]
        right = np.array([1.0 - i % 2 for i in range(size)])
        return Group(problem, np.arange(3), completions, texts, 2 * right - 1, right, failures=[None] * size)


def run(file):
    sampler = FakeSampler()
    chunks = evaluation.plan(SETS, lambda p: p.samples, completions=4)
    with Scorer("math_dapo") as scorer:
        done = list(evaluation.complete(file, chunks, sampler, scorer, step=3))
    return done, sampler.calls


def test_chunks_keep_the_order_and_hold_problems_with_as_many_samples():
    chunks = evaluation.plan(SETS, lambda p: p.samples, completions=4)
    assert [key for chunk in chunks for key in chunk.keys] == [
        (name, p.prompt_id, i) for name, problems in SETS.items() for p in problems for i in range(p.samples)
    ]
    assert [(c.set, len(c.problems), c.samples) for c in chunks] == [
        ("even", 2, 2), ("even", 2, 2), ("even", 1, 2), ("odd", 2, 1), ("odd", 1, 2),
    ]  # fmt: skip
    assert len(evaluation.plan(SETS, lambda p: 9, completions=4)) == 8  # a problem is never split


def test_every_completion_is_kept_with_its_verdict(tmp_path):
    done, calls = run(tmp_path / "sub" / "c.jsonl")
    records = [record for _, own in done for record in own]
    assert calls == len(done) == 5 and len(records) == 14
    assert (records[1]["answer"], records[1]["verdict"], records[1]["tokens"]) == ("1", "wrong", 2)
    assert {r["verdict"] for r in records if r["index"] == 0} == {"right"}


@pytest.mark.parametrize("line", [b"5\n", b"{}\n", b"[" * 10**5 + b"\n"])
def test_a_line_that_no_evaluation_has_written_is_replaced(tmp_path, line):
    run(file := tmp_path / "c.jsonl")
    whole = file.read_bytes()
    file.write_bytes(line + whole.partition(b"\n")[2])
    run(file)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("cut", [0, 1, 200, 1500, -1])
def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(tmp_path, cut):
    file = tmp_path / "c.jsonl"
    expected, _ = run(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    done, calls = run(file)
    assert file.read_bytes() == whole and done == expected
    missing = whole[cut:].count(b"\n")
    assert 1 <= calls <= 5 and (missing > 2 or calls == 1)
    assert run(file)[1] == 0


def test_a_failed_verdict_keeps_its_kind():
    group = FakeSampler().group(SETS["even"][0], 2)
    group = Group(**{**vars(group), "failures": [None, "timeout"]})
    with Scorer("math_dapo") as scorer:
        assert [r["verdict"] for r in evaluation.records("s", [group], scorer)] == ["right", "timeout"]


def test_a_reward_in_a_file_is_a_reward_of_evaluate_too(tmp_path):
    (tmp_path / "mine_here.py").write_text("def score(completion, answer):\n    return 1.0\n", encoding="utf-8")
    flags = dict.fromkeys(("sets", "temperature", "problems", "max_tokens", "seed"))
    asked = argparse.Namespace(rewards=f"{tmp_path}/mine_here.py:score", **flags)
    expected = {"rewards.parts": "mine_here:score", "rewards.accuracy": None}
    assert evaluate.changes(asked, tiny.get_config()) == expected
    asked.rewards = "exact"
    assert evaluate.changes(asked, tiny.get_config()) == {"rewards.parts": "exact", "rewards.accuracy": None}


@pytest.mark.parametrize(
    ("before", "asked", "accuracy", "right_above"),
    [
        (("math_dapo:1,format:0.1", "math_dapo", None), "gsm8k", None, None),
        (("mine:grade", None, 1.5), "gsm8k", None, None),  # of a grade; gsm8k scores 1 at most
        (("mine:grade", None, 1.5), "mine:grade,format:0.1", None, 1.5),
        (("exact", "mine:grade", 1.5), "mine:grade", None, 1.5),
        (("mine:grade", None, 0.5), "judge", None, 0.5),  # no flag sets the number that a judge needs
        (("mine:grade", None, 1.5), "format", None, None),  # refused later: no part can decide
        (("mine:grade", None, 1.5), None, None, 1.5),
        (("exact", "gsm8k", None), None, "gsm8k", None),
    ],
)
def test_the_rewards_of_the_command_line_say_what_is_right(before, asked, accuracy, right_above):
    fields = dict(zip(("rewards.parts", "rewards.accuracy", "rewards.right_above"), before, strict=True))
    config = config_files.changed(tiny.get_config(), fields)
    flags = dict.fromkeys(("sets", "temperature", "problems", "max_tokens", "seed"))
    options = argparse.Namespace(rewards=asked, **flags)
    found = config_files.changed(config, evaluate.changes(options, config)).rewards
    assert (found.parts, found.accuracy, found.right_above) == (asked or before[0], accuracy, right_above)
    kept = config_files.changed(config, evaluate.changes(options, config, fields)).rewards
    assert (kept.accuracy, kept.right_above) == before[1:]  # of --config.rewards.…, which somebody just gave


def test_sets_without_a_number_of_problems_take_as_many_as_the_field_allows():
    flags = dict.fromkeys(("rewards", "temperature", "problems", "max_tokens", "seed"))
    asked = argparse.Namespace(sets="A=a", **flags)
    changed = config_files.changed(tiny.get_config(), evaluate.changes(asked, tiny.get_config()))
    assert resolve(changed).evaluation.problems == 10**9


def policy_of(config, model=MODEL):
    tokenizer, layout = SimpleNamespace(digest=lambda: "d" * 64), SimpleNamespace(model=model)
    task = SimpleNamespace(held_out=SETS)
    experiment = SimpleNamespace(config=config, task=task, tokenizer=tokenizer, layout=layout)
    return SimpleNamespace(experiment=experiment, step=3)


def test_other_positions_of_a_model_and_other_limits_of_prompts_are_another_evaluation():
    config = tiny.get_config()
    models = [MODEL, *(dataclasses.replace(MODEL, rope=rope) for rope in (Rope(1e4), Rope(scaling=Yarn(4.0, 512))))]
    configs = [
        config_files.changed(config, change)
        for change in ({"task.max_prompt_tokens": 7}, {"task.too_long": "truncate"})
    ]
    policies = [policy_of(config, model) for model in models] + [policy_of(changed) for changed in configs]
    found = [storage.files.to_json(evaluation.settings_of(policy, "mine", 4, "0" * 16)) for policy in policies]
    assert len(set(found)) == len(found) == 5
    same = policy_of(config, dataclasses.replace(MODEL))
    assert storage.files.to_json(evaluation.settings_of(same, "mine", 4, "0" * 16)) == found[0]


def test_an_edited_tool_or_environment_is_another_evaluation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tool_here", "game_here"):
        (tmp_path / f"{name}.py").write_text("one = 1\n", encoding="utf-8")
    tool = {"environment.name": "tools", "environment.options": '{"tools": {"tool_here:call": {}}}'}
    for fields in (tool, {"environment.name": "game_here:Game"}):
        config = tiny.get_config()
        config.update_from_flattened_dict(fields)
        policy = policy_of(config)
        before = evaluation.settings_of(policy, "mine", 4, "0" * 16)["code"]
        for name in ("tool_here", "game_here"):
            (tmp_path / f"{name}.py").write_text(f"two = {fields!r}\n", encoding="utf-8")
        assert evaluation.settings_of(policy, "mine", 4, "0" * 16)["code"] != before
