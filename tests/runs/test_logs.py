"""The log survives kills: incomplete lines vanish, rewinding drops exactly the steps to come."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.report.run_files import read_jsonl, read_metrics
from rpg_jax.runs import logs
from rpg_jax.runs.logs import JsonLines, RunLog, completion_entries
from rpg_jax.training.loop import Step
from rpg_jax.types import Completion, Turns

WHOLE = '{"step": 4, "text": "Grüße, 数学\u2028 ∑"}\n'.encode()


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_rewind_drops_later_steps_and_a_line_cut_short_at_any_byte(tmp_path, cut, capsys):
    log = JsonLines(path := tmp_path / "metrics.jsonl")
    for step in range(4):
        log.append({"step": step, "reward": step / 2})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(WHOLE[:cut])
    whole = cut >= len(WHOLE) - 1
    assert [r["step"] for r in read_jsonl(path)] == [0, 1, 2, 3, 4][: 4 + whole]
    log.rewind(2)
    assert ("metrics.jsonl: the last line was cut short" in capsys.readouterr().err) == (cut > 0 and not whole)
    log.append({"step": 3, "reward": -1.0})
    assert [(r["step"], r["reward"]) for r in read_jsonl(path)] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, -1.0)]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b"\0\0", b'{"reward": 1}', b"", b'{"step": null}'])
def test_a_line_that_is_broken_in_the_middle_is_named_and_nothing_is_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*remove this line"):
        JsonLines(path).rewind(1)
    assert path.read_bytes() == before


def test_a_tracker_whose_server_is_away_ends_no_run_and_is_named_once(tmp_path, capsys):
    class Away:
        taken, is_away = [], True

        def append(self, step):
            if self.is_away:
                raise ConnectionError("no route\nto the server")
            self.taken.append(step.number)

        def close(self):
            self.taken.append("closed")
            raise RuntimeError("gone")

    log = RunLog(tmp_path, samples=0)
    log.trackers = [away := Away()]
    for step in range(1, 6):
        away.is_away = step not in (3, 5)
        log.append(Step(step, None, {"reward": 1.0}))
    log.close()
    assert away.taken == [3, 5, "closed"] and len(read_metrics(tmp_path)) == 5
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(";")[0] for line in said] == [
        " Away did not take step 1: ConnectionError: no route",
        " Away did not take step 4: ConnectionError: no route",
        " Away did not take the end: RuntimeError: gone",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/m\.jsonl'"):
        JsonLines(tmp_path / "m.jsonl").append({"step": 1})


def test_a_conversation_is_told_with_its_turns():
    tokens = np.arange(4, dtype=np.int32)
    plain = Completion(tokens, np.zeros(4, np.float32), "stop", 0)
    turns = Turns(np.array([False, True, True, False]), np.float32([0.5, 1]), "timeout")
    assert completion_entries(plain) == {"tokens": 4, "finish_reason": "stop"}
    told_turns = {"spans": [(1, 3)], "rewards": [0.5, 1.0], "error": "timeout"}
    assert completion_entries(replace(plain, turns=turns)) == {
        "tokens": 2,
        "finish_reason": "stop",
        "turns": told_turns,
    }


def test_numbers_of_every_library_are_plain_json_and_nonfinite_ones_null(tmp_path):
    log = JsonLines(tmp_path / "m.jsonl")
    log.append({"step": 1, "a": np.float32(0.5), "b": jnp.int32(3), "c": float("nan"), "d": np.inf, "e": True})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "a": 0.5, "b": 3, "c": None, "d": None, "e": True}]


def test_a_full_file_of_completions_ends_no_run_and_can_be_resumed(tmp_path, monkeypatch, capsys):
    """Of more than 1 GiB `rewind` would read nothing, so the run could not go on."""
    monkeypatch.setattr(logs, "MOST_SAMPLES", 300)
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), "stop", 0)
    scores = np.ones(1, np.float32)
    problem = SimpleNamespace(prompt="1+1=", answer="2")
    group = SimpleNamespace(
        problem=problem, texts=["2"], completions=[completion], rewards=scores, accuracy=scores, failed=None
    )
    log = RunLog(tmp_path, samples=2)
    for step in range(1, 9):
        log.append_samples(step, [group])
    written = (tmp_path / "samples.jsonl").stat().st_size
    assert 300 <= written < 600
    assert capsys.readouterr().err.count("samples.jsonl is full: it gets no more completions") == 1
    log.drop_samples(2)
    log.append_samples(2, [group])
    assert [r["step"] for r in read_jsonl(tmp_path / "samples.jsonl")] == [1, 2]
