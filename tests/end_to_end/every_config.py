"""Trains the tiny variant of every experiment for two steps in one process; run by test_configs.py.

What would come from a network is a few rows of the same schema instead.
"""

import importlib
import json
import sys
from pathlib import Path

from absl import logging

from rpg_jax.data import sources
from rpg_jax.data.prompts import apply_template
from rpg_jax.runs import reinforcement
from rpg_jax.runs.resolve import resolve


def official(n):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": apply_template("paper", f"What is {n} + {n}?")}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": n, "raw_problem": f"What is {n} + {n}?", "split": None},
    }


ROWS = {
    "math-dataset/DAPO-17k-Eng": official,
    "BytedTsinghua-SIA/AIME-2024": lambda n: official(n + 100),
    "math-ai/aime25": lambda n: {"problem": f"What is {n} + 3?", "answer": str(n + 3)},
    "math-ai/amc23": lambda n: {"question": f"What is {n} + 4?", "answer": f"{n + 4}.0"},
    "math-ai/minervamath": lambda n: {"question": f"What is {n} / 7?", "answer": rf"\frac{{{n}}}{{7}}"},
    "Hothan/OlympiadBench": lambda n: {"question": f"Which squares are {n}?", "final_answer": [f"${n}$", f"$-{n}$"]},
    "openai/gsm8k": lambda n: {"question": f"{n} apples?", "answer": f"All of them. <<{n}={n}>>\n#### {n:,}"},
    "Jiayi-Pan/Countdown-Tasks-3to4": lambda n: {"nums": [n, 1, 2], "target": n + 3},
}


def hub(data):
    first = 50 if data.split == "test" else 0
    return ((f"{data.repository}, row {n}", ROWS[data.repository](n)) for n in range(first, first + 8))


GENERATED = {
    "countdown": lambda n: {"nums": [n, 3, 4], "target": n + 7},
    "chain_sum": lambda n: {"question": f"{n} + 3 =", "answer": str(n + 3)},
}


def generated(task, count, seed):
    first = 8 * (seed % 5)  # the seed of held-out problems is another
    return ((f"{task}, example {n}", GENERATED[task](n)) for n in range(first, first + 8))


logging.set_verbosity(logging.WARNING)
sources._hub, sources._reasoning_gym = hub, generated
runs, *names = sys.argv[1:]
for name in names:
    config = importlib.import_module(f"configs.{name}").get_config("tiny")
    config.run.dir, config.run.name = runs, name
    code = reinforcement.run(resolve(config))
    if code:
        raise SystemExit(f"{name} ended with {code}")
    log = (Path(runs) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in log] == [0, 1, 2], name
