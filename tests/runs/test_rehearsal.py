"""Kept completions: which of an evaluation are kept, which of them an update takes, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from configs import tiny
from rpg_jax import data
from rpg_jax.runs.rehearsal import Rehearsal, check_settings, kept, open_rehearsal
from rpg_jax.runs.resolve import resolve
from rpg_jax.types import Completion

ROW = {"set": "train", "prompt": "1+2=", "reference": "3", "completion": "3", "verdict": "right", "tokens": 2}
ROW |= {"finish_reason": "stop"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return data.train_sentencepiece(["0123456789+="], tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture
def experiment(tokenizer, tmp_path):
    config = tiny.get_config()
    config.rehearsal.path, config.rehearsal.coef = str(tmp_path), 0.1
    held_out = {"held out": [data.Problem(7, "9+9=", "18", "")]}
    return SimpleNamespace(config=config, tokenizer=tokenizer, task=SimpleNamespace(held_out=held_out))


def digest(*tokens):
    return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 0).digest


def rows(tokenizer, *changes):
    sampled = digest(*tokenizer.encode("3"), tokenizer.eos_id)
    return [{**ROW, "digest": sampled, "prompt_id": 0, "index": i, **change} for i, change in enumerate(changes)]


def test_only_problems_that_were_solved_each_time_are_rehearsed(experiment, tokenizer):
    other = {"prompt_id": 2, "prompt": "5+5="}
    examples = kept(experiment, rows(tokenizer, {}, {}, {"prompt_id": 1}, {"prompt_id": 1, "verdict": "wrong"}, other))
    assert len(examples) == 3
    assert tokenizer.decode(examples[2].prompt.tolist()) == "5+5="
    assert examples[0].completions[0].tokens.tolist() == [*tokenizer.encode("3"), tokenizer.eos_id]


@pytest.mark.parametrize("lost", [{"finish_reason": "length"}, {"digest": digest(5, 1)}], ids=["cut", "other tokens"])
def test_a_completion_whose_tokens_are_not_those_of_its_text_is_left_out(experiment, tokenizer, lost):
    assert len(kept(experiment, rows(tokenizer, {}, lost))) == 1


@pytest.mark.parametrize("prompt", ["9+9=", "1+2+3+4+5="], ids=["held out", "longer than the run's prompts"])
def test_a_prompt_that_the_run_evaluates_or_would_cut_is_left_out(experiment, tokenizer, prompt):
    assert len(kept(experiment, rows(tokenizer, {}, {"prompt_id": 1, "prompt": prompt}))) == 1


def test_a_completion_keeps_the_stop_token_that_was_sampled(experiment, tokenizer, monkeypatch):
    """Chat models have two, and the text shows neither."""
    monkeypatch.setattr(tokenizer, "stop_token_ids", (tokenizer.eos_id, tokenizer.pad_id))
    [example] = kept(experiment, rows(tokenizer, {"digest": digest(*tokenizer.encode("3"), tokenizer.pad_id)}))
    assert example.completions[0].tokens.tolist() == [*tokenizer.encode("3"), tokenizer.pad_id]


def test_an_evaluation_of_an_earlier_version_is_refused(experiment, tokenizer):
    [row] = rows(tokenizer, {})
    del row["digest"]
    with pytest.raises(ValueError, match="without digests of the tokens; evaluate again"):
        kept(experiment, [row])


def test_a_pass_takes_each_completion_once_and_an_update_depends_on_its_number_alone():
    problem = data.Problem(0, "1+1=", "2", "")
    completions = [Completion(np.arange(i + 1), np.zeros(i + 1), "stop", 0) for i in range(5)]
    examples = [data.unscored(problem, np.array([i]), [one]) for i, one in enumerate(completions)]
    rehearsal = Rehearsal(examples, 3, 0.5, lambda chosen: [int(e.prompt[0]) for e in chosen], seed=1)
    drawn = [rehearsal(number) for number in range(5)]
    taken = [i for each in drawn for i in each.batches]
    passes = [taken[first : first + 5] for first in (0, 5, 10)]
    assert all(sorted(own) == [0, 1, 2, 3, 4] for own in passes) and passes[0] != passes[1]
    assert rehearsal(3) == drawn[3] and {each.share for each in drawn} == {0.5 / (3 * 3)}


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("tokenizer", "another")])
def test_samples_of_another_distribution_are_refused(experiment, name, value):
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "thinking": False}
    settings["tokenizer"] = experiment.tokenizer.digest()[:16]
    check_settings(experiment, settings)
    with pytest.raises(ValueError, match=f"was sampled with {name}={value}, not "):
        check_settings(experiment, settings | {name: value})


def test_an_evaluation_without_a_solved_problem_is_refused(experiment, tmp_path):
    with pytest.raises(ValueError, match="has no completions.jsonl: give the folder that rpg_jax.evaluate wrote"):
        open_rehearsal(experiment)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "thinking": False}
    settings["tokenizer"] = experiment.tokenizer.digest()[:16]
    wrong = rows(experiment.tokenizer, {"verdict": "wrong"})
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong), encoding="utf-8")
    with pytest.raises(ValueError, match="has no settings.json: give the folder that rpg_jax.evaluate wrote"):
        open_rehearsal(experiment)
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="no training problem has right completions only"):
        open_rehearsal(experiment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rehearsal.coef": 0.1}, "rehearsal.path=None with rehearsal.coef=0.1: set both"),
        ({"rehearsal.path": "F"}, "rehearsal.path=F with rehearsal.coef=0: set both"),
        (
            {"warm_start.enabled": True, "rehearsal.path": "F", "rehearsal.coef": 0.1},
            "only now it makes the start policy",
        ),
        (
            {"environment.name": "examples.guessing:Game", "rehearsal.path": "F", "rehearsal.coef": 0.1},
            "kept conversations are not rehearsed",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    config = tiny.get_config()
    config.update_from_flattened_dict({"warm_start.enabled": False, **change})
    with pytest.raises(ValueError, match=message):
        resolve(config)
