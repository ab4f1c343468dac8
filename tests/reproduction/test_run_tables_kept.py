"""Tables that grow: rows and seeds beside runs whose numbers are kept."""

from __future__ import annotations

import gzip
import json

import pytest

from rpg_jax import reproduce
from rpg_jax.reproduction import results, run_tables, sweeps

FIRST = ["--table=small", "--methods=GRPO,DAPO", "--seeds=2"]


@pytest.fixture
def started(leave_a_run, without_figures, monkeypatch):
    """Names of the cells that are run, in place of training; DAPO's best rate is 2e-4, that of others 5e-5."""
    names = []

    def train_runs(cells, out, **_):
        for cell in cells:
            if not (out / "runs" / cell.name).exists():
                names.append(cell.name)
                best = "lr2e-4" if "DAPO" in cell.name else "lr5e-5"
                leave_a_run(out / "runs" / cell.name, 0.6 if best in cell.name else 0.5, start=out.name)
        return {}

    monkeypatch.setattr(run_tables, "train_runs", train_runs)
    monkeypatch.setattr(run_tables, "platform_name", lambda: "cpu")
    return names


def test_a_row_and_a_seed_are_added_without_the_runs_of_the_others(tmp_path, started):
    here = f"--out={tmp_path / 'first'}"
    assert reproduce.main([*FIRST, here]) == 0
    kept = tmp_path / "kept.json.gz"
    (tmp_path / "first" / "small" / "small.json.gz").rename(kept)
    before = results.load(kept)
    (tmp_path / "first" / "runs").rename(tmp_path / "gone")
    del started[:]
    assert reproduce.main(["--table=small", "--methods=DAPO,RLOO", "--seeds=3", here, f"--with-data={kept}"]) == 0
    assert started == [
        *(f"small-RLOO{rate}-seed{seed}" for seed in (100, 101) for rate in ("-lr5e-5", "", "-lr2e-4")),
        *("small-RLOO-lr5e-5-seed0", "small-RLOO-lr5e-5-seed1", "small-DAPO-lr2e-4-seed2", "small-RLOO-lr5e-5-seed2"),
    ]
    after = results.load(tmp_path / "first" / "small" / "small.json.gz")
    assert list(after.table.rows) == ["GRPO", "DAPO", "RLOO"]  # the order of the table
    assert [(run.seed, run.row) for run in after.runs] == [
        *((0, "GRPO"), (0, "DAPO"), (0, "RLOO"), (1, "GRPO"), (1, "DAPO"), (1, "RLOO"), (2, "DAPO"), (2, "RLOO")),
    ]
    assert [run for run in after.runs if run.row == "GRPO"] == [run for run in before.runs if run.row == "GRPO"]
    assert {group: row[-4:] for group, row in sweeps.best(after.scan).items()} == {
        "GRPO": "5e-5",
        "DAPO": "2e-4",
        "RLOO": "5e-5",
    }
    assert len(after.scan.runs) == 18 and after.hardware == before.hardware
    text = (tmp_path / "first" / "small" / "small.md").read_text(encoding="utf-8")
    assert "8 runs of 3 steps and 18 that choose learning rates" in text


def test_a_kept_run_that_had_not_ended_is_run(tmp_path, started):
    here = f"--out={tmp_path / 'first'}"
    assert reproduce.main([*FIRST, here]) == 0
    data = tmp_path / "first" / "small" / "small.json.gz"
    packed = json.loads(gzip.decompress(data.read_bytes()))
    for block in packed["runs"][3]["metrics"]:
        for column in block.values():
            column.pop()
    data.write_bytes(gzip.compress(json.dumps(packed).encode()))
    data.rename(tmp_path / "kept.json.gz")
    (tmp_path / "first" / "runs").rename(tmp_path / "gone")
    del started[:]
    assert reproduce.main([*FIRST, here, f"--with-data={tmp_path / 'kept.json.gz'}"]) == 0
    assert [name[-5:] for name in started] == ["seed1"] and "DAPO" in started[0]


def test_runs_that_cannot_stand_on_one_page_are_refused(tmp_path, started, capsys):
    assert reproduce.main([*FIRST, f"--out={tmp_path / 'first'}"]) == 0
    kept = tmp_path / "first" / "small" / "small.json.gz"
    another = ["--table=small", "--methods=RLOO", "--seeds=2", f"--with-data={kept}"]
    assert reproduce.main([*another, f"--out={tmp_path / 'second'}"]) == 2
    assert "(first) and small-RLOO" in (error := capsys.readouterr().err)
    assert "did not start from the same weights" in error and "copy the warm start of the kept runs" in error
    for arguments, message in (
        (["--table=starts"], "the kept numbers are of small (configs/small.py), not of starts"),
        ([*FIRST, "--", "--config.train.steps=4"], "the kept runs of small have the overrides [], not ['--config.tra"),
        ([*FIRST, "--noscan"], "leave out --quick and --noscan"),
        (["--sweep", "optimizer.learning_rate=1e-4"], "--with-data is for tables"),
    ):
        at = arguments.index("--") if "--" in arguments else len(arguments)
        with_data = [*arguments[:at], f"--with-data={kept}", f"--out={tmp_path / 'third'}", *arguments[at:]]
        assert reproduce.main(with_data) == 2
        assert message in capsys.readouterr().err
    packed = json.loads(gzip.decompress(kept.read_bytes()))
    packed["table"]["rows"]["GRPO"] = ["--config.method=GRPO-DeepSeekMath"]
    kept.write_bytes(gzip.compress(json.dumps(packed).encode()))
    assert reproduce.main([*FIRST, f"--out={tmp_path / 'first'}", f"--with-data={kept}"]) == 2
    assert "the kept runs of GRPO have ['--config.method=GRPO-DeepSeekMath'], today's have" in capsys.readouterr().err
