"""The experiment on a pretrained model: its cells are configs that run, its judge measures KL, its file goes on."""

from pathlib import Path

import pytest

from experiments.pretrained import __main__ as program
from experiments.pretrained import judge, results, runs
from rpg_jax.report.run_files import read_jsonl
from rpg_jax.runs import config_files
from rpg_jax.runs.resolve import resolve


def test_the_questions_are_different_and_every_fact_has_an_answer():
    assert len(set(judge.questions())) == 200 and all(judge.questions())
    assert len({question for question, _ in judge.facts()}) == 60 and all(answer for _, answer in judge.facts())


def test_every_cell_is_a_run_of_its_own_and_a_config_that_training_takes():
    cells = list(runs.cells(3))
    assert len(cells) == len({cell.name for cell in cells}) == 3 * (1 + 5 * len(runs.STRENGTHS))
    for cell in cells[:26]:
        config = resolve(config_files.changed(config_files.load(runs.CONFIG).config, cell.overrides))
        assert (config.loss.kl_coef, config.reference.rule) == (cell.kl_coef, "fixed"), cell
        assert (config.loss.advantage, config.loss.aggregate) == ("leave_one_out", "sequence_mean_token_sum"), cell


@pytest.mark.parametrize(("text", "said"), [("It is Rome.", True), ("ROME", True), ("Romeo", False), ("", False)])
def test_an_answer_says_a_fact_as_a_word_of_its_own(text, said):
    assert judge._says(text, "Rome") is said


def test_a_table_has_the_cells_in_order_and_the_interval_of_several_seeds():
    numbers = dict.fromkeys([*results._GAINED, *results._LOST], 1.0)
    found = [
        {"row": row, "kl_coef": b, "seed": s} | numbers for row, b in (("start", 0.0), ("no KL", 0.0)) for s in (0, 1)
    ]
    gained = results.tables(found)["Gained"].splitlines()
    assert len(gained) == 4 and "1.00 ± 0.00" in gained[-1] and "| no KL | – | 2 |" in gained[-1]
    assert results.draw(found).startswith(b"\x89PNG")


def test_the_command_makes_tables_and_figure_of_the_kept_runs(tmp_path):
    assert program.main(["--from-data", f"--out={tmp_path}"]) == 0
    assert "| no KL | – | 3 |" in (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert (tmp_path / "pretrained.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # trains and judges a model
def test_a_cell_is_trained_and_judged_once(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="needs the package gguf, of requirements-dev.txt")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "models"))
    from tiny_gguf import write

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write(tmp_path / "tiny.gguf", "llama3", metadata={"llama.context_length": 128})
    monkeypatch.setattr(judge, "questions", lambda: ["Why?", "Who is it?"])
    monkeypatch.setattr(judge, "facts", lambda: [("Where?", "Rome")])
    monkeypatch.setitem(runs._SHARED, "train.steps", 1)
    monkeypatch.setitem(runs._SHARED, "train.microbatch_size", 8)  # the tests have eight devices
    monkeypatch.setitem(runs._SHARED, "optimizer.learning_rate", 0.1)
    cell = runs.Cell("completions: RKL", 0.1, 0)
    assert runs.missing(tmp_path, [cell]) == [cell]
    runs.make_run(str(model), tmp_path, cell)
    start, trained = read_jsonl(tmp_path / runs.FILE)
    assert start["kl"] == pytest.approx(0, abs=1e-4) and start["lost"] == pytest.approx(0, abs=1e-5)
    assert trained["kl"] > 0.01 and trained["lost"] > 0 and trained["perplexity"] > start["perplexity"]
    assert not (tmp_path / "runs" / cell.name).exists() and runs.missing(tmp_path, [cell]) == []
