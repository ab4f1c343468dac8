"""Completions of one's own prompts, and what is said about them."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from rpg_jax import Policy, sample
from rpg_jax.runs.policy import Sample
from tests import test_export

pytestmark = pytest.mark.slow  # a model is compiled
run = test_export.run


def test_every_prompt_has_its_completions_and_what_may_surprise_is_said(run, capfd):
    assert sample.main([f"--run={run[0]}", "--prompt=1+2=", "--prompt=1 + hello", "--k=2"]) == 0
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "1+2=" and lines[3] == "1 + hello" and len(lines) == 6
    assert said.err.splitlines() == [
        "'1 + hello': the run's tokenizer does not know ' ', 'h', 'e', 'l', 'o'",
        "answers are written from the lowest digit (task.reverse): 24 is 42",
    ]


def test_a_run_without_a_checkpoint_says_when_the_first_comes(run, tmp_path, capsys):
    young = tmp_path / "young"
    shutil.copytree(run[0], young, ignore=shutil.ignore_patterns("checkpoints"))
    assert sample.main([f"--run={young}", "--prompt=1+2="]) == 2
    every = json.loads((young / "config.json").read_text(encoding="utf-8"))["checkpoint"]["every"]
    when = f"there is one after each {every} steps and after the last"
    assert capsys.readouterr().err == f"error: {young} has no checkpoint yet; {when}\n"


def test_an_accelerator_that_is_not_there_is_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: (_ for _ in ()).throw(RuntimeError("no backend 'tpu'")))
    assert sample.main([f"--run={run[0]}", "--prompt=1+2="]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no accelerator on ") and "no backend 'tpu'" in error and error.count("\n") == 1


def test_a_completion_of_several_lines_stays_together_and_says_whether_it_was_cut(monkeypatch, capsys):
    nothing = np.zeros(0)
    answers = [[Sample("Two lines:\n1 + 1", nothing, nothing, "length"), Sample("2", nothing, nothing, "stop")]]
    given = type("Given", (), {"sample": lambda self, prompts, **how: answers})()
    monkeypatch.setattr(Policy, "from_run", staticmethod(lambda run, step: given))
    assert sample.main(["--run=r", "--prompt=What is 1 + 1?", "--k=2"]) == 0
    assert capsys.readouterr().out == "What is 1 + 1?\n  Two lines:\n    1 + 1 …\n  2\n"


def test_one_prompt_has_a_list_of_its_own_messages_are_a_prompt_and_chat_gives_the_same_text_in_pieces(run):
    policy = Policy.from_run(run[0])
    [[one], _] = policy.sample(["1+2=", "3+4="], seed=3)
    asked = [{"role": "user", "content": "1+2="}]
    assert [own.text for own in policy.sample("1+2=", seed=3)] == [one.text]
    assert [own.text for own in policy.sample(asked, seed=3)] == [one.text]  # without a template the text is the prompt
    pieces = []
    for piece in policy.chat(asked, seed=3):
        pieces.append(piece)
        assert jax.sharding.get_abstract_mesh().empty, "the caller's own programs would be traced for the policy's mesh"
    assert "".join(pieces) == one.text and len(pieces) > 1
    rollouts = dict(policy._rollouts)
    assert len(rollouts) > 1 and len({id(one.weights) for one in rollouts.values()}) == 1  # a cast copy is there once
    policy.sample("5+6=")
    assert rollouts == policy._rollouts and min(rollouts)[0] <= jax.device_count()  # nothing is compiled again
    with pytest.raises(ValueError, match='messages {"role": "user", "content": "…"}, got {.content'):
        policy.sample([{"content": "1+2="}])
    for stranger in (12, None, b"1+2="):
        with pytest.raises(ValueError, match="a prompt is a text, or messages"):
            policy.sample([stranger])
    with pytest.raises(ValueError, match="temperature must be >= 0 and finite .* got nan"):
        policy.sample("1+2=", temperature=float("nan"))
    for half in ("1+\ud800=", [{"role": "user", "content": "1+\ud800="}]):
        with pytest.raises(ValueError, match="prompt 0 has half of a character at 2"):
            policy.sample([half])
    with pytest.raises(ValueError, match="completion 0 has half of a character at 0"):
        policy.logprobs(["1+2="], ["\ud800"])
    for count in (1.5, 0, None):
        with pytest.raises(ValueError, match=f"k={count}: give a whole number of completions"):
            policy.sample("1+2=", k=count)
    for stranger in ([1.5, 2.5], [None]):
        with pytest.raises(ValueError, match="completion 0 is a text, a Sample or token ids, got"):
            policy.logprobs(["1+2="], [stranger])


def test_a_model_is_asked_on_the_command_line_without_a_run(run, tmp_path, capsys):
    Policy.from_run(run[0]).export(tmp_path / "model")
    assert sample.main([f"--model={tmp_path / 'model'}", "--prompt=1+2=", "--k=1"]) == 0
    assert capsys.readouterr().out.startswith("1+2=\n  ")
    assert sample.main(["--prompt=1+2="]) == 2 and "--run=runs/NAME or --model=NAME" in capsys.readouterr().err
