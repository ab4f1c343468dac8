from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest

from rpg_jax import losses, reproduce
from rpg_jax.report import seeds
from rpg_jax.reproduction import page, run_tables, workers
from rpg_jax.reproduction.results import Results, collect
from rpg_jax.reproduction.tables import TABLES, PlannedRun
from rpg_jax.runs import config_files, resolve, run_folder
from tests.end_to_end.whole_runs import environment


def test_the_small_table_has_every_method_that_needs_no_teacher():
    named = [row.removesuffix(", untuned critic") for row in TABLES["small"].rows]
    assert named == [name for name in losses.METHODS if not name.startswith("OPD")]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_its_baseline_and_distinct_runs(name):
    table = TABLES[name]
    assert {table.baseline, *table.baselines, *table.baselines.values(), *table.shown} <= set(table.rows)
    cells = table.planned_runs(range(2))
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(table.rows)
    assert len(set(map(tuple, table.rows.values()))) == len(table.rows)


def test_a_new_row_of_methods_is_not_pooled_with_the_rows_of_the_paper():
    program = """
from rpg_jax.losses import methods
methods.METHODS = methods.METHODS | {"RPG-OWN": methods.regularized("rkl", "reinforce", source="own", kl_coef=0.1)}
from rpg_jax.reproduction.tables import TABLES
print(*[row for table in TABLES.values() for rows in table.pooled.values() for row in rows if row == "RPG-OWN"])
print("RPG-OWN" in TABLES["small"].rows, "RPG-OWN" in TABLES["reasoning"].rows)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=config_files.ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["", "True False", ""], done.stderr


def write_page(name, cells, out):
    results = Results(name, TABLES[name], collect(cells, out))
    return page.write_page(results, out / name)


@pytest.mark.slow
def test_runs_have_one_name_in_all_tables_exactly_if_they_are_the_same():
    names, configs = defaultdict(set), defaultdict(set)
    for table in TABLES.values():
        for cell in table.planned_runs([0]):
            c = importlib.import_module(cell.config.removesuffix(".py").replace("/", ".")).get_config()
            for field, value in (override.removeprefix("--config.").split("=") for override in cell.overrides):
                section, key = field.rsplit(".", 1) if "." in field else ("", field)
                part = c[section] if section else c
                kind = part.get_type(key)
                part[key] = kind(value) if kind in (int, float, str) else value == "True"
            config = resolve.resolve(c).to_json()
            names[config].add(cell.name)
            configs[cell.name].add(config)
    assert all(len(found) == 1 for found in (*names.values(), *configs.values())), names.values()
    assert len(names) < sum(len(table.rows) for table in TABLES.values())


def test_a_config_that_was_edited_between_two_seeds_is_refused_by_field(tmp_path, monkeypatch):
    """The run of seed 0 has ended; the page would put both into one row."""
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "mine.py").write_text("from configs.tiny import get_config\n", encoding="utf-8")
    first, second = (PlannedRun("row", seed, "mine.py", ("--config.method=GRPO",)) for seed in (0, 1))
    config = config_files.load("mine.py", run_tables.arguments(first, tmp_path, [])[1:]).config
    run_folder.open_run(resolve.resolve(config), run_folder.of(config))
    run_tables.check_config(first, tmp_path, [])
    run_tables.check_config(second, tmp_path, [])
    body = "    c = tiny.get_config()\n    c.optimizer.b1 = 0.5\n    return c\n"
    file.write_text(f"from configs import tiny\ndef get_config():\n{body}", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"is of another config: optimizer\.b1 was 0\.9, now 0\.5\. Undo the change of mine"
    ):
        run_tables.train_runs([first, second], tmp_path, jobs=1)


def test_an_unknown_row_is_an_error_with_the_known_ones(capsys):
    assert reproduce.main(["--table=small", "--methods=DAP0"]) == 2
    assert "no row 'DAP0' in this table; there are GRPO, GRPO-DeepSeekMath, DAPO" in capsys.readouterr().err


def test_rows_whose_names_have_commas_can_be_chosen():
    table = TABLES["reasoning-ablations"]
    assert table.named("β = 0.1, fixed,clip none") == ["β = 0.1, fixed", "clip none"]
    assert TABLES["small"].named("GRPO, DAPO") == ["GRPO", "DAPO"]
    assert table.named("clip none,21") == ["clip none", "21"]


def test_runs_of_other_overrides_are_never_taken_for_the_tables(tmp_path):
    plan, steps = PlannedRun("row", 0, "configs/tiny.py", ("--config.method=GRPO",)), "--config.train.steps=20"
    config = config_files.load(plan.config, run_tables.arguments(plan, tmp_path, [steps])[1:]).config
    run_folder.open_run(resolve.resolve(config), run_folder.of(config))
    run_tables.check_config(plan, tmp_path, [steps])
    for extra, differing in (([], "train.steps was 20, now 150"), ([steps, "--config.evaluation.k=3"], "evaluation.k")):
        with pytest.raises(ValueError, match=f"is of another config: {differing}.*, or choose another --out"):
            run_tables.train_runs([plan], tmp_path, jobs=1, extra=extra)


def test_runs_share_cores_and_a_gpus_memory_and_take_turns_on_a_tpu(monkeypatch):
    monkeypatch.setattr(run_tables, "cores", lambda: 6)
    monkeypatch.setattr(os, "environ", {})
    assert run_tables.jobs_at_once(None, "cpu") == 6 and run_tables.jobs_at_once(None, "tpu") == 1 and not os.environ
    assert run_tables.jobs_at_once(3, "gpu") == 3 and os.environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.300"}
    with pytest.raises(ValueError, match="--jobs=2: a TPU belongs to one run at a time; give --jobs=1"):
        run_tables.jobs_at_once(2, "tpu")
    with pytest.raises(ValueError, match="--jobs=0: at least 1"):
        run_tables.jobs_at_once(0, "cpu")


@pytest.mark.slow
def test_a_backend_that_does_not_start_is_an_error_of_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    assert reproduce.main(["--table=small", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: JAX does not start: ")


def test_two_commands_do_not_start_the_same_runs(tmp_path):
    with run_tables.locked(tmp_path), pytest.raises(ValueError, match="another table is being run"):
        run_tables.train_runs([], tmp_path, jobs=1)
    assert run_tables.train_runs([], tmp_path, jobs=1) == {}


def test_intervals_are_students():
    m = seeds.mean([0.1, 0.2, 0.3])
    assert m.value == pytest.approx(0.2)
    assert m.half == pytest.approx(4.302652730 * 0.1 / math.sqrt(3), rel=1e-6)
    assert math.isnan(seeds.mean([0.1]).half)


def test_differences_are_paired_by_seed():
    baseline = {0: 0.2, 1: 0.8, 2: 0.5}
    d = seeds.paired_difference({0: 0.3, 1: 0.9, 7: 0.0}, baseline)
    assert (d.value, d.half, d.seeds) == (pytest.approx(0.1), pytest.approx(0, abs=1e-12), 2)
    with pytest.raises(ValueError, match="no seed in common"):
        seeds.paired_difference({9: 0.0}, baseline)


@pytest.mark.parametrize(("count", "right"), [(3, 0.5), (3, 0.97), (8, 0.9), (16, 0.97)])
def test_intervals_of_paired_differences_cover_over_seeds(count, right):
    # 256 held-out problems a run, rates of a config that differ between seeds, and a baseline that is 2 points lower.
    rng, repetitions, problems = np.random.default_rng(0), 2000, 256
    rates = np.clip(right + 0.01 * rng.normal(size=(2, repetitions, count)), 0, 1) - [[[0.0]], [[0.02]]]
    row, baseline = rng.binomial(problems, rates) / problems
    found = [
        seeds.paired_difference(dict(enumerate(a)), dict(enumerate(b))) for a, b in zip(row, baseline, strict=True)
    ]
    # Clipped rates make the true difference a little smaller; the standard error of a share of 2,000 is 0.5 %.
    truth = (rates[0] - rates[1]).mean()
    assert np.mean([abs(d.value - truth) <= d.half for d in found]) >= 0.935


def test_a_table_whose_runs_ended_before_a_step_says_where_their_errors_are(tmp_path, leave_a_run, monkeypatch):
    table = TABLES["small"].only(["DAPO"])
    for cell in table.planned_runs([0]):
        leave_a_run(tmp_path / "runs" / cell.name, 0.5, steps=0)
    monkeypatch.setattr(run_tables, "train_runs", lambda *_, **__: {})
    options = run_tables.TableOptions(tmp_path, [0], jobs=1, scan=False)
    with pytest.raises(ValueError, match=f"no trained run of this table: look at {tmp_path / 'logs'}"):
        run_tables.make_table("small", table, options)


def test_ranks_share_ties():
    means = [seeds.Mean(value, 0.1, 3) for value in (0.5, 0.9, 0.9, 0.1)]
    assert seeds.ranks_of(means) == [2, 1, 1, 3]
    assert seeds.ranks_of(means[:1]) == [] == seeds.ranks_of([*means, seeds.Mean(0.7, 0.1, 2)])


def test_the_page_marks_best_and_second_and_flags_the_impossible(tmp_path, leave_a_run, without_figures):
    cells = TABLES["small"].only(["DAPO", "GRPO", "RPG-URKL", "RLOO"]).planned_runs(range(3))
    for cell, accuracy in zip(cells, (0.5, 0.4, 0.7, 0.1, 0.6, 0.5, 0.8, 0.1, 0.55, 0.45, 0.75, 0.1), strict=True):
        leave_a_run(tmp_path / "runs" / cell.name, accuracy)
    text = write_page("small", cells, tmp_path).read_text(encoding="utf-8")
    assert "| RPG-URKL | **75.0** ± 12.4 | **76.0** ± 12.4" in text
    assert "| DAPO | <u>55.0</u> ± 12.4" in text
    assert "| RPG-URKL | *+20.0 ± 0.0* | *+20.0 ± 0.0* | DAPO |" in text
    assert "| RPG-URKL | 75 ± 12 | 0.1 | 2 | 5 (every 16 updates) | 24 | *+20.0 ± 0.0* | DAPO |" in text
    assert "At equal" not in text
    assert "12 runs of 3 steps · k = 2 · commit unknown · unknown device" in text
    assert "table8_qwen2p5_7b_instruct" in text
    assert "52.61 (!)" in "\n".join(page.paper_table("table3_qwen3_4b_8k"))


def test_each_row_is_compared_with_its_own_and_a_row_without_is_named(tmp_path, leave_a_run, without_figures):
    rpg = "RPG-REINFORCE-URKL"
    table = TABLES["starts"]
    rows = ["DAPO, start 0", f"{rpg}, start 0", "DAPO, start 1", f"{rpg}, start 1"]
    cells = table.only(rows).planned_runs(range(2))
    for cell in cells:
        leave_a_run(tmp_path / "runs" / cell.name, {rows[0]: 0.5, rows[1]: 0.4}.get(cell.row, 0.7))
    text = write_page("starts", cells, tmp_path).read_text(encoding="utf-8")
    for row, other, points in ((rows[1], rows[0], "*-10.0 ± 0.0*"), (rows[3], rows[2], "+0.0 ± 0.0")):
        assert f"| {row} | {points} | {points} | {other} |" in text
        assert f"| {points} | {other} |\n" in text.split("## While training")[1]
    assert f"\n| {rows[2]} |" not in text.split("## Differences")[1].split("## While training")[0]
    cells = [cell for cell in cells if cell.row != rows[2]]
    assert f"{rows[2]}: not run." in write_page("starts", cells, tmp_path).read_text(encoding="utf-8")


FAKE_WORKER = """
import json, pathlib, sys
for line in sys.stdin:
    order = json.loads(line)
    folder = pathlib.Path(order["argument"][0]); folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent.parent / "started", "a") as f: f.write(folder.name + "\\n")
    (folder.parent.parent / "warm_starts" / "x").mkdir(parents=True, exist_ok=True)
    if "GRPO" in folder.name: open(order["log"], "a").write("out of cheese"); sys.exit(3)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 1}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\\n")
    (folder / "summary.md").write_text("")
    print(0, flush=True)
"""


def test_failed_cells_are_reported_and_ended_ones_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "WORKER", (sys.executable, "-c", FAKE_WORKER))
    monkeypatch.setattr(run_tables, "arguments", lambda cell, out, extra: [str(out / "runs" / cell.name)])
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(run_tables, "check_config", lambda *_: None)  # the worker of this test writes none
    cells = TABLES["small"].only(["DAPO", "GRPO", "CISPO"]).planned_runs([0])
    for _ in range(2):
        failed = run_tables.train_runs(cells, tmp_path, jobs=2)
        assert list(failed) == ["GRPO, seed 0"]
    assert "out of cheese" in failed["GRPO, seed 0"].read_text(encoding="utf-8")
    started = (tmp_path / "started").read_text(encoding="utf-8").split()
    assert sorted(started) == ["small-CISPO-seed0", "small-DAPO-seed0", *2 * ["small-GRPO-seed0"]]
    assert capsys.readouterr().err.splitlines()[-1] == "2/3 runs: step 2/180"


SLOW_WORKER = """
import json, os, pathlib, signal, sys, time
def stop(*_): (log.parent.parent / "stopped").touch(); sys.exit(143)
log = pathlib.Path(json.loads(sys.stdin.readline())["log"]); signal.signal(signal.SIGTERM, stop)
log.write_text(f"{os.getpid()}\\n"); time.sleep(60)
"""

TABLE = """
import pathlib, sys
from rpg_jax.reproduction import workers
from rpg_jax.reproduction.run_tables import train_runs
from rpg_jax.reproduction.tables import TABLES
workers.WORKER = (sys.executable, "-c", sys.argv[2])
train_runs(TABLES["small"].only(["DAPO"]).planned_runs([0]), pathlib.Path(sys.argv[1]), jobs=1)
"""


def wait_until(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow  # processes that start JAX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_table_that_is_ended_leaves_no_run_that_another_command_starts_beside_it(tmp_path, popen, number):
    table = popen([sys.executable, "-c", TABLE, tmp_path, SLOW_WORKER])
    log = tmp_path / "logs" / "small-DAPO-seed0.log"
    wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").endswith("\n"))
    table.send_signal(number)
    code = table.wait(timeout=30)
    if number == signal.SIGKILL:
        with pytest.raises(ValueError, match="another table is being run"):
            run_tables.train_runs([], tmp_path, jobs=1)
        os.kill(int(log.read_text(encoding="utf-8")), signal.SIGTERM)
        wait_until((tmp_path / "stopped").exists)
    else:
        assert code == 128 + number and (tmp_path / "stopped").exists()
        assert run_tables.train_runs([], tmp_path, jobs=1) == {}


def test_a_cells_arguments_name_run_method_and_shared_folders(tmp_path):
    cell = PlannedRun("RPG-URKL, κ", 3, "configs/small.py", ("--config.method=RPG-URKL", "--config.reference.rule=kl"))
    arguments = run_tables.arguments(cell, tmp_path, ["--config.train.steps=9"])
    assert arguments[0] == "--config=configs/small.py" and arguments[-1] == "--config.train.steps=9"
    assert "--config.run.name=small-RPG-URKL-reference=kl-seed3" in arguments


@pytest.mark.slow
def test_a_table_of_real_runs_from_command_to_page(shared, tmp_path, monkeypatch):
    for name, value in environment(shared).items():  # of its workers
        monkeypatch.setenv(name, value)
    arguments = ["--table=small", "--methods=DAPO,GRPO", "--seeds=1", "--noscan", f"--out={tmp_path}", "--"]
    small = {
        "model.num_layers": 1, "model.embed_dim": 32, "model.hidden_dim": 64, "rollout.prompts_per_step": 16,
        "warm_start.min_accuracy": 0.0, "warm_start.check_every": 5, "warm_start.batch_size": 64,
        "dynamic_sampling.enabled": False,  # nearly all completions are wrong
        "train.steps": 2, "evaluation.k": 2, "evaluation.problems": 8,
    }  # fmt: skip
    assert reproduce.main([*arguments, *(f"--config.{name}={value}" for name, value in small.items())]) == 0
    text = (tmp_path / "small" / "small.md").read_text(encoding="utf-8")
    assert "| DAPO |" in text and "| GRPO |" in text
