"""Run folders as training leaves them, with numbers that are easy to recognise."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.data.groups import Group
from rpg_jax.runs.rollout_files import COLUMNS, encode
from rpg_jax.types import Completion


class Letters:
    """Id i is the i-th of these texts; 0 ends a completion."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids):
        return "".join("" if i == 0 else self.texts[i - 1] for i in ids)

    def name(self, token):
        return "<end>"


def rollouts(step, *, groups, size, texts, prompt, tokens, seed=0, turns=None):
    """A rollout file: completion i of a group is right where i is odd, every fourth is cut off. All have `turns`."""
    rng = np.random.default_rng((seed, step))
    made, numbers = [], []
    for g in range(groups):
        completions = []
        for i in range(size):
            ids = rng.integers(1, len(texts) + 1, tokens).astype(np.int32)
            ids[-1] = ids[-1] if i % 4 == 3 else 0
            completions.append(
                Completion(ids, np.full(tokens, -1, np.float32), "length" if i % 4 == 3 else "stop", step,
                           turns=turns)
            )  # fmt: skip
        accuracy = (np.arange(size) % 2).astype(np.float32)
        made.append(Group(Problem(g, prompt.format(g), "7", "t"), np.array([1]), completions, [], accuracy, accuracy))
        values = {
            "sampler_logprobs": -1 + 1e-6 * rng.normal(size=(size, tokens)),
            "behaviour_logprobs": np.full((size, tokens), -1.0),
            "logprobs": -1 + 0.1 * rng.normal(size=(size, tokens)),
            "ref_logprobs": np.full((size, tokens), -1.1),
            "entropy": rng.random((size, tokens)),
            "kl": 0.01 * rng.random((size, tokens)),
            "advantages": np.repeat(accuracy - 0.5, tokens).reshape(size, tokens),
            "clip": rng.choice([0, 0, 0, 2, 3], (size, tokens)),
        }
        numbers.append(list(np.stack([values[name] for name in COLUMNS], -1).astype(np.float32)))
    return encode(step, 2 * step, made, numbers, Letters(texts))


@pytest.fixture
def leave_run():
    """Writes a run folder: metrics of ten steps, an evaluation every five, rollouts of steps 1 and 10."""

    def leave(folder, *, seed=0, accuracy=0.5, config=None, **kept):
        folder.mkdir(parents=True)
        tree = {
            "method": "GRPO",
            "seed": seed,
            "loss": {"kl_coef": 0.1},
            "run": {"name": folder.name},
            **(config or {}),
        }
        (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
        records = [{"step": 0, **evaluation(accuracy / 2)}]
        for step in range(1, 11):
            first = 5.0 if step == 1 else 0.0
            records.append(
                {"step": step, "reward": step / 10, "accuracy": accuracy, "entropy": 1 / step, "kl": 1e-3 * seed,
                 "time/rollout": 0.6 + first, "time/update": 0.3, "time/compilations": 1, "time/compiling": first,
                 "seconds": 1.0 + first, "tokens_per_second": 100.0}
                | (evaluation(accuracy - 0.02 * (step == 10)) | {"time/evaluation": 0.9} if step % 5 == 0 else {})
            )  # fmt: skip
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
        options = {"groups": 4, "size": 4, "texts": list("abcdefg"), "prompt": "{}+1=", "tokens": 6, **kept}
        (folder / "rollouts").mkdir()
        for step in (1, 10):
            (folder / "rollouts" / f"{step:06d}.npz").write_bytes(rollouts(step, seed=seed, **options))
        return folder

    return leave


def evaluation(accuracy):
    scores = {"mean_at_k": accuracy, "pass_at_k": min(2 * accuracy, 1), "k": 4, "standard_error": 0.01}
    return {"eval/accuracy": accuracy} | {f"eval/easy/{name}": value for name, value in scores.items()}
