"""Writes tests/models/golden: tiny random models in Hugging Face layout, and what transformers computes from them.

    python tests/models/make_golden.py            # with torch and transformers >= 5: weights, config.json, golden.npz
    python tests/models/make_golden.py --configs  # with transformers 4, torch not needed: config.transformers4.json

The files in the repository were written with torch 2.13.0 and transformers 5.23.0, and 4.51.3.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
NEW_TOKENS = 10
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
COMMON = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, rms_norm_eps=1e-5
)
QWEN3 = COMMON | dict(num_key_value_heads=2, head_dim=16, rope_theta=5e5, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LLAMA = COMMON | dict(num_key_value_heads=2, head_dim=16)
CASES = {
    "qwen2": ("Qwen2", COMMON | dict(num_key_value_heads=2, rope_theta=1e4, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3_yarn": ("Qwen3", QWEN3 | dict(num_hidden_layers=1, rope_scaling=YARN, max_position_embeddings=32)),
    "qwen3_moe": ("Qwen3Moe", QWEN3 | EXPERTS | dict(norm_topk_prob=True)),
    "qwen3_moe_unnormalised": ("Qwen3Moe", QWEN3 | EXPERTS | dict(num_hidden_layers=1, norm_topk_prob=False)),
    "llama": ("Llama", LLAMA | dict(num_key_value_heads=1, head_dim=8, rope_theta=1e4, tie_word_embeddings=True)),
    "llama3": (  # of the eight pairs, two are kept, three blended, three slowed
        "Llama",
        LLAMA | dict(rope_theta=50.0, rope_scaling=LLAMA3, max_position_embeddings=128, tie_word_embeddings=False),
    ),
}


def config_of(name: str):
    """The transformers config of a case."""
    import transformers

    family, fields = CASES[name]
    window = {} if family == "Llama" else {"max_window_layers": fields["num_hidden_layers"]}
    return getattr(transformers, f"{family}Config")(**fields, **window)


def tokens() -> np.ndarray:
    """i64[2, 12]"""
    return np.random.default_rng(0).integers(0, COMMON["vocab_size"], (2, 12))


def compute(model) -> dict[str, np.ndarray]:
    """Logits of `tokens()` and the greedy continuation of their first five, one sequence at a time."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(tokens())).logits.numpy()
        grown = torch.tensor(tokens()[:, :5])
        for _ in range(NEW_TOKENS):
            grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(-1)], dim=1)
    return {"tokens": tokens(), "logits": logits, "greedy": grown[:, 5:].numpy()}


def load(folder: Path):
    """The stored model as transformers loads it, in f32 with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="default: all")
    parser.add_argument("--configs", action="store_true", help="write config.transformers4.json only")
    options = parser.parse_args()
    if options.configs:
        for name in options.cases:
            config = config_of(name)
            config.torch_dtype = "float32"
            config.architectures = [f"{CASES[name][0]}ForCausalLM"]
            (GOLDEN / name / "config.transformers4.json").write_text(config.to_json_string(), encoding="utf-8")
        return

    import torch
    import transformers

    for name in options.cases:
        family = CASES[name][0]
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config_of(name))
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            centre = parameter.data.mean() if parameter.dim() == 1 else 0.0
            parameter.data = centre + spread * torch.randn_like(parameter)
        model.save_pretrained(GOLDEN / name)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(GOLDEN / name / "golden.npz", **compute(load(GOLDEN / name)))


if __name__ == "__main__":
    main()
