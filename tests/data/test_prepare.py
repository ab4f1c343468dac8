from __future__ import annotations

import dataclasses
import json

import pytest

from rpg_jax.data.__main__ import main
from rpg_jax.data.prompts import Problem
from rpg_jax.data.sources import decontaminate, load, write_parquet
from rpg_jax.data.tokenizer import train_sentencepiece
from rpg_jax.environments.stage import Stage

WORDS = [f"word{n}" for n in range(15)]


def problem(question, prompt_id=0, **changes) -> Problem:
    return Problem(prompt_id, f"<{question}>", "1", "test", question=question, **changes)


def test_thirteen_shared_words_are_contamination_whatever_the_template_case_and_punctuation():
    evaluation = [problem(" ".join(WORDS)), problem("How many?")]
    dirty = [problem(f"So: {', '.join(WORDS[1:14]).upper()}?"), problem("how MANY")]
    clean = [problem(" ".join(WORDS[:12])), problem(" ".join(reversed(WORDS))), problem("How many are there?")]
    assert decontaminate([*dirty, *clean], evaluation) == (clean, dirty)


def test_what_is_written_loads_as_the_same_problems(tmp_path):
    problems = [problem(f"q{n}", n, samples=n + 1, system="be brief" * (n % 2)) for n in range(5)]
    write_parquet(problems, tmp_path / "out" / "a.parquet")
    loaded, report = load(str(tmp_path / "out" / "a.parquet"))
    assert loaded == problems and not report.bad
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["a.parquet"]
    with pytest.raises(ValueError, match="nothing to write"):
        write_parquet([], tmp_path / "b.parquet")


@pytest.fixture
def files(tmp_path):
    rows = [{"question": f"number {n} " + "long " * n, "answer": str(n)} for n in (1, 2, 3, 3, 50)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "broken\n", encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[1]) + "\n", encoding="utf-8")
    train_sentencepiece([json.dumps(rows)], tmp_path / "tokenizer.model")
    return tmp_path


def run(*arguments):
    return main([str(a) for a in arguments])


def test_prepare_writes_the_clean_set_and_counts_what_went(files, capsys):
    common = ("prepare", files / "train.jsonl", "--output", files / "out.parquet", "--template", "none")
    assert run(*common) == 2
    assert "train.jsonl, line 6: not JSON" in capsys.readouterr().err
    assert run(*common, "--output", files / "out.jsonl") == 2  # nobody could read it again under this name
    assert "name it NAME.parquet" in capsys.readouterr().err and not (files / "out.jsonl").exists()
    assert run(*common, "--bad_rows", "skip", "--against", files / "test.jsonl") == 0
    out, err = capsys.readouterr()
    assert "skipped: " in err and "line 6" in err
    for line in ("6 rows read: 4 problems, 1 repetitions", "1 bad rows", "1 removed: an evaluation problem has"):
        assert line in out
    kept, _ = load(str(files / "out.parquet"))
    assert [(p.answer, p.samples) for p in kept] == [("1", 1), ("3", 2), ("50", 1)]


def test_inspect_prints_counts_lengths_examples_and_problems(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert run("inspect", files / "train.jsonl", "--source", "[red]mine", "--examples", 1) == 0
    out = capsys.readouterr().out
    for text in (
        "6 rows: 4 problems, 1 repetitions, 1 bad",
        "[red]mine",
        "prompt, characters",
        "line 6: not JSON",
        "number 1",
    ):
        assert text in out


OPENS = """
class Opens:
    def reset(self, problem):
        return [{"role": "user", "content": f"Play {problem.question}!"}]

    def step(self, problem, messages, completion):
        raise AssertionError
"""


def test_inspect_says_what_each_column_is_and_shows_the_prompt_as_a_config_renders_it(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    rows = [{"question": f"q{i}", "solution": "s" * i, "level": 3, "completion": "so s"} for i in range(1, 4)]
    (files / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fields = (
        "task.name=files",
        f"task.train={files / 'own.jsonl'}",
        "task.template=<{question}>=",
        "task.max_prompt_tokens=9",
    )
    overrides = [f"--config.{field}" for field in fields]
    assert run("inspect", "--config=configs/tiny.py", *overrides, "--config.rollout.max_tokens=4", "--examples=1") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        *(
            "answer solution 3",
            "ignored level 3",
            "demonstration completion 3",
            "The answer is the whole text of `solution`",
        ),
        *(
            "the policy reads <q1>=",
            "0 of 3 prompts are longer than",
            "3 of 3 demonstrations are cut off after 4 tokens",
        ),
    ):
        assert text in out, out
    (files / "opens.py").write_text(OPENS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(files))
    overrides += ["--config.environment.name=opens:Opens", "--config.environment.in_process"]
    assert run("inspect", "--config=configs/tiny.py", *overrides, "--examples=1") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the policy reads Play q1!" in out and "0 of 3 prompts" in out, out

    ended, close = [], Stage.close
    monkeypatch.setattr(Stage, "close", lambda self: ended.append(close(self)))
    for wrong in ("--config.model.tokenizer=nowhere", "nowhere.jsonl"):
        assert run("inspect", "--config=configs/tiny.py", *overrides, wrong) == 2, "the environment ends too"
    assert ended == [None, None]

    assert run("inspect") == 2 and "what to inspect?" in capsys.readouterr().err


MAKES = """
from rpg_jax.data import Problem

class Makes:
    def __init__(self, held_out):
        pass

    def problems(self, name, count=None):
        return [Problem(n, f"{n}=", str(n), "made", question=f"{n}") for n in range(3)]

    def texts(self):
        return ["0123456789="]
"""


def test_inspect_shows_the_problems_that_a_class_of_ones_own_makes(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    (files / "makes.py").write_text(MAKES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(files))
    config = ("--config=configs/tiny.py", "--config.task.name=makes:Makes", "--config.task.max_prompt_tokens=1")
    assert run("inspect", *config, "--examples=1") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("3 rows: 3 problems", "the policy reads 0=", "3 of 3 prompts are longer than"):
        assert text in out, out
    for more in (files / "train.jsonl", "--template=none", "--source=mine"):
        assert run("inspect", more, *config) == 2
        assert "makes its problems itself: leave out files, --template and --source" in capsys.readouterr().err


def test_fewer_examples_than_none_are_refused(files, capsys):
    assert main(["inspect", "train.jsonl", "--examples=-1"]) == 2
    assert "argument --examples: -1 must be at least 0" in capsys.readouterr().err


def test_a_missing_file_is_one_line(files, capsys):
    assert run("inspect", files / "nowhere.jsonl") == 2
    assert capsys.readouterr().err.startswith("error: unknown file, folder or data set")


def test_samples_are_not_lost_by_preparing_twice(tmp_path):
    write_parquet([problem("q", samples=32)], tmp_path / "a.parquet")
    write_parquet(load(str(tmp_path / "a.parquet"))[0], tmp_path / "b.parquet")
    assert load(str(tmp_path / "b.parquet"))[0] == [dataclasses.replace(problem("q"), samples=32)]
