"""A model, rows and a reward are a whole run: what nobody set is chosen, and said with its field."""

from __future__ import annotations

import json
import shutil

import pytest

import rpg_jax
from rpg_jax.runs import reinforcement, train_call, train_command
from rpg_jax.runs.train_call import prepared

MODEL = "configs/chains_start"
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
NOTHING = dict(data=ROWS, held_out=None, reward=lambda completion, answer, prompt: 1.0)


def short(completion: str, answer: str, prompt: str) -> float:
    return 1.0 if len(completion) < 6 else 0.2


def config_of(tmp_path, **overrides):
    return prepared(None, {"run.dir": str(tmp_path), **overrides}, model=MODEL, **NOTHING)[0]


def test_every_choice_is_said_with_a_field_that_exists_and_nothing_is_shaped(tmp_path, capsys):
    config = config_of(tmp_path)
    said, *lines = capsys.readouterr().out.splitlines()
    assert said == "chosen for this run, each with the field that changes it:" and len(lines) == 10
    named = [field for line in lines for field in line.rpartition("[")[2].rstrip("]").split(", ")]
    for field in named:
        section, _, last = field.rpartition(".")
        assert last in (config[section] if section else config)
    assert config.rewards.overlong_shaping is False and config.dynamic_sampling.enabled is False
    assert not config.warm_start.enabled and config.task.template == "none"
    assert config.model.compute_dtype == "float32"  # these are CPUs
    assert config.rollout.slots == config.rollout.prompts_per_step * config.rollout.group_size
    assert config.run.name.startswith("chains_start-rpg-reinforce-urkl-")


def test_what_was_asked_for_stays_and_a_method_by_name_brings_its_shaping(tmp_path):
    config = config_of(tmp_path, **{"rollout.max_tokens": 5, "method": "DAPO", "optimizer.learning_rate": 1e-4})
    assert (config.rollout.max_tokens, config.optimizer.learning_rate) == (5, 1e-4)
    assert config.rewards.overlong_shaping is None and config.dynamic_sampling.enabled is None  # the method's row
    assert config.train.packed_length >= config.task.max_prompt_tokens + 5
    assert [config_of(tmp_path, **{"train.steps": n}).evaluation.every for n in (3, 24, 400)] == [1, 6, 10]


def test_the_limit_of_prompts_holds_99_percent_of_the_rows(tmp_path):
    rows = [*({**row, "question": row["question"] + " " * n} for n in range(10) for row in ROWS)]
    long = [{"question": "1+" * 30 + str(n), "answer": "1"} for n in range(2)]
    config = prepared(None, {"run.dir": str(tmp_path)}, model=MODEL, **NOTHING | {"data": [*rows, *long]})[0]
    assert config.task.max_prompt_tokens < 30


def test_a_prompt_that_leaves_no_room_for_a_completion_is_left_out(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    written = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(written | {"max_position_embeddings": 128}), encoding="utf-8")
    long = [{"question": "1+" * 50 + str(n), "answer": "1"} for n in range(3)]
    of = {"model": str(model)} | NOTHING | {"data": [*ROWS, *long]}
    config = prepared(None, {"run.dir": str(tmp_path)}, **of)[0]
    assert (config.task.max_prompt_tokens, config.rollout.max_tokens) == (64, 64)
    config = prepared(None, {"run.dir": str(tmp_path), "rollout.max_tokens": 8}, **of)[0]
    assert 64 < config.task.max_prompt_tokens <= 120 and config.rollout.max_tokens == 8


@pytest.mark.parametrize(
    ("weights", "adapters", "rate"),
    [
        (135e6, False, 1e-5),
        (135e6, True, 1e-4),
        (0.6e9, False, 4e-6),
        (1e5, False, 2e-4),
        (4e9, False, 1e-6),
        (70e9, False, 1e-6),
        (4e9, True, 1e-5),
    ],
)
def test_the_rate_falls_with_the_size_and_has_its_reason(weights, adapters, rate):
    found, reason = train_call._rate(int(weights), adapters=adapters)
    assert found == pytest.approx(rate) and "because" in reason and ("adapters" in reason) == adapters


@pytest.mark.slow  # compiles, or waits, for seconds
def test_a_call_trains_the_reward_that_was_passed_and_a_failure_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = {"train.steps": 1, "rollout.max_tokens": 4, "rollout.prompts_per_step": 2, "rollout.group_size": 2}
    few |= {"evaluation.problems": 2, "evaluation.every": 5}

    def reward(completion: str, answer: str, prompt: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match="does not cover|devices"):
        rpg_jax.train(model=MODEL, data=ROWS, reward=reward, overrides={**few, "mesh.fsdp": 3})
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == ["rows"]

    def fails(*arguments):
        raise ValueError("the first evaluation fails")

    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="the first evaluation fails"):
        failing.setattr("rpg_jax.runs.evaluation.HeldOut.evaluate", fails)  # the session is open, its files are there
        rpg_jax.train(model=MODEL, data=ROWS, reward=reward, overrides=few)
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == ["rows"]
    result = rpg_jax.train(model=MODEL, data=ROWS, reward=reward, overrides=few)
    assert result.finished and result.metrics[1]["reward"] == 1.0  # nothing is taken from it
    assert not any(name.startswith("reward/") for name in result.metrics[1])
    assert "is shaped" not in capsys.readouterr().out


def test_the_command_takes_a_file_of_rows_and_a_function_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "mine_of_calls.py").write_text("def f(completion, answer):\n    return 1.0\n", encoding="utf-8")
    seen = []
    monkeypatch.setattr(reinforcement, "run", lambda config, functions: seen.append((config, functions)) or 0)
    arguments = ["--data=rows.jsonl", "--reward=mine_of_calls.py:f", "--config.train.steps=3"]
    assert train_command.main([f"--model={MODEL}", *arguments]) == 0
    [(config, functions)] = seen
    assert config.rewards.parts == "mine_of_calls:f:1.0" and not functions and config.train.steps == 3
    assert train_command.main([f"--model={MODEL}", "--data=none.jsonl", arguments[1]]) == 2


def test_a_bad_row_is_named_by_the_users_file_and_its_line_there(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:2], {"text": "1+1="}, *ROWS]), encoding="utf-8")
    of = {"model": MODEL} | NOTHING | {"data": str(file)}
    with pytest.raises(ValueError, match=r"1 of 28 rows are bad[^\n]*\n  .*mine\.jsonl, line 3: none of \['question'"):
        prepared(None, {"run.dir": str(tmp_path)}, **of)
    assert prepared(None, {"run.dir": str(tmp_path), "task.bad_rows": "skip"}, **of)[0].task.train


def test_what_is_missing_is_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="which model"):
        rpg_jax.train(data=ROWS, reward=short)
    with pytest.raises(ValueError, match="which problems"):
        rpg_jax.train(model=MODEL, reward=short, overrides={"run.dir": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no such file"):
        rpg_jax.train(model=MODEL, data=str(tmp_path / "none.jsonl"), reward=short)
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}', encoding="utf-8")
    with pytest.raises(ValueError, match="'gemma' is not supported; the families are"):
        rpg_jax.train(model=tmp_path, data=ROWS, reward=short, overrides={"run.dir": str(tmp_path)})
    assert train_command.main(["--data=rows.jsonl"]) == 2 and "which model" in capsys.readouterr().err


def test_what_cannot_run_is_refused_by_name_before_weights_are_loaded(tmp_path, monkeypatch):
    few = {"run.dir": str(tmp_path), "train.steps": 1}
    with pytest.raises(
        ValueError, match=r"rollout.max_tokens=100000 are more than the \d+ tokens that configs/chains_st"
    ):
        rpg_jax.train(model=MODEL, data=ROWS, reward=short, overrides={**few, "rollout.max_tokens": 100_000})
    monkeypatch.setattr("os.sysconf", lambda name: 1000)  # a megabyte
    with pytest.raises(
        ValueError, match=r"(training|sampling) needs 0.0 GiB or more .*rollout.max_tokens=64, rollout.sl"
    ):
        rpg_jax.train(model=MODEL, data=ROWS, reward=short, overrides=few)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"rollout": {}, "train": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="run is a run and no model: --config.run.start_from=.* python -m rpg_jax.exp"):
        rpg_jax.train(model=run, data=ROWS, reward=short, overrides=few)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["rows", "run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 3}, "config=3: give the name of a config"),
        ({"config": "tiny", "overrides": ["train.steps=1"]}, "overrides=.*: give a dict of fields"),
        ({"config": "tiny", "on_step": "print"}, "on_step='print': give a function"),
        ({"config": "tiny", "overrides": {"optimizer.learning_rate": True}}, "optimizer.learning_rate=True must be a"),
        ({"config": "tiny", "overrides": {"train.steps": True}}, "train.steps=True must be a number"),
    ],
)
def test_arguments_of_another_kind_are_refused_before_a_run_begins(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        train_call.train(**arguments)
    assert not list(tmp_path.iterdir())


def test_limits_are_those_of_the_tokenizer_that_the_run_will_have(tmp_path):
    """A folder of weights alone, with the tokenizer of another one."""
    model = shutil.copytree(MODEL, tmp_path / "weights", ignore=shutil.ignore_patterns("token*"))
    overrides = {"run.dir": str(tmp_path), "model.tokenizer": MODEL}
    config = prepared(None, overrides, model=str(model), **NOTHING)[0]
    assert config.task.max_prompt_tokens == config_of(tmp_path).task.max_prompt_tokens


def test_a_field_that_was_set_and_is_not_read_has_a_line(tmp_path, capsys):
    nothing = dict.fromkeys(("model", "data", "held_out", "reward"))
    train_call.prepared("tiny", {"task.links": "2-3", "run.dir": str(tmp_path)}, **nothing)
    assert capsys.readouterr().out == "task.links=2-3 has no effect here: only a run with task.name=chains reads it\n"
