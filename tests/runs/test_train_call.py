"""Rows from Python become one file per content; what a file cannot hold is refused by number and name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rpg_jax import data
from rpg_jax.runs import train_call

ROWS = [{"question": f"{i}+1", "answer": i + 1} for i in range(30)]


def test_equal_rows_are_one_file_that_is_read_as_any_other(tmp_path):
    file = train_call.write_rows(ROWS, str(tmp_path))
    again = train_call.write_rows([{**row, "answer": np.int64(row["answer"])} for row in ROWS], str(tmp_path))
    assert file == again and train_call.write_rows(ROWS[1:], str(tmp_path)) != file
    assert [p.answer for p in data.load(file)[0]] == [str(i + 1) for i in range(30)]
    assert json.loads(Path(file).read_text(encoding="utf-8").splitlines()[2]) == ROWS[2]


def test_a_tenth_is_held_out_and_never_more_than_is_evaluated():
    train, held_out = train_call.split_rows(ROWS, 256)
    assert [row["answer"] for row in held_out] == [1, 11, 21]
    assert len(train) == 27 and not any(row in train for row in held_out)
    assert len(train_call.split_rows(ROWS, 2)[1]) == 2
    assert train_call.split_rows(ROWS[:2], 256) == (ROWS[1:2], ROWS[:1])


def test_what_no_row_can_be_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data has the splits \['train', 'test'\]: give the rows of one, as data"):
        train_call.listed_rows({"train": ROWS, "test": ROWS}, "data")
    with pytest.raises(ValueError, match="data has no rows"):
        train_call.listed_rows(iter([]), "data")
    with pytest.raises(ValueError, match="data has no rows"):
        train_call.listed_rows({}, "data")
    with pytest.raises(ValueError, match="data=3: give dicts in a list or an iterator"):
        train_call.listed_rows(3, "data")
    with pytest.raises(ValueError, match="row 1, 'image': a value of the type bytes is no JSON; leave this column out"):
        train_call.write_rows([ROWS[0], {**ROWS[1], "image": b""}], str(tmp_path))
    with pytest.raises(ValueError, match="row 0: expected a dict, got str"):
        train_call.write_rows(["1+1"], str(tmp_path))
    with pytest.raises(ValueError, match="data has one row, and one at least is held out"):
        train_call.split_rows(ROWS[:1], 256)


def test_rows_that_somebody_has_edited_are_written_again(tmp_path):
    """The name of the file is the digest of the rows: a run on the same rows would else train on the edited ones."""
    rows = [{"question": "1+1=", "answer": "2"}]
    file = Path(train_call.write_rows(rows, str(tmp_path)))
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace('"2"', '"3"'), encoding="utf-8")
    assert train_call.write_rows(rows, str(tmp_path)) == str(file) and file.read_text(encoding="utf-8") == before


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
