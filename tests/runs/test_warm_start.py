"""Warm starts are shared by every run that would train the same one; their batches hold every demonstration."""

import contextlib
import dataclasses
import itertools
import json
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import tiny
from rpg_jax import data
from rpg_jax.data import Problem
from rpg_jax.runs import warm_start
from rpg_jax.runs.experiment import make_scorer, open_experiment
from rpg_jax.runs.learner import init_params
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.supervised import Demonstrations, examples_of, packed, supervised_config, tell_cuts
from rpg_jax.runs.warm_start import cache_key, warm_started
from rpg_jax.storage import files
from rpg_jax.storage.errors import StorageFailure
from tests.end_to_end import micro


def config_of(limit, own, folder=""):
    config = micro.get_config()
    config.rollout.max_tokens, config.warm_start.max_tokens, config.warm_start.dir = limit, own, str(folder)
    return resolve(config)


def key(limit, own):
    return cache_key(supervised_config(config_of(limit, own)), {})


def test_the_name_has_the_limit_of_the_warm_start_and_not_that_of_the_run():
    assert key(4, 6) == key(5, 6) == key(6, None) == key(6, 6) != key(5, None)


def test_the_name_has_the_content_of_what_is_read_and_not_its_place():
    names = set()
    for place in ("a", "b"):
        config = config_of(6, None)
        config.task.train, config.task.held_out_sets, config.model.tokenizer = f"{place}/x", f"h={place}/y", place
        names |= {cache_key(config, {"task.train": content}) for content in ("1", "2")}
    assert len(names) == 2


def experiment_of(problems, **train):
    """Characters are tokens; a prompt of 4 and a completion of 2 with its stop token make 6."""
    config = micro.get_config()
    config.warm_start.batch_size = 2
    config.train.update(train)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text], eos_id=1, pad_id=0, chat=None)
    layout = SimpleNamespace(row_sharding=None, model=SimpleNamespace(vocab_size=128))
    return SimpleNamespace(config=config, tokenizer=tokenizer, task=Task(problems, {}, ()), layout=layout)


PROBLEMS = [Problem(i, f"{i:03d}:", "", "test", demonstrations=(str(i % 10),)) for i in range(32)]
DEMONSTRATIONS = [f"{p.prompt}{p.demonstrations[0]}" for p in PROBLEMS]


def test_a_demonstration_of_several_turns_trains_the_policys_tokens_and_reads_the_others():
    e = experiment_of([])
    e.config.environment.max_turns, e.config.rollout.max_tokens = 3, 20
    e.config.task.name = "examples.guessing:Problems"
    task = Task.from_config(e.config)
    e.task, problem = task, next(p for p in task.train if len(task.examples([p])[0][1]) == 5)
    said = [message["content"] for message in task.examples([problem])[0][1]]
    [example] = examples_of(e, [problem])
    [completion] = example.completions
    assert "".join(map(chr, completion.tokens)) == f"{said[0]}\1{said[1]}{said[2]}\1{said[3]}{said[4]}\1"
    observed = [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2
    assert completion.turns.observed.tolist() == observed and len(completion.turns.rewards) == 3
    [batch] = packed(e, [example], data.RowShape(1, 30, 20))
    assert batch.mask[0, :12].tolist() == [not each for each in observed] and not batch.mask[0, 12:].any()
    assert batch.rows.targets[0, :12].tolist() == completion.tokens.tolist()
    e.config.rollout.max_tokens = 3
    [cut] = examples_of(e, [problem])[0].completions
    assert cut.tokens.tolist() == completion.tokens[:3].tolist() and len(cut.turns.rewards) == 1


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_before_it_trains():
    e = experiment_of(PROBLEMS)
    assert len(examples_of(e, PROBLEMS)) == len(PROBLEMS)
    e.layout.model.vocab_size = ord("9")
    e.tokenizer.decode = lambda ids: "".join(map(chr, ids))
    with pytest.raises(
        ValueError, match="the tokenizer gives token 58, ':', and the model has 57: take the model's own"
    ):
        examples_of(e, PROBLEMS)


def test_demonstrations_that_lose_their_end_are_counted_in_one_line(capsys):
    shown = ("1", "12", "12345")  # and a stop token each; two fit
    e = experiment_of([Problem(i, f"{i:03d}:", "", "test", demonstrations=(own,)) for i, own in enumerate(shown)])
    e.config.rollout.max_tokens = 2
    tell_cuts(e)
    longer = "2 of 3 demonstrations are cut to 2 tokens, the longest has 6: raise warm_start.max_tokens\n"
    assert capsys.readouterr().err == longer
    e.config.rollout.max_tokens = 6
    tell_cuts(e)
    assert not capsys.readouterr().err


def test_the_name_has_the_environment_where_there_is_one():
    def key_of(**environment):
        config = config_of(6, None)
        config.environment.update(environment)
        return cache_key(supervised_config(config), {})

    assert key_of() == key_of(max_turns=3) == key(6, None)
    assert len({key_of(), key_of(name="a:Game"), key_of(name="a:Game", max_turns=3)}) == 3


def texts_of(batch):
    return ["".join(chr(t) for t in row if t) for micro_batch in batch for row in micro_batch.rows.tokens]


def demonstrations_in(batches):
    return [text[:5] for batch in batches for row in texts_of(batch) for text in row.split(chr(1)) if text]


def test_a_task_without_demonstrations_is_named():
    with pytest.raises(
        ValueError, match=r"^no problem of task\.name='arithmetic' has a demonstration: give rows a `dem"
    ):
        Demonstrations(experiment_of([]))
    experiment = experiment_of(PROBLEMS)
    experiment.task = dataclasses.replace(experiment.task, examples=lambda problems: [])
    with pytest.raises(ValueError, match="give a class of your own `examples`"):
        Demonstrations(experiment)


def test_packed_demonstrations_share_rows_and_none_is_lost_or_repeated():
    experiment = experiment_of(PROBLEMS, packed_length=16)
    batches = list(itertools.islice(Demonstrations(experiment), 8))
    assert {len(text) for batch in batches for text in texts_of(batch)} == {12}
    assert sorted(demonstrations_in(batches)) == DEMONSTRATIONS
    rows = [batch.rows for [batch] in batches]
    assert all((r.targets[r.mask > 0] != 0).all() and r.mask.sum() == 8 for r in rows)
    packed = resolve(experiment.config)
    with packed.unlocked():
        packed.train.packed_length = 17
    assert cache_key(packed, {}) != cache_key(resolve(experiment.config), {})


def test_problems_with_several_demonstrations_fill_every_batch_and_equal_demonstrations_count_each_time():
    shown = [("7", "7", "7"), ("1",), ("2", "3"), ("4",)]
    problems = [dataclasses.replace(p, demonstrations=d) for p, d in zip(PROBLEMS, shown, strict=False)]
    batches = list(Demonstrations(experiment_of(problems), epochs=2))
    assert [len(texts_of(batch)) for batch in batches] == [2] * 7
    assert sorted(demonstrations_in(batches)) == sorted([f"{i:03d}:{d}" for i, of in enumerate(shown) for d in of] * 2)


@pytest.mark.parametrize("train", [{}, {"packed_length": 16}, {"packed_length": 16, "microbatch_size": 1}])
def test_passes_end_exactly_and_their_updates_are_known_before(train):
    batches = list(Demonstrations(experiment_of(PROBLEMS[:5], **train), epochs=3))
    assert sorted(demonstrations_in(batches)) == sorted(DEMONSTRATIONS[:5] * 3)
    assert len(batches) == Demonstrations(experiment_of(PROBLEMS[:5], **train), epochs=3).count()
    assert all(len(texts_of(batch)) == 2 for batch in batches[:-1])


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_updates_are_counted_without_tokenizing_where_a_demonstration_is_a_row(size, epochs, microbatch_size):
    for rows in range(1, 10):
        e = experiment_of(PROBLEMS[:rows], microbatch_size=microbatch_size)
        e.config.warm_start.batch_size = size
        found = sum(1 for _ in Demonstrations(e, epochs))
        e.tokenizer.encode = None
        assert Demonstrations(e, epochs).count() == found


def test_an_empty_prompt_is_named_before_it_trains():
    with pytest.raises(ValueError, match="problem 7 has an empty prompt"):
        tell_cuts(experiment_of([Problem(7, "", "", "test", demonstrations=("1",))]))


@pytest.mark.parametrize("done", [0, 1, 7, 8, 11])
def test_a_position_continues_with_the_next_batch(done):
    experiment = experiment_of(PROBLEMS, packed_length=16)
    first, again = Demonstrations(experiment), Demonstrations(experiment)
    for _ in range(done):
        next(first)
    again.restore(json.loads(json.dumps(first.state())))
    for _ in range(9):
        assert texts_of(next(first)) == texts_of(next(again))


@pytest.mark.parametrize(
    ("before", "after", "was"),
    [
        ({"packed_length": 16}, {"packed_length": 16, "microbatch_size": 1}, r"\[2, 16\], .* now has \[1, 16\]"),
        ({"packed_length": 16}, {"packed_length": 24}, r"\[2, 16\], .* now has \[2, 24\]"),
        ({}, {"packed_length": 16}, r"unpacked rows, .* now has \[2, 16\]"),
        ({}, {"microbatch_size": 1}, None),  # an update has the same demonstrations
    ],
)
def test_a_position_among_packed_demonstrations_is_refused_by_rows_of_another_shape(before, after, was):
    first, again = (Demonstrations(experiment_of(PROBLEMS, **train), epochs=1) for train in (before, after))
    done = [next(first)]
    with contextlib.nullcontext() if was is None else pytest.raises(ValueError, match=was):
        again.restore(first.state())
        assert sorted(demonstrations_in([*done, *again])) == DEMONSTRATIONS


def test_supervised_training_depends_on_no_field_of_the_policys_optimizer():
    config = config_of(6, None)
    other = micro.get_config()
    other.rollout.max_tokens, other.optimizer.b1, other.optimizer.learning_rate = 6, 0.5, 1.0
    assert cache_key(supervised_config(config), {}) == cache_key(supervised_config(resolve(other)), {})
    assert supervised_config(config).optimizer == supervised_config(resolve(other)).optimizer


@pytest.mark.slow  # a model is compiled
def test_runs_of_two_limits_start_from_the_same_weights(tmp_path, capsys):
    found = []
    for limit in (3, 6):
        config = config_of(limit, 6, tmp_path / "warm").unlock()
        config.warm_start.min_accuracy, config.warm_start.check_every, config.warm_start.batch_size = 0.0, 2, 16
        experiment = open_experiment(config, tmp_path)
        with experiment.layout.activate(), make_scorer(experiment.config) as scorer:
            params = init_params(experiment.layout)
            found.append(warm_started(experiment, params, None, scorer, tmp_path))  # neither needs the run's rollout
    assert capsys.readouterr().out.startswith("warm start from ")
    assert len(list((tmp_path / "warm").iterdir())) == 1
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("processes", "goes_on"), [(1, True), (2, False)])
def test_a_run_goes_on_with_its_warm_start_if_another_run_writes_the_same(
    tmp_path, monkeypatch, capsys, processes, goes_on
):
    e = open_experiment(config_of(6, None, tmp_path / "warm"), tmp_path)
    monkeypatch.setattr(warm_start, "_train", lambda *arguments: {"w": jax.numpy.ones(2)})

    def taken(self, path, *arguments, **how):
        (path.parent / f"{path.name}.orbax-checkpoint-tmp").mkdir(parents=True)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        raise FileExistsError(17, "File exists", f"{path}.orbax-checkpoint-tmp")

    monkeypatch.setattr(warm_start.Snapshots("/nowhere")._checkpointer.__class__, "save", taken)
    with contextlib.nullcontext() if goes_on else pytest.raises(StorageFailure, match="File exists"):
        assert warm_started(e, {}, None, None, tmp_path)["w"].tolist() == [1, 1]
        assert "warm start not kept for other runs: /" in capsys.readouterr().err


def test_of_two_runs_that_need_a_warm_start_at_once_one_trains_it_and_the_other_takes_it(tmp_path, monkeypatch, capfd):
    """Both trained it, and wrote into one temporary folder: one save failed, or both."""
    e = open_experiment(config_of(6, None, tmp_path / "warm"), tmp_path)
    with e.layout.activate():
        params, found = init_params(e.layout), []
    waits = threading.Event()
    monkeypatch.setattr(files.errors, "say", lambda text: waits.set() if text.endswith("waiting for its end") else None)
    monkeypatch.setattr(warm_start, "_train", lambda *arguments: trained.append(waits.wait(30)) or params)

    def run():
        with e.layout.activate():
            found.append(warm_started(e, params, None, None, tmp_path))

    trained, threads = [], [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert trained == [True] and capfd.readouterr().out.startswith("warm start from ")


def test_another_reward_is_another_warm_start(tmp_path, monkeypatch):
    """The reward decides the accuracy at which it stops. A run of the default reward keeps the name that it had."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (module := tmp_path / "grade_of_warm_start.py").write_text("a = 1\n", encoding="utf-8")
    config, keys = resolve(tiny.get_config()), []
    keys.append(cache_key(supervised_config(config), {}))
    for parts, above in (("exact", 0.5), ("grade_of_warm_start:f", None), ("grade_of_warm_start:f", 0.5)):
        with config.unlocked():
            config.rewards.parts, config.rewards.right_above = parts, above
        keys.append(cache_key(supervised_config(config), {}))
    module.write_text("a = 2\n", encoding="utf-8")
    keys.append(cache_key(supervised_config(config), {}))
    assert len(set(keys)) == 5


def test_a_reward_that_was_handed_over_counts_by_its_source():
    def first(completion, answer):
        return 1.0

    def second(completion, answer):
        return 0.5

    config = resolve(tiny.get_config())
    with config.unlocked():
        config.rewards.parts = "__main__:reward"
    supervised = supervised_config(config)
    keys = [cache_key(supervised, {}, {"__main__:reward": reward}) for reward in (first, second, first)]
    assert keys[0] == keys[2] != keys[1]


def test_what_a_judge_is_asked_is_in_the_name_and_not_its_place():
    def key_of(parts="judge", **judge):
        config = config_of(6, None)
        with config.unlocked():
            config.rewards.parts, config.rewards.right_above = parts, 0.5
            config.judge.update(judge)
        return cache_key(supervised_config(config), {})

    asked = [{}, {"model": "other"}, {"prompt": "Grade {completion}"}, {"scale": 5.0}, {"kind": "score"}]
    assert len({key_of(**judge) for judge in asked}) == 5
    assert key_of() == key_of(url="http://here:1/v1", parallel=2, deadline_seconds=9.0)
    assert key_of("exact") == key_of("exact", model="other")
