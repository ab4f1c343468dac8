"""The journal gives back exactly what was noted down, names what it does not, and never stops a run."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from rpg_jax.storage import journal
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion, Turns


def key(prompt_id=7, **changes):
    same = {"weights": "00ab", "version": 4, "seed": 0, "step": 2, "temperature": 1.0, "stop_token_ids": (1,)}
    return same | {"prompt_id": prompt_id, "prompt": f"p{prompt_id}"} | changes


def group(seed, size=3, version=4):
    """A group; those of an odd seed have experts, of a prompt of two tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size)
    tokens = [rng.integers(0, 2**31 - 1, n).astype(np.int32) for n in lengths]
    logprobs = [-rng.exponential(1, n).astype(np.float32) for n in lengths]
    reasons = [("stop", "length")[i % 2] for i in range(size)]
    turns = [n > 2 and Turns(np.arange(n) == 1, np.float32([0.1, n]), "error") or None for n in lengths]
    experts = [rng.integers(0, 300, (2 + n, 2, 3)).astype(np.uint16) if seed % 2 else None for n in lengths]
    parts = zip(tokens, logprobs, reasons, turns, experts, strict=True)
    return [Completion(*one, version, *rest) for *one, t, e in parts for rest in [(t, e)]]


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.tokens, y.tokens)
        and x.logprobs.tobytes() == y.logprobs.tobytes()
        and (x.tokens.dtype, x.logprobs.dtype) == (y.tokens.dtype, y.logprobs.dtype)
        and (x.finish_reason, x.weight_version) == (y.finish_reason, y.weight_version)
        and (x.turns and x.turns.record()) == (y.turns and y.turns.record())
        and (x.experts is None) == (y.experts is None)
        and (x.experts is None or (x.experts.dtype == y.experts.dtype and np.array_equal(x.experts, y.experts)))
        for x, y in zip(a, b, strict=True)
    )


def written(folder, *prompt_ids, max_bytes=1 << 20, **changes):
    """The file of a journal that has noted these prompts' groups down."""
    one = Journal(folder, max_bytes=max_bytes)
    for prompt_id in prompt_ids:
        one.add(key(prompt_id, **changes), group(prompt_id))
    one.close()
    return Path(folder) / str(key(**changes)["step"]) / "0.groups"


def found(folder, *prompt_ids, **changes):
    one = Journal(folder, max_bytes=1 << 20)
    places = one.find([key(prompt_id, **changes) for prompt_id in prompt_ids])
    one.close()
    assert all(same(completions, group(prompt_ids[place])) for place, completions in places.items())
    return sorted(prompt_ids[place] for place in places)


def test_the_next_process_finds_every_group_to_the_bit(tmp_path, capsys):
    written(tmp_path, 7, 8, 9)
    assert found(tmp_path, 9, 7, 10) == [7, 9] and capsys.readouterr().err == ""


def test_a_process_finds_only_what_one_before_it_has_written(tmp_path):
    one = Journal(tmp_path, max_bytes=1 << 20)
    one.add(key(), group(7))
    one.close()
    assert one.find([key()]) == {}


def test_a_group_is_found_once_and_each_draw_its_own(tmp_path):
    one = Journal(tmp_path, max_bytes=1 << 20)
    one.add(key(), group(1))
    one.add(key(seed=5), group(2))
    one.close()
    one = Journal(tmp_path, max_bytes=1 << 20)
    assert same(one.find([key()])[0], group(1)) and same(one.find([key(seed=5)])[0], group(2))
    assert one.find([key()]) == {}
    one.close()


def test_a_record_that_a_kill_cut_short_is_dropped_and_what_follows_it_is_found(tmp_path, capsys):
    file = written(tmp_path, 7, 8)
    file.write_bytes(file.read_bytes()[:-5])
    written(tmp_path, 9)
    assert found(tmp_path, 7, 8, 9) == [7, 9]
    assert f"{file} is damaged in 1 places" in capsys.readouterr().err


def test_any_flipped_bit_loses_one_record_and_no_other():
    first, second, third = (journal.to_bytes(key(i), group(i)) for i in (7, 8, 9))
    for at in range(0, len(second), 7):
        broken = bytearray(second)
        broken[at] ^= 1 << at % 8
        records, damaged = journal.from_bytes(first + bytes(broken) + third)
        assert [record.key["prompt_id"] for record in records] == [7, 9] and damaged >= 1, at


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "00ac"}, "weights was '00ab', now '00ac'"),
        ({"version": 5}, "version was 4, now 5"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"temperature": 0.7}, "temperature was 1.0, now 0.7"),
        ({"prompt": "other"}, "prompt was 'p7', now 'other'"),
        ({"stop_token_ids": (1, 2)}, "stop_token_ids was [1], now [1, 2]"),
        ({"driver": "lockstep"}, "driver was None, now 'lockstep'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_group_of_another_key_is_refused_by_name(tmp_path, capsys, change, said):
    written(tmp_path, 7)
    assert found(tmp_path, 7, **change) == []
    assert f"journal: 1 groups of step 3 are not used and sampled again: {said}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_said_and_nothing_is_found(tmp_path, capsys):
    (tmp_path / "journal").write_text("no folder", encoding="utf-8")
    assert found(tmp_path / "journal", 7) == [] and "cannot be read" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_said(tmp_path, capsys):
    (written(tmp_path, 7).parent / "-1.groups").mkdir()  # it is read first
    assert found(tmp_path, 7) == [7], "the other files are read"
    assert "cannot be read, and its groups are sampled again" in capsys.readouterr().err


def test_a_full_disk_ends_the_journal_of_its_step_and_is_said_once(tmp_path, capsys):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "0.groups").symlink_to("/dev/full")  # where every write fails for want of space
    one = Journal(tmp_path, max_bytes=1 << 20)
    for step in (2, 2, 3):
        one.add(key(step=step), group(7))
    one.close()
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 1 and "step 3 that are complete from now on" in said
    assert found(tmp_path, 7, step=3) == [7]


def test_a_write_that_hangs_delays_nobody(tmp_path, capsys, monkeypatch):
    going_on = threading.Event()
    monkeypatch.setattr(journal._Writer, "_write", lambda *_: going_on.wait(60))
    monkeypatch.setattr(journal, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(journal, "_WAITING", 4)
    one = Journal(tmp_path, max_bytes=1 << 20)
    for prompt_id in range(20):
        one.add(key(prompt_id), group(prompt_id))
    one.prune(9)
    one.close()
    going_on.set()
    assert "4 groups wait to be written" in capsys.readouterr().err


def test_the_bound_holds_across_processes_until_the_next_checkpoint(tmp_path, capsys):
    size = len(journal.to_bytes(key(7), group(7)))
    written(tmp_path, 7, 8, max_bytes=int(1.5 * size))
    assert "is used up: no group is journaled until the next checkpoint" in capsys.readouterr().err
    one = Journal(tmp_path, max_bytes=int(1.5 * size))
    assert one.find([key(7)])  # which counts the file of the process before
    one.add(key(8), group(8))
    one.close()
    assert found(tmp_path, 7, 8) == [7]
    one = Journal(tmp_path, max_bytes=int(1.5 * size))
    assert one.find([key(7)])
    one.add(key(8), group(8))
    one.prune(3)
    one.add(key(9, step=3), group(9))
    one.close()
    assert found(tmp_path, 9, step=3) == [9]


def test_pruning_deletes_the_steps_before_and_no_other(tmp_path):
    for step in (2, 3, 10):
        written(tmp_path, 7, step=step)
    one = Journal(tmp_path, max_bytes=1 << 20)
    one.prune(3)
    one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "3"]
    assert one.find([key()]) == {}


def test_a_bucket_gets_few_objects_and_those_of_an_earlier_process_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "in_bucket", lambda path: True)  # a local folder stands in for the bucket
    (tmp_path / "2").mkdir()
    written(tmp_path, *range(50))
    written(tmp_path, 50)
    assert len(list((tmp_path / "2").iterdir())) == 2
    assert found(tmp_path, *range(51)) == list(range(51))


def test_a_bucket_is_written_to_before_much_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "in_bucket", lambda path: True)
    monkeypatch.setattr(journal, "_FLUSH_BYTES", 3000)
    (tmp_path / "2").mkdir()
    written(tmp_path, *range(50))
    sizes = [path.stat().st_size for path in (tmp_path / "2").iterdir()]
    assert len(sizes) > 3 and max(sizes) < 4000


def test_completions_are_counted_and_the_found_ones_are_said(tmp_path, capsys):
    one = Journal(tmp_path, max_bytes=1)
    one.count(4, found=0, sampled=8)
    one.count(4, found=6, sampled=2)
    one.close()
    assert "step 5: 6 completions were complete before the restart, 2 are sampled" in capsys.readouterr().err
    assert json.dumps(one.take_counts()) == '{"host/journal_found": 6, "host/journal_sampled": 10}'
    assert set(one.take_counts().values()) == {0}
