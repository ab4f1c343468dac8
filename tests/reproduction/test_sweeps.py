"""Sweeps: the tables that they are, the names of their runs, and the values that are chosen from them."""

from __future__ import annotations

import pytest

from rpg_jax import reproduce
from rpg_jax.report.run_files import Run
from rpg_jax.reproduction import run_tables, sweeps
from rpg_jax.reproduction.results import Results
from rpg_jax.reproduction.run_tables import check_table
from rpg_jax.reproduction.sweeps import sweep_table
from rpg_jax.reproduction.tables import LEARNING_RATE, TABLES
from rpg_jax.runs import run_names

RATES = "optimizer.learning_rate=1e-4,3e-4"


def run_of(cell, accuracy, *, steps=3):
    records = [{"step": step, "accuracy": accuracy} for step in range(1, steps + 1)]
    return Run(cell.name, cell.seed, {"train.steps": 3}, records, row=cell.row)


def test_a_sweep_is_the_table_of_every_combination():
    name, table = sweep_table("configs/small.py", ["GRPO", "DAPO"], [RATES, "reference.rule=fixed,every"])
    assert name == "sweep-small-lr-reference" and len(table.rows) == 8
    assert table.rows["GRPO, lr 3e-4, reference fixed"] == (
        *("--config.method=GRPO", "--config.optimizer.learning_rate=0.0003", "--config.reference.rule=fixed"),
    )
    assert table.compared_with("DAPO, lr 3e-4, reference every") == "DAPO, lr 1e-4, reference fixed"
    assert table.compared_with("DAPO, lr 1e-4, reference fixed") == table.baseline == "GRPO, lr 1e-4, reference fixed"
    assert sweep_table("configs/small.py", [], ["method=GRPO,DAPO", RATES])[1].rows.keys() == {
        f"{method}, lr {rate}" for method in ("GRPO", "DAPO") for rate in ("1e-4", "3e-4")
    }
    assert list(sweep_table("configs/small.py", [], [RATES])[1].rows) == ["lr 1e-4", "lr 3e-4"]


def test_methods_and_seeds_alone_are_a_table_of_any_config(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        run_tables,
        "make_table",
        lambda name, table, how: (asked.update(name=name, table=table, how=how), ("page", {}))[1],
    )
    assert reproduce.main(["--methods=GRPO,DAPO", "--seeds=3", "--config=tiny", f"--out={tmp_path}"]) == 0
    assert asked["table"].rows == {"GRPO": ("--config.method=GRPO",), "DAPO": ("--config.method=DAPO",)}
    assert (asked["name"], asked["table"].config, list(asked["how"].seeds)) == ("sweep-tiny-method", "tiny", [0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.learnin_rate=1"], "no config field 'optimizer.learnin_rate'; did you mean optimizer.learning_ra"),
        (["reference.rule=fixd"], "reference.rule='fixd': did you mean 'fixed'? One of"),
        (["optimizer.learning_rate=1e-4,abc"], "could not convert string to float: 'abc'"),
        (["train.steps"], "--sweep 'train.steps': write FIELD=VALUE,VALUE"),
        (["=1,2"], "--sweep '=1,2': write FIELD=VALUE,VALUE"),
        (["train.steps=1,1"], "a value is there twice"),
        (["task.digits=1,12"], "task.digits=12 must be in [1, 9]"),
        (["train.steps=1", "--methods=GRP0"], "GRP0, steps 1: unknown method 'GRP0'. Did you mean 'GRPO'?"),
        (["train.updates_per_step=1,7"], "updates 7: rollout.prompts_per_step=64 must be a multiple of"),
        (["seed=1,2"], "--sweep seed: --seeds and --out give every run its seed"),
        (["train.steps=1", "--", "--data=rows.jsonl"], "unknown flag --data: only fields go here, as --config.task.tr"),
        (["train.steps=1", "--seeds=x"], "--seeds=x: give a number of seeds"),
        (["train.steps=1", "--table=small"], "give either --table, or --methods or --sweep"),
    ],
)
def test_a_sweep_that_could_not_run_is_refused_before_it_starts(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_tables, "train_runs", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(run_tables, "platform_name", lambda: "cpu")
    assert reproduce.main([f"--out={tmp_path}", "--sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_tables_own_overrides_are_checked_too():
    with pytest.raises(ValueError, match="GRPO: no config field 'train.stepz'; did you mean train.steps"):
        check_table(TABLES["small"], ["--config.train.stepz=3"])


def test_names_of_runs_say_what_differs_and_only_that():
    method, rate = "--config.method=GRPO", "--config.optimizer.learning_rate="

    def name(*overrides):
        return run_names.run_name("configs/small.py", overrides)

    assert name(method, f"{rate}3e-4") == name(method, f"{rate}0.0003") == "small-GRPO-lr3e-4"
    assert name(method, f"{rate}1e-4") == name(method, "--config.loss.clip_low=0.2") == name(method) == "small-GRPO"
    assert name() == name("--config.method=RPG-REINFORCE-URKL") == "small-RPG-REINFORCE-URKL"
    assert name(method, "--config.reference.rule=kl") == "small-GRPO-reference=kl"
    assert name(method, "--config.rollout.max_tokens=7") == "small-GRPO-tokens7"
    assert name(method, "--config.warm_start.max_tokens=7") == "small-GRPO-warm_start.max_tokens7"
    odd = [name(method, f"--config.rewards.parts=exact:{weight}") for weight in ("1", "2", "1,format:2")]
    assert len(set(odd)) == 3 and odd[0].startswith("small-GRPO-parts=exact_1~")
    assert [run_names.shown(x) for x in (1e-4, 2.5e-5, 0.02, 3.0, 1, True, -5e-3)] == [
        *("1e-4", "2.5e-5", "0.02", "3", "1", "True", "-5e-3"),
    ]


@pytest.fixture
def scan():
    """GRPO is best at 1e-4 and DAPO at 2e-4, the largest; one of DAPO's runs at 5e-5, the highest, failed."""
    table = TABLES["small"].only(["GRPO", "DAPO"]).scan()
    accuracy = {"GRPO, lr 5e-5": 0.5, "GRPO, lr 1e-4": 0.7, "DAPO, lr 5e-5": 0.9, "DAPO, lr 2e-4": 0.6}
    runs = [
        run_of(cell, accuracy.get(cell.row, 0.4) + 0.01 * (cell.seed - 100), steps=2 if failed else 3)
        for cell in table.planned_runs([100, 101])
        for failed in [(cell.row, cell.seed) == ("DAPO, lr 5e-5", 101)]
    ]
    return Results("small-scan", table, runs)


def test_each_row_gets_its_best_rate_and_the_page_shows_all(scan):
    assert sweeps.best_values(scan) == {"GRPO": {LEARNING_RATE: 1e-4}, "DAPO": {LEARNING_RATE: 2e-4}}
    text = "\n".join(sweeps.section(scan))
    assert "| | lr 5e-5 | lr 1e-4 | lr 2e-4 |" in text and "| GRPO | 50.5 ± 6.4 | 70.5 ± 6.4 ✓ | 40.5 ± 6.4 |" in text
    assert "The largest value, lr 2e-4, is the chosen one of DAPO: a better one may lie beyond it." in text
    assert "smallest value" not in text and "seeds 100, 101" in text
    rows = TABLES["small"].with_settings(sweeps.best_values(scan)).rows
    assert rows["DAPO"] == ("--config.method=DAPO", "--config.optimizer.learning_rate=0.0002") and len(rows) == 2


def test_a_quick_look_has_the_three_rows_that_matter():
    assert run_tables.quick_rows(TABLES["small"]) == ["GRPO", "DAPO", "RPG-REINFORCE-URKL"]
    assert run_tables.quick_rows(TABLES["adapters"]) == ["full", "rank 16", "rank 4"]


def test_a_table_scans_chooses_runs_and_keeps_all(tmp_path, leave_a_run, without_figures, monkeypatch, capsys):
    started = []

    def train_runs(cells, out, **_):
        for cell in cells:
            if not (out / "runs" / cell.name).exists():
                started.append(cell.name)
                leave_a_run(out / "runs" / cell.name, 0.6 if "lr2e-4" in cell.name else 0.5)
        return {}

    monkeypatch.setattr(run_tables, "train_runs", train_runs)
    monkeypatch.setattr(run_tables, "platform_name", lambda: "cpu")
    arguments = ["--table=small", "--methods=GRPO,DAPO", f"--out={tmp_path}"]
    assert reproduce.main([*arguments, "--seeds=2"]) == 0
    assert len(started) == 2 * 3 * 2 + 2 * 2
    assert started[-4:] == [f"small-{method}-lr2e-4-seed{seed}" for seed in range(2) for method in ("GRPO", "DAPO")]
    text = (tmp_path / "small" / "small.md").read_text(encoding="utf-8")
    assert "| GRPO | 50.0 ± 0.0 | 50.0 ± 0.0 | 60.0 ± 0.0 ✓ |" in text
    assert "`python -m rpg_jax.reproduce --table=small --methods=GRPO,DAPO --seeds=2`" in text, "no folder"
    assert "4 runs of 3 steps and 12 that choose learning rates" in text and "60.0 ± 0.0" in text
    assert "**60.0**" not in text and "No value is marked as the highest: that takes 3 seeds" in text
    assert reproduce.main([*arguments, "--seeds=3"]) == 0
    assert [name[-5:] for name in started[16:]] == ["seed2", "seed2"] and "**60.0**" in (
        (tmp_path / "small" / "small.md").read_text(encoding="utf-8")
    )
    assert reproduce.main([*arguments, "--seeds=100,7"]) == 2
    assert "seeds 100 choose the learning rates" in capsys.readouterr().err
    assert reproduce.main(["--sweep", RATES, "--methods=GRPO,DAPO", "--seeds=3", f"--out={tmp_path}"]) == 0
    text = (tmp_path / "sweep-small-lr" / "sweep-small-lr.md").read_text(encoding="utf-8")
    assert "| GRPO, lr 3e-4 | +0.0 ± 0.0 | +0.0 ± 0.0 | GRPO, lr 1e-4 |" in text and "## Best value of each" in text
