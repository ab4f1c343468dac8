"""The whole way of a Llama without a download: a GGUF file is trained, evaluated, sampled and exported, and adapted."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax import Policy, models

pytestmark = pytest.mark.slow  # compiles whole runs
pytest.importorskip("gguf", reason="needs the package gguf, of requirements-dev.txt")
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_gguf import GOLDEN, write  # noqa: E402

LIMITS = {"task.max_prompt_tokens": 32, "rollout.max_tokens": 5, "dynamic_sampling.enabled": False, "train.steps": 2}
LIMITS |= {"warm_start.enabled": False, "evaluation.problems": 4, "rollout.prompts_per_step": 4}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "tiny.gguf", "llama3", metadata={"llama.context_length": 128})


def train(tmp_path, path, **more):
    overrides = LIMITS | {"model.path": str(path), "run.dir": str(tmp_path), "run.name": "r"} | more
    return rpg_jax.train("configs/tiny.py", overrides=overrides)


def test_a_gguf_file_is_trained_sampled_and_exported_as_a_llama(tmp_path, file, monkeypatch):
    rewarded = "def even(completion: str, answer: str, prompt: str) -> float:\n    return len(completion) % 2 * 1.0\n"
    (tmp_path / "rewarded_llama.py").write_text(
        rewarded, encoding="utf-8"
    )  # random weights answer nothing, and are told apart by it
    monkeypatch.syspath_prepend(str(tmp_path))
    result = train(tmp_path, file, **{"rewards.parts": "rewarded_llama:even"})
    policy = Policy.from_run(result.folder)
    trained = policy.sample(["1+1="], k=2, temperature=0.0)[0]
    policy.export(tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (fields["architectures"], fields["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert models.read_config(tmp_path / "out") == models.read_config(GOLDEN / "llama3")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        one.name for one in (tmp_path / "out").iterdir()
    }
    limits = {"max_prompt_tokens": 32, "max_tokens": 5, "overrides": {"model.compute_dtype": "float32"}}
    again = Policy.from_pretrained(tmp_path / "out", **limits).sample(["1+1="], k=2, temperature=0.0)[0]
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in trained]
    before = models.load(GOLDEN / "llama3", models.read_config(GOLDEN / "llama3"))
    after = models.load(tmp_path / "out", models.read_config(tmp_path / "out"))
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, before, after))), "two steps change the weights"


def test_adapters_of_a_gguf_file_are_trained(tmp_path, file):
    result = train(tmp_path, file, **{"model.lora.rank": 2})
    Policy.from_run(result.folder).export(tmp_path / "merged")
    assert models.read_config(tmp_path / "merged") == models.read_config(GOLDEN / "llama3")
