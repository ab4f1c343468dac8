"""From the task fields of a config to problems: what is trained on, what is held out, and what is said about either."""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from configs import base, tiny
from rpg_jax import data
from rpg_jax.runs.experiment import open_tokenizer
from rpg_jax.runs.problems import Task, listed_rows, split_rows, write_rows


@pytest.fixture
def gym(monkeypatch):
    """A generator that seeds problem i with seed + i, as reasoning-gym's do."""
    module = ModuleType("reasoning_gym")
    module.create_dataset = lambda name, size, seed: [
        {"question": f"{seed + i} + 1 =", "answer": str(seed + i + 1)} for i in range(size)
    ]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    known = SimpleNamespace(DATASETS={"chain_sum": None})
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", known)


def files(**task):
    config = base.get_config()
    config.task.name = "files"
    config.task.update(task)
    return config


def written(path, questions):
    rows = [{"question": str(q), "answer": "1", "source": "gsm8k"} for q in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts(problems):
    return [p.prompt for p in problems]


def test_a_generator_gives_other_problems_to_training_than_to_the_held_out_set_which_no_seed_changes(gym):
    config = files(train="reasoning_gym:chain_sum", held_out_sets="sums=reasoning_gym:chain_sum", generated=50)
    tasks = []
    for config.seed in (0, 1):
        tasks.append(Task.from_config(config))
        assert len(tasks[-1].train) == len(tasks[-1].held_out["sums"]) == 50 and not tasks[-1].notes
        assert not {*prompts(tasks[-1].train)} & {*prompts(tasks[-1].held_out["sums"])}
    assert tasks[0].held_out == tasks[1].held_out and prompts(tasks[0].train) != prompts(tasks[1].train)


@pytest.mark.parametrize("links", ["5", "5-", "²-5", "5-8-9", "-5-8"])
def test_links_that_are_no_range_are_refused_by_name(links):
    config = tiny.get_config()
    config.task.name, config.task.links = "chains", links
    with pytest.raises(ValueError, match=f"task.links must be FEWEST-MOST, as 5-8; got '{links}'"):
        Task.from_config(config)


def test_training_problems_of_a_held_out_set_are_left_out_even_where_the_set_is_cut(tmp_path):
    config = files(train=written(tmp_path / "t.jsonl", range(9)), template="none")
    config.task.held_out_sets = f"A={written(tmp_path / 'a.jsonl', (7, 20))},B={written(tmp_path / 'b.jsonl', (8, 3))}"
    config.evaluation.problems = 1
    task = Task.from_config(config)
    assert prompts(task.train) == ["0", "1", "2", "4", "5", "6"]
    assert {name: prompts(problems) for name, problems in task.held_out.items()} == {"A": ["7"], "B": ["8"]}
    assert task.notes == [
        "train: 3 of 9 problems left out, which are in a held-out set too",
        "A: the first 1 of 2 problems; evaluation.problems=2 takes all",
        "B: the first 1 of 2 problems; evaluation.problems=2 takes all",
    ]
    config.evaluation.problems = 2
    assert Task.from_config(config, train=False).notes == []


def test_bad_rows_that_are_left_out_are_counted_and_the_first_is_named(tmp_path):
    rows = {
        "train": ['{"question": "a", "answer": "1"}', '{"text": "b"}', "{"],
        "held": ['{"question": "c", "answer": "3"}', '{"x": 1}'],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = base.get_config()
    config.task.name, config.task.bad_rows = "files", "skip"
    config.task.train, config.task.held_out_sets = str(tmp_path / "train.jsonl"), f"H={tmp_path / 'held.jsonl'}"
    held, train = Task.from_config(config).notes
    assert held.startswith(
        f"H: 1 of 2 rows are bad and left out, the first is {tmp_path / 'held.jsonl'}, line 2: none of"
    )
    assert train.startswith(f"train: 2 of 3 rows are bad and left out, the first is {tmp_path / 'train.jsonl'}, line 2")


def test_notes_on_cut_sets_come_before_those_on_long_prompts(tmp_path):
    config = files(train=written(tmp_path / "t.jsonl", ["a", "b" * 99]), template="none", max_prompt_tokens=9)
    config.task.held_out_sets = f"A={written(tmp_path / 'a.jsonl', (7, 20))}"
    config.evaluation.problems = 1
    tokenizer = SimpleNamespace(chat=None, encode=lambda text: [0] * len(text))
    task = Task.from_config(config).encoded(tokenizer, config)
    assert prompts(task.train) == ["a"]
    assert [note.partition(" ")[0] for note in task.notes] == ["A:", "train:"] and "1 dropped" in task.notes[1]


def test_two_held_out_sets_of_one_name_are_refused(tmp_path):
    one, other = (written(tmp_path / f"{name}.jsonl", (7, 20)) for name in "ab")
    with pytest.raises(ValueError, match=r"^task.held_out_sets: 'A=.*b.jsonl' is not .* a NAME of its own$"):
        Task.from_config(files(held_out_sets=f"A={one},A={other}"), train=False)


def test_training_on_nothing_but_held_out_problems_is_refused(tmp_path):
    same = written(tmp_path / "t.jsonl", range(9))
    with pytest.raises(ValueError, match="all 9 problems of task.train are in task.held_out_sets"):
        Task.from_config(files(train=same, held_out_sets=f"A={same}"))
    assert Task.from_config(files(train=same, held_out_sets=f"A={same}"), train=False).train == []


def test_an_arithmetic_set_without_problems_is_named():
    config = tiny.get_config()
    config.task.held_out_sets = "held out,negative"
    with pytest.raises(ValueError, match=r"set 'negative' has no problem of task.operations='\+' and task.digits=2"):
        Task.from_config(config)


def test_numbers_of_any_size_are_a_task():
    config = tiny.get_config()
    config.task.digits, config.task.generated, config.task.held_out_sets = 9, 500, "held out,carry"
    task = Task.from_config(config)
    assert len(task.train) == 500 and {len(p) for p in task.held_out.values()} == {256}
    assert [note.partition(":")[0] for note in task.notes] == ["held out", "carry"]


def test_sources_of_splits_that_nobody_needs_are_not_opened():
    config = files(train="/none/train.jsonl", held_out_sets="A=/none/test.jsonl")
    task = Task.from_config(config, train=False, held_out=False)
    assert (task.train, task.held_out) == ([], {})
    with pytest.raises(ValueError, match="/none/test.jsonl"):
        Task.from_config(config, train=False)


def demonstrated(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_rows_with_demonstrations_warm_start_and_those_with_answers_are_rewarded(tmp_path):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2", "demonstration": "so 2"}]
    config = files(train=demonstrated(tmp_path / "t.jsonl", [*rows, {"question": "c", "completion": "Ω"}]))
    config.task.held_out_sets = f"A={written(tmp_path / 'a.jsonl', (7,))}"
    config.task.template = "none"
    assert not Task.from_config(config).to_imitate
    config.warm_start.enabled = True
    task = Task.from_config(config)
    assert task.examples(task.to_imitate) == [(task.train[1], "so 2"), (task.train[2], "Ω")]
    assert "Ω" in "".join(task.texts)
    rewarded = task.with_answers(config)
    assert prompts(rewarded.train) == ["a", "b"] and rewarded.notes == ["train: 1 of 3 problems have no answer"]
    config.rewards.parts = "my.module:judge"
    assert task.with_answers(config) is task


def test_demonstrations_of_their_own_file_replace_those_of_any_task(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Ω"}]}]
    config = tiny.get_config()
    config.warm_start.train = demonstrated(tmp_path / "t.jsonl", rows)
    task = Task.from_config(config)
    assert [(p.prompt, text) for p, text in task.examples(task.to_imitate)] == [("u", "Ω")]
    assert "Ω" in "".join(task.texts) and len(task.train) > 1000
    config.warm_start.train = written(tmp_path / "n.jsonl", range(2))
    with pytest.raises(ValueError, match="no row has a demonstration: give rows a `demonstration`"):
        Task.from_config(config)


def test_without_any_answer_the_fix_is_named(tmp_path):
    config = files(train=demonstrated(tmp_path / "t.jsonl", [{"question": "c", "completion": "d"}]), template="none")
    config.task.held_out_sets = f"A={written(tmp_path / 'a.jsonl', (7,))}"
    with pytest.raises(ValueError, match=r"train: 1 of 1 problems have no answer: give rows an `answer`, or name"):
        Task.from_config(config).with_answers(config)


OWN = """
from rpg_jax.data import Problem

class Doubles:
    def __init__(self, held_out):
        self.first = round(held_out * 10)

    def problems(self, name, count=None):
        numbers = range(self.first) if name == "held out" else range(self.first, 10)
        return [Problem(n, f"{n}+{n}=", str(2 * n), "doubles") for n in numbers][:count]

    def texts(self):
        return ["0123456789+="]

class Shown(Doubles):
    def examples(self, problems, *, turns):
        return [f"{turns} {problem.answer}" for problem in problems]

class Quiet(Doubles):
    def texts(self):
        return None

class Digits(Doubles):
    def texts(self):
        return [*range(10), "+="]

class Empty(Doubles):
    def problems(self, name, count=None):
        return [] if name == "held out" else super().problems(name, count)

class Silent:
    def __init__(self, held_out):
        self.texts = list

class Knows(Doubles):
    def problems(self, name, count=None):
        return {"train": []}[name]

class Numbers(Doubles):
    def problems(self, name, count=None):
        return [1, 2]

class Answers(Doubles):
    def problems(self, name, count=None):
        return [Problem(0, "p", 1, "s")]
"""


def test_a_class_of_ones_own_makes_the_problems_and_the_demonstrations(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny.get_config()
    config.task.name, config.task.held_out, config.task.generated = "own_task:Doubles", 0.2, 3
    task = Task.from_config(config)
    assert [p.prompt for p in task.train] == ["2+2=", "3+3=", "4+4="] and not task.examples(task.train)
    assert [p.answer for p in task.held_out["held out"]] == ["0", "2"] and list(task.texts) == ["0123456789+="]
    config.task.name, config.environment.max_turns = "own_task:Shown", 7
    assert [text for _, text in Task.from_config(config).examples(task.train)] == ["7 4", "7 6", "7 8"]
    config.task.name = "own_task:Quiet"
    with pytest.raises(
        ValueError, match=r"own_task:Quiet: prompts have '\+01234=', which the texts to train a tokenizer"
    ):
        open_tokenizer(config, Task.from_config(config))
    for name, error in (
        ("own_task:Empty", "own_task:Empty has no problem in the set 'held out'"),
        ("own_task:Silent", r"it has no problems\(\)"),
        ("own_task:Digits", r"own_task:Digits: texts\(\) has 0, which is no text"),
        ("arithmatic", "known: arithmetic, chains, files, module:Class"),
        ("own_task:Knows", "task.name=own_task:Knows raises KeyError: 'held out'"),
        ("own_task:Numbers", "own_task:Numbers: 1 is no Problem whose prompt and answer are texts"),
        ("own_task:Answers", r"own_task:Answers: Problem\(.* is no Problem whose prompt and answer are texts"),
        ("own_tusk:Doubles", "cannot import 'own_tusk' for the task .*PYTHONPATH"),
    ):
        config.task.name = name
        with pytest.raises(ValueError, match=error):
            Task.from_config(config)


HANDED = [{"question": f"{i}+1", "answer": i + 1} for i in range(30)]


def test_equal_rows_are_one_file_that_is_read_as_any_other(tmp_path):
    file = write_rows(HANDED, str(tmp_path))
    again = write_rows([{**row, "answer": np.int64(row["answer"])} for row in HANDED], str(tmp_path))
    assert file == again and write_rows(HANDED[1:], str(tmp_path)) != file
    assert [p.answer for p in data.load(file)[0]] == [str(i + 1) for i in range(30)]
    assert json.loads(Path(file).read_text(encoding="utf-8").splitlines()[2]) == HANDED[2]


def test_a_tenth_is_held_out_and_never_more_than_is_evaluated():
    train, held_out = split_rows(HANDED, 256)
    assert [row["answer"] for row in held_out] == [1, 11, 21]
    assert len(train) == 27 and not any(row in train for row in held_out)
    assert len(split_rows(HANDED, 2)[1]) == 2
    assert split_rows(HANDED[:2], 256) == (HANDED[1:2], HANDED[:1])


def test_what_no_row_can_be_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data has the splits \['train', 'test'\]: give the rows of one, as data"):
        listed_rows({"train": HANDED, "test": HANDED}, "data")
    with pytest.raises(ValueError, match="data has no rows"):
        listed_rows(iter([]), "data")
    with pytest.raises(ValueError, match="data has no rows"):
        listed_rows({}, "data")
    with pytest.raises(ValueError, match="data=3: give dicts in a list or an iterator"):
        listed_rows(3, "data")
    with pytest.raises(ValueError, match="row 1, 'image': a value of the type bytes is no JSON; leave this column out"):
        write_rows([HANDED[0], {**HANDED[1], "image": b""}], str(tmp_path))
    deep = functools.reduce(lambda inner, _: [inner], range(20_000), 1)  # Python 3.13 writes 9,998
    for value, reason in ((deep, "maximum recursion depth"), ("\ud800", "surrogates not allowed")):
        with pytest.raises(ValueError, match=f"row 0, 'column': .*{reason}.*; leave this column out"):
            write_rows([{**HANDED[0], "column": value}], str(tmp_path))
    with pytest.raises(ValueError, match="row 0: expected a dict, got str"):
        write_rows(["1+1"], str(tmp_path))
    with pytest.raises(ValueError, match="data has one row, and one at least is held out"):
        split_rows(HANDED[:1], 256)


def test_rows_that_somebody_has_edited_are_written_again(tmp_path):
    """The name of the file is the digest of the rows: a run on the same rows would else train on the edited ones."""
    rows = [{"question": "1+1=", "answer": "2"}]
    file = Path(write_rows(rows, str(tmp_path)))
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace('"2"', '"3"'), encoding="utf-8")
    assert write_rows(rows, str(tmp_path)) == str(file) and file.read_text(encoding="utf-8") == before
