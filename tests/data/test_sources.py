from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from rpg_jax.data.prompts import apply_template
from rpg_jax.data.sources import load, write_parquet
from rpg_jax.rewards.expression import countdown


def official(question="What is 1+1?", answer="2", index=0, **changes):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": apply_template("paper", question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index, "raw_problem": question, "split": None},
    }
    return {**row, **changes}


def parquet(path: Path, rows) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path: Path, rows) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_repeated_rows_become_samples_of_one_problem(tmp_path):
    rows = [official(f"What is {n}?", str(n), index=i) for i in range(32) for n in range(3)]
    problems, report = load(parquet(tmp_path / "a.parquet", rows))
    assert [(p.prompt_id, p.question, p.answer, p.samples) for p in problems] == [
        (n, f"What is {n}?", str(n), 32) for n in range(3)
    ]
    assert problems[0].prompt == rows[0]["prompt"][0]["content"] and problems[0].source == "math_dapo"
    assert (report.rows, report.repeated, report.bad) == (96, 93, [])


@pytest.mark.parametrize(
    ("name", "problems", "source"),
    [("aime-2024", 30, "math_dapo"), ("aime25", 30, "aime2025"), ("amc-23", 40, "amc_23")],
)
def test_the_official_evaluation_files(name, problems, source):
    if not os.environ.get("RPG_DATA_DIR"):
        pytest.skip("set RPG_DATA_DIR to the folder with aime-2024.parquet, aime25.parquet and amc-23.parquet")
    loaded, report = load(str(Path(os.environ["RPG_DATA_DIR"]) / f"{name}.parquet"))
    assert len(loaded) == problems and report.rows == 32 * problems and not report.bad
    assert {p.samples for p in loaded} == {32} and {p.source for p in loaded} == {source}
    assert all(p.prompt == apply_template("paper", p.question) for p in loaded)


@pytest.mark.parametrize(
    ("name", "repository", "row"),
    [
        ("aime25", "math-ai/aime25", lambda question, answer: {"id": "7", "problem": question, "answer": answer}),
        (
            "amc-23",
            "math-ai/amc23",
            lambda question, answer: {"question": question, "answer": f"{answer}.0", "url": ""},
        ),
    ],
)
def test_the_hubs_evaluation_sets_are_the_official_files_problems(name, repository, row, tmp_path, monkeypatch):
    """The hub has each problem once, without a prompt; the official files have prompts and every problem 32 times."""
    if not os.environ.get("RPG_DATA_DIR"):
        pytest.skip("set RPG_DATA_DIR to the folder with aime25.parquet and amc-23.parquet")
    official, _ = load(str(Path(os.environ["RPG_DATA_DIR"]) / f"{name}.parquet"))
    file = parquet(tmp_path / "0000.parquet", [row(p.question, p.answer) for p in official])
    asked = []
    listed = lambda *_, **branch: asked.append(branch["repo_id"]) or ["default/test/0000.parquet"]  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **_: file)
    found, _ = load(name)
    assert asked == [repository]
    assert [(p.prompt, p.answer, p.source) for p in found] == [(p.prompt, p.answer, p.source) for p in official]


def test_flat_rows_get_the_papers_prompt_unless_told_otherwise(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": 2}, {"problem": "2+2?", "solution": "4"}])
    problems, _ = load(path, source="mine")
    assert [p.prompt for p in problems] == [apply_template("paper", q) for q in ("1+1?", "2+2?")]
    assert [(p.answer, p.source) for p in problems] == [("2", "mine"), ("4", "mine")]
    assert load(path, template="Q: {question}\n")[0][0].prompt == "Q: 1+1?\n"


BAD = {
    "not json {": "not JSON",
    '"text"': "expected an object, got str",
    '{"question": "x"}': "none of ['answer'",
    '{"question": "  ", "answer": "1"}': "empty prompt",
    '{"question": "x", "answer": ""}': "empty answer: any text will do if",
    '{"question": "x", "answer": ["1"]}': "'answer' must be text, got list",
    '{"question": "x", "answer": true}': "'answer' must be text, got bool",
    json.dumps(official(prompt=[])): "got roles []",
    json.dumps(official(prompt="text")): "must be a list",
    json.dumps(official(prompt=[{"role": "assistant", "content": "x"}])): "got roles ['assistant']",
    json.dumps(official(prompt=[{"role": "user"}])): "missing key 'content'",
    json.dumps(official(prompt=[{"role": "user", "content": " "}], extra_info={"raw_problem": "x"})): "empty prompt",
    json.dumps(official(reward_model={"style": "rule"})): "missing key 'ground_truth'",
    json.dumps(official(reward_model=None)): "'reward_model' must be",
    json.dumps(official(data_source=None)): "missing key 'data_source'",
    json.dumps(official("good 7?", "8")): "had the answer '7' before, now '8'",
    json.dumps({"question": "x", "answer": "1", "samples": -1}): "'samples' must be",
}


def test_bad_rows_are_named_with_file_and_line_and_counted(tmp_path):
    good = [official(f"good {n}?", str(n)) for n in range(100)]
    path = jsonl(tmp_path / "a.jsonl", [*good, *BAD])
    problems, report = load(path, bad_rows="skip")
    assert len(problems) == 100 and len(report.bad) == len(BAD) and report.rows == 100 + len(BAD)
    for number, (reported, reason) in enumerate(zip(report.bad, BAD.values(), strict=True), start=101):
        assert reported.startswith(f"{path}, line {number}: ") and reason in reported
    with pytest.raises(ValueError, match=f"{len(BAD)} of {100 + len(BAD)} rows are bad(.|\n)*line 101: not JSON"):
        load(path)


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "\xff", "answer": "1"}\n{"question": "x", "answer": "1"}\n')
    problems, report = load(str(tmp_path / "a.jsonl"), bad_rows="skip")
    assert len(problems) == 1 and "line 1: not JSON" in report.bad[0]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_refused_whole(tmp_path, encoding):
    (tmp_path / "a.jsonl").write_bytes(
        "\ufeff".encode(encoding) + ('{"question": "x", "answer": "1"}\n' * 3).encode(encoding)
    )
    with pytest.raises(ValueError, match="a.jsonl is in UTF-16: save it as UTF-8"):
        load(str(tmp_path / "a.jsonl"), bad_rows="skip")


def test_an_array_is_read_by_its_first_character_whatever_the_file_is_called(tmp_path):
    for name, before in {"a.json": "", "a.jsonl": "", "b.json": "\ufeff", "c.json": "\n  "}.items():
        text = before + json.dumps([{"question": "x", "answer": "1"}], indent=1)
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert [p.question for p in load(str(tmp_path / name))[0]] == ["x"]
    (tmp_path / "a.json").write_text('[{"question": "x", "answer": "1", "answer": "2"}]')
    with pytest.raises(ValueError, match="a.json is not a readable JSON array: the key 'answer' stands twice"):
        load(str(tmp_path / "a.json"))


def test_broken_files_are_named(tmp_path):
    whole = Path(parquet(tmp_path / "a.parquet", [official(f"q{n}") for n in range(5000)])).read_bytes()
    middle = len(whole) // 3
    damaged = {
        "cut.parquet": whole[:-100],
        "text.parquet": b"hello",
        "hole.parquet": whole[:middle] + bytes(2000) + whole[middle + 2000 :],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a readable parquet file"):
            load(str(tmp_path / name))
    columns = {
        "far.parquet": pyarrow.array([2**62], pyarrow.timestamp("us")),
        "nanoseconds.parquet": pyarrow.array([1], pyarrow.timestamp("ns")),
        "bytes.parquet": pyarrow.array([b"\xff"]).cast(pyarrow.string(), safe=False),
    }
    for name, column in columns.items():  # columns that nobody reads
        table = pyarrow.table({"question": ["q"], "answer": ["1"], "other": column})
        pyarrow.parquet.write_table(table, tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} is not a readable parquet file \(after 0 rows\): "):
            load(str(tmp_path / name))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl is empty"):
        load(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no rows"):
        load(parquet(tmp_path / "rows.parquet", []))
    for bad_rows in ("skip", "fatal"):  # no advice to skip them where all are bad
        with pytest.raises(ValueError, match="no usable problem.*1 bad(.|\n)*Rename the question column 'question'"):
            load(jsonl(tmp_path / "b.jsonl", ['{"query": "x"}']), bad_rows=bad_rows)


def test_an_unknown_source_says_what_is_known(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'gsm8k'.*reasoning_gym:task"):
        load("gsm8")
    with pytest.raises(ValueError, match="cannot read .csv"):
        (tmp_path / "a.csv").write_text("x", encoding="utf-8")
        load(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="hf:owner/name/config/split"):
        load("hf:openai/gsm8k")


def test_hub_data_sets_are_read_from_their_parquet_branch(tmp_path, monkeypatch):
    rows = [{"question": "2*600?", "answer": "It is <<2*600=1200>>.\n#### 1,200"}, {"question": "?", "answer": "5"}]
    parquet(tmp_path / "0000.parquet", rows)
    asked = []

    def download(**arguments):
        asked.append(arguments)
        return str(tmp_path / "0000.parquet")

    files = ["main/train/0000.parquet", "main/test/0000.parquet", "socratic/train/0000.parquet", "README.md"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    problems, report = load("gsm8k", bad_rows="skip")
    assert [(p.answer, p.source) for p in problems] == [("1200", "gsm8k")]
    assert "row 1: answer without '####'" in report.bad[0]
    assert [a["filename"] for a in asked] == ["main/train/0000.parquet"]
    with pytest.raises(ValueError, match="no such config and split; it has .*main/test"):
        load("hf:openai/gsm8k/main/validation")


def test_without_a_network_the_hub_error_says_what_to_do(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    with pytest.raises(ValueError, match="openai/gsm8k.*no route.*copy the data set's parquet files"):
        load("gsm8k")


def test_reasoning_gym_is_asked_for_questions_and_never_to_score(monkeypatch):
    class Entries(list):
        def score_answer(self, *_):
            raise AssertionError("reasoning-gym's scorers may execute the answer")

    entries = Entries([{"question": "1 + 2 =", "answer": "3"}, {"question": "any?", "answer": None}])
    gym = ModuleType("reasoning_gym")
    gym.create_dataset = lambda name, size, seed: entries
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    known = SimpleNamespace(DATASETS={"chain_sum": None, "countdown": None})
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", known)
    problems, report = load("reasoning_gym:chain_sum", bad_rows="skip", count=2)
    assert [(p.question, p.answer, p.source) for p in problems] == [("1 + 2 =", "3", "reasoning_gym/chain_sum")]
    assert "only a scorer" in report.bad[0]
    with pytest.raises(ValueError, match="unknown task of reasoning-gym 'chain_sums'. Did you mean 'chain_sum'"):
        load("reasoning_gym:chain_sums")
    game = {"question": "Reach 3", "answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}
    gym.create_dataset = lambda name, size, seed: [game]
    [problem] = load("reasoning_gym:countdown")[0]
    assert countdown("<answer>2 + 1</answer>", problem.answer) == 1 and "[1, 2]" in problem.question
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        load("reasoning_gym:chain_sum")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"question": "q", "answer": NaN}', "'answer' is nan, which is no answer"),
        ('{"question": "q", "answer": -Infinity}', "'answer' is -inf, which is no answer"),
        ('{"question": "q", "answer": 1e999}', "'answer' is inf, which is no answer"),
        ('{"question": "\\ud83d", "answer": "1"}', "the prompt holds half of a character"),
        ('{"question": "q", "answer": "\\udc00"}', "the answer holds half of a character"),
        ('{"question": "q", "answer": "1", "source": "\\ud800"}', "the source holds half of a character"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "not JSON"),
        ('{"question": "q", "answer": true}', "'answer' must be text, got bool"),
        ("[" * 100_000, "not JSON"),
        (json.dumps(official(extra_info={"raw_problem": "\ud800"})), "the question holds half of a character"),
        ('{"question": "q", "answer": "1", "samples": 1' + "0" * 400 + "}", "'samples' must be .* 1 to 1000000, got"),
        ('{"question": "q", "answer": "1", "answer": "2"}', "not JSON: the key 'answer' stands twice"),
        ("\\x00", "not JSON"),
    ],
)
def test_a_value_that_is_no_answer_is_named_with_its_row(tmp_path, row, reason):
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1", "answer": 2}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"data.jsonl, line 2: {reason}"):
        load(str(file))


SPELLINGS = {"7.0": "7", "-7.0": "-7", "7": "7", "0.5": "0.5", "-0.0": "0", "1e3": "1000", "1e300": "1e+300"}


@pytest.mark.parametrize(("number", "text"), SPELLINGS.items())
def test_a_number_has_the_spelling_that_verifiers_compare(tmp_path, number, text):
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"question": "q", "answer": {number}}}\n', encoding="utf-8")
    assert load(str(file))[0][0].answer == text


@pytest.mark.parametrize(
    ("row", "system", "prompt", "answer", "shown", "taken"),
    [
        ({"question": "q", "answer": 3, "demonstration": "so 3"}, "", "[q]", "3", ("so 3",), ("answer", "answer")),
        ({"prompt": "q", "completion": "so 3"}, "", "[q]", "", ("so 3",), ("demonstration", "completion")),
        (
            {"prompt": "q", "completion": [{"role": "assistant", "content": "c"}]},
            *("", "[q]", "", ("c",), ("question", "prompt")),
        ),
        (
            {"messages": [{"role": r, "content": r[0]} for r in ("system", "user", "assistant")], "solution": "a"},
            *("s", "[u]", "a", ("a",), ("answer", "solution")),
        ),
        (official("q", demonstration=["one", "two"]), "", "[q]", "2", ("one", "two"), ("answer", "reward_model")),
    ],
)
def test_a_demonstration_is_read_from_every_form_and_an_answer_may_then_be_missing(
    tmp_path, row, system, prompt, answer, shown, taken
):
    path = jsonl(tmp_path / "a.jsonl", [{**row, "left": 1}])
    [problem], report = load(path, template="[{question}]")
    assert (problem.system, problem.prompt, problem.answer, problem.demonstrations) == (system, prompt, answer, shown)
    assert report.taken[taken] == 1 and report.ignored["left"] == 1
    write_parquet([problem], tmp_path / "b.parquet")
    [again], _ = load(str(tmp_path / "b.parquet"))
    assert (again.prompt, again.demonstrations, again.answer) == (prompt, shown, answer)


def test_equal_demonstrations_of_a_problem_are_all_kept_because_samples_have_a_frequency(tmp_path):
    rows = [{"prompt": "1+1=", "completion": text} for text in ("2", "3", "2", "2")]
    [problem], report = load(jsonl(tmp_path / "a.jsonl", rows))
    assert (problem.demonstrations, report.repeated) == (("2", "3", "2", "2"), 3)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q"}, "none of"),
        ({"question": "q", "demonstration": " "}, "not empty"),
        ({"messages": [{"role": "user", "content": "u"}]}, "one turn is trained"),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}]}, "lacks its role"),
        ({"messages": [{"role": r, "content": "x"} for r in ("user", "assistant") * 2]}, "one turn is trained"),
    ],
)
def test_a_demonstration_that_cannot_be_learned_is_named(tmp_path, row, reason):
    with pytest.raises(ValueError, match=f"line 1: .*{reason}"):
        load(jsonl(tmp_path / "a.jsonl", [row]))
