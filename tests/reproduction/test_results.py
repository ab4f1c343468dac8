"""The numbers that a table keeps: the same page from the runs and from the file, and what the page says of its code."""

from __future__ import annotations

import dataclasses
import gzip

import pytest

from rpg_jax import reproduce
from rpg_jax.reproduction import page, run_tables
from rpg_jax.reproduction.results import Results, check_kept, collect, load, save
from rpg_jax.reproduction.tables import TABLES

GRPO_AND_DAPO = TABLES["small"].only(["GRPO", "DAPO"])
A, B = "a" * 40, "b" * 40


@pytest.fixture
def results(tmp_path, leave_a_run):
    """The results of two fabricated runs; GRPO's has the commit `commits[0]`, DAPO's `commits[1]`."""

    def fabricate(commits=(A, A), seeds=(0,)):
        cells = GRPO_AND_DAPO.planned_runs(seeds)
        for cell in cells:
            commit = commits[cell.row == "DAPO"]
            leave_a_run(tmp_path / "runs" / cell.name, 1 / 3, gain=0.0123456789, commit=commit, groups=4 + cell.seed)
        runs = collect(cells, tmp_path)
        return Results("small", GRPO_AND_DAPO, runs, "python -m rpg_jax.reproduce --table=small", "1 at once")

    return fabricate


@pytest.mark.slow  # draws the figures of two pages
def test_the_page_from_the_runs_is_the_page_from_the_data(tmp_path, results, capsys):
    from_runs, data = results(), tmp_path / "small.json.gz"
    page.write_page(from_runs, tmp_path / "runs_page")
    save(from_runs, data)
    assert reproduce.main([f"--from-data={data}", f"--out={tmp_path / 'again'}"]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "again" / "small").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "runs_page").iterdir()}
    text, images = files.pop("small.md").decode(), ("small.png", "small-dynamics.png")
    assert {*images} == {*files} and all(f"({image})" in text and len(files[image]) > 1000 for image in images)


def test_data_keep_everything_but_places_and_digits_and_have_the_same_bytes_each_time(tmp_path, results):
    made = results((A, B))
    scan = dataclasses.replace(made, name="small-scan", table=TABLES["small"].scan())
    made = dataclasses.replace(made, scan=scan, extra=("--config.train.steps=3",))
    for name in ("one", "two"):
        save(made, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = load(tmp_path / "one")
    assert loaded.runs == made.runs and loaded.scan.table.swept == scan.table.swept and loaded.extra == made.extra
    assert loaded.table.rows == made.table.rows and loaded.runs[0].late("accuracy") == 0.3704
    text = gzip.decompress((tmp_path / "one").read_bytes()).decode()
    assert "/a/path" not in text and str(tmp_path) not in text


def test_the_costs_of_a_branch_are_kept_as_they_are(tmp_path, results):
    made = results()
    branches = [dataclasses.replace(run, parent="/runs/a@1") for run in made.runs]
    save(made := dataclasses.replace(made, runs=branches), tmp_path / "kept")
    assert [run.costs for run in load(tmp_path / "kept").runs] == [run.costs for run in made.runs]
    assert made.runs[0].begun == 1 and len(made.runs[0].trained) == 2


def test_kept_runs_that_chose_among_other_rates_are_refused(results):
    made = results()
    kept = dataclasses.replace(made, scan=dataclasses.replace(made, table=TABLES["small"].scan()))
    check_kept(kept, "small", GRPO_AND_DAPO, ())
    others = dataclasses.replace(GRPO_AND_DAPO, rates=(1e-4, 3e-4))
    with pytest.raises(ValueError, match="chose their learning rates from .*0.0002.*, today's from .*0.0003"):
        check_kept(kept, "small", others, ())
    check_kept(made, "small", others, ())  # chose none


def test_a_page_names_the_rows_of_each_commit(tmp_path, results, without_figures):
    made = results((A, B), seeds=(0, 1))
    text = page.write_page(made, tmp_path).read_text(encoding="utf-8")
    assert "**2 versions of the code, see below**" in text and "## Versions of the code" in text
    assert "| commit aaaaaaa, jax 0.10.2 | – | GRPO |" in text and "| commit bbbbbbb, jax 0.10.2 | – | DAPO |" in text
    dirty = {**made.runs[0].versions, "uncommitted_changes": True, "packages": {"jax": "0.11.0", "flax": "1"}}
    runs = [dataclasses.replace(made.runs[0], versions=dirty), *made.runs[1:]]
    text = page.write_page(dataclasses.replace(made, runs=runs), tmp_path).read_text(encoding="utf-8")
    assert "| commit aaaaaaa with uncommitted changes, jax 0.11.0 | flax 1 | GRPO (seed 0) |" in text
    one = [dataclasses.replace(run, versions=made.runs[0].versions) for run in made.runs]
    text = page.write_page(dataclasses.replace(made, runs=one), tmp_path).read_text(encoding="utf-8")
    assert "· commit aaaaaaa, jax 0.10.2 ·" in text and "Versions of the code" not in text
    table = dataclasses.replace(made.table, rows={**made.table.rows, "DAPO": ("--config.method=RPG-RKL",)})
    text = page.write_page(dataclasses.replace(made, table=table), tmp_path).read_text(encoding="utf-8")
    assert "the command has other settings today for DAPO." in text


def test_a_page_names_the_rows_that_its_curves_leave_out(tmp_path, results, without_figures, monkeypatch):
    made = results()
    assert "Figures over steps show" not in page.write_page(made, tmp_path).read_text(encoding="utf-8")
    monkeypatch.setattr(page, "SHOWN", 1)
    text = page.write_page(made, tmp_path).read_text(encoding="utf-8")
    assert "Figures over steps show 1 rows of 2, without DAPO." in text


def test_data_that_are_missing_or_foreign_are_an_error_of_one_line(tmp_path, capsys):
    assert reproduce.main([f"--from-data={tmp_path / 'none.json.gz'}"]) == 2
    assert "none.json.gz: make the table first" in capsys.readouterr().err
    for content in (b"{}", gzip.compress(b"[1]"), gzip.compress(b'{"table": {"rows": [1]}}')):
        (tmp_path / "bad").write_bytes(content)
        assert reproduce.main([f"--from-data={tmp_path / 'bad'}"]) == 2
        assert "is not the data of a table" in capsys.readouterr().err
    flags = ["--table=small", "--from-data", "--seeds=3", "--noscan", "--", "--config.train.steps=3"]
    assert reproduce.main(flags) == 2
    assert "leave out --seeds, --noscan, --config.train.steps=3" in capsys.readouterr().err


def test_the_numbers_that_come_with_the_code_are_of_a_table():
    for data in run_tables.DATA.glob("*.json.gz"):
        assert f"{load(data).name}.json.gz" == data.name


# Until 2026-11-27 a file that git did not know counted as a change; the checkout of these runs had a link to weights.
WITH_A_NEW_FILE = {"pretrained.json.gz"}


@pytest.mark.slow  # draws the figures of a page
@pytest.mark.parametrize("data", sorted(run_tables.DATA.glob("*.json.gz")), ids=lambda path: path.name)
def test_a_committed_page_is_that_of_its_committed_runs(tmp_path, data):
    page = run_tables.page_from(data, tmp_path)
    assert (run_tables.DATA.parent / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    changed = any(run.versions["uncommitted_changes"] for run in load(data).runs)
    assert changed == ("with uncommitted changes" in page.read_text(encoding="utf-8")) == (data.name in WITH_A_NEW_FILE)
