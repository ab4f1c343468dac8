"""The published recipes from data to table, at a size for a CPU."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.whole_runs import ROOT, completed, environment

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.py")}
GENERATED = {"smollm2_135m_sums", "smollm2_135m_distilled", "smollm2_135m_stories"}  # made by a class: no rows
NAMES = sorted(name for name, text in TEXTS.items() if "variant(c, variant)" in text and name not in GENERATED)
ALIKE = ("qwen3_0p6b_gsm8k", "qwen3_1p7b_gsm8k", "qwen3_4b_4k", "qwen3_4b_8k")  # but for sizes, limits and sets


@pytest.mark.parametrize(
    "names",  # a compilation each
    [
        pytest.param([name for name in NAMES if name not in ALIKE], marks=pytest.mark.slow),
        pytest.param(ALIKE, marks=pytest.mark.soak),
    ],
    ids=["different", "alike"],
)
def test_every_tiny_variant_trains_on_rows_of_its_own_schema_to_a_table(shared, tmp_path, names):
    assert len(NAMES) >= 10 and {*ALIKE} < {*NAMES}
    completed(["-m", "tests.end_to_end.every_config", tmp_path, *names], environment(shared))
    for name in names:
        records = [
            json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert all(r["sampler_gap"] < 1e-4 and r["completion_tokens"] > 0 for r in records[1:]), name
        assert not any(key.startswith("verifier_errors") for r in records for key in r), name
        sets = {key.split("/")[1] for key in records[-1] if key.startswith("eval/") and key.count("/") == 2}
        config = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        assert sets == {entry.split("=")[0] for entry in config["task"]["held_out_sets"].split(",")}, name
        table = (tmp_path / name / "summary.md").read_text(encoding="utf-8")
        assert all(re.search(rf"\| {s} \| Last \| 2 \| \d+ \| 0\.\d{{4}}", table) for s in sets), table


@pytest.mark.slow  # prompts of hundreds of characters
def test_aime24_from_the_parquet_file_to_the_table(shared, tmp_path):
    if not os.environ.get("RPG_DATA_DIR"):
        pytest.skip("set RPG_DATA_DIR to the folder with aime-2024.parquet")
    file = Path(os.environ["RPG_DATA_DIR"]) / "aime-2024.parquet"
    env, train = environment(shared), tmp_path / "train.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "source": "math_dapo"} for n in range(8)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = [
        "--config=configs/qwen3_4b_2k.py:tiny", f"--config.run.dir={tmp_path}",
        "--config.run.name=aime", f"--config.task.train={train}", f"--config.task.held_out_sets=AIME24={file}",
        "--config.task.max_prompt_tokens=1024", "--config.train.packed_length=1040",
    ]  # fmt: skip
    completed(["-m", "rpg_jax.train", *flags], env)
    records = [
        json.loads(line) for line in (tmp_path / "aime" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [r["step"] for r in records] == [0, 1, 2] and records[-1]["eval/AIME24/k"] == 4
    done = completed(["-m", "rpg_jax.evaluate", f"--run={tmp_path / 'aime'}", "--k=4", "--problems=30"], env)
    assert re.search(r"Mean@4(.|\n)*AIME24\s+│ 30\s+│ 0\.0000", done.stdout), done.stdout
    [out] = (tmp_path / "aime" / "evaluations").iterdir()
    completions = [json.loads(line) for line in (out / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(completions) == 30 * 4 and completions[0]["reference"] == "540"
    assert all(c["verdict"] == "wrong" and 1 <= c["tokens"] <= 16 for c in completions)
    assert "| AIME24 | 30 | maj@4 |" in (out / "scores.md").read_text(encoding="utf-8")
