"""Files of a run folder that were changed anywhere: a report shows the run, or leaves it or the file out by name."""

import gc
import json
import os
import random

import numpy as np
import pytest

from rpg_jax.report import __main__ as report
from rpg_jax.report import page, plots, rollouts, run_files

VALUES = [
    '"x"',
    "[1]",
    "1e999",
    "-1",
    "0",
    "true",
    "null",
    "{}",
    '"\\ud800"',
    "1" + "0" * 23,
    '"' + "a" * 300 + '"',
    "NaN",
]


def changed(content, rng):
    """The bytes with one to three changes: of a bit, of a piece, of a value of JSON, or of the end."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) or 1)
        kind = rng.randrange(6)
        if kind == 0 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            content[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 3:
            del content[at:]
        else:  # the value after a colon
            places = [i for i, byte in enumerate(content) if byte == ord(":")]
            if places:
                begin = rng.choice(places) + 1
                end = next((i for i in range(begin, len(content)) if content[i] in b",}\n"), len(content))
                content[begin:end] = rng.choice(VALUES).encode()
    return bytes(content)


def shown(folders, capsys):
    """What a report prints, and whether it has made a page."""
    code = report.main([*map(str, folders)])
    assert code in (0, 2)
    return capsys.readouterr().err, code == 0


FILES = ("metrics.jsonl", "config.json", "versions.json", "inputs.json", "rollouts/000001.npz")


def fuzz(leave_run, tmp_path, monkeypatch, capsys, file, seeds, draw):
    monkeypatch.setattr(plots, "draw_curves", draw)
    gc.collect()  # what earlier tests left may complain on stderr while it is deleted: not during a report
    capsys.readouterr()
    run = leave_run(tmp_path / "run")
    (run / "inputs.json").write_text(json.dumps({"task.train": "0" * 64, run_files.START: "0" * 16}), encoding="utf-8")
    (run / "versions.json").write_text(
        json.dumps({"commit": "0" * 40, "packages": {"jax": "0.10.2"}, "earlier": []}), encoding="utf-8"
    )
    whole, outcomes = (run / file).read_bytes(), {True: 0, False: 0}
    for seed in seeds:
        (run / file).write_bytes(content := changed(whole, random.Random(seed)))
        said, made = shown([run], capsys)
        outcomes[made] += 1
        assert made or f"left out: {run}" in said, (seed, content[:300], said)
        assert "Traceback" not in said
    return outcomes


@pytest.mark.soak
@pytest.mark.parametrize("file", FILES)
def test_a_report_of_a_folder_with_changes_anywhere_is_made_or_names_what_is_left_out(
    leave_run, tmp_path, monkeypatch, capsys, file
):
    outcomes = fuzz(leave_run, tmp_path, monkeypatch, capsys, file, range(400), lambda folder: None)
    assert outcomes[True] > 20 and sum(outcomes.values()) == 400


@pytest.mark.parametrize("file", FILES)
def test_a_few_of_these_changes_with_curves(leave_run, tmp_path, monkeypatch, capsys, file):
    fuzz(leave_run, tmp_path, monkeypatch, capsys, file, range(1000, 1006), plots.draw_curves)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "x"}',
        '{"step": [1]}',
        '{"step": 1e999}',
        '{"step": -1}',
        '{"step": true}',
        '{"step": 11, "seconds": "1"}',
    ]
    + ['{"step": 11, "reward": 1e999}', f'{{"step": 1{"0" * 23}}}', '{"step": 11, "reward": {"a": 1}}'],
)
def test_a_line_that_no_run_writes_leaves_the_run_out_by_name(leave_run, tmp_path, capsys, line):
    good, bad = leave_run(tmp_path / "good"), leave_run(tmp_path / "bad", seed=1)
    with (bad / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    said, made = shown([good, bad], capsys)
    assert made and f"left out: {bad}: {bad / 'metrics.jsonl'}: " in said and "remove this line" in said


def test_a_small_file_that_unpacks_to_gigabytes_is_left_out(leave_run, tmp_path, monkeypatch, capsys):
    run = leave_run(tmp_path / "run")
    monkeypatch.setattr(rollouts, "MOST_BYTES", 10**6)
    np.savez_compressed(run / "rollouts" / "000001.npz", text=np.zeros(2 * 10**6, np.uint8))
    assert (run / "rollouts" / "000001.npz").stat().st_size < 10**4
    said, made = shown([run], capsys)
    assert made and "000001.npz is not a whole rollout file (it unpacks to more than 1000000 bytes)" in said


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "versions.json", "rollouts/000001.npz"])
def test_a_pipe_in_a_folder_is_not_waited_for(leave_run, tmp_path, capsys, file):
    run = leave_run(tmp_path / "run")
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    said, made = shown([run], capsys)
    assert not made and f"left out: {run}: {run / file} is neither a file nor a folder" in said


def test_a_folder_that_cannot_be_written_is_reported_elsewhere(leave_run, tmp_path, monkeypatch, capsys):
    run, write = leave_run(tmp_path / "run"), plots.write_atomically

    def read_only(path, content):
        if run in path.parents:
            raise PermissionError(30, "Read-only file system", str(path))
        write(path, content)

    for module in (plots, report.summary, page):
        monkeypatch.setattr(module, "write_atomically", read_only)
    assert report.main([str(run), f"--out={tmp_path / 'page.html'}"]) == 0
    assert "not written beside the run: Read-only file system: " in capsys.readouterr().err
    assert (tmp_path / "page.html").stat().st_size > 1000 and not (run / "summary.md").exists()


def test_a_folder_in_the_place_of_curves_is_named_and_the_page_is_made(leave_run, tmp_path, capsys):
    run = leave_run(tmp_path / "run")
    (run / "curves.png").mkdir()
    said, made = shown([run], capsys)
    assert made and f"not written beside the run: {run / 'curves.png'} is no file, and is not replaced" in said


def test_a_page_replaces_a_page_and_no_other_file(leave_run, tmp_path, capsys):
    run, out = leave_run(tmp_path / "run"), tmp_path / "notes.md"
    out.write_text("mine", encoding="utf-8")
    arguments = [str(run), f"--out={out}"]
    assert report.main(arguments) == 2
    assert (
        "is no page of this program, and is not replaced" in capsys.readouterr().err
        and out.read_text(encoding="utf-8") == "mine"
    )
    out.unlink()
    assert report.main(arguments) == report.main(arguments) == 0
    assert page.is_page(out)
