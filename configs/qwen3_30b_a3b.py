"""Qwen3-30B-A3B, a mixture of 128 experts of which eight serve a token, with completions of 8,192 tokens.

Command:   python -m rpg_jax.train --config=configs/qwen3_30b_a3b.py --config.model.path=Qwen/Qwen3-30B-A3B \
             --config.method=RPG-REINFORCE-URKL
Hardware:  v5p:4x4x4, 4.1 days expected for 400 steps, 1.9 at the hardware's peaks; docs/plan.md has memory and seconds
"""

from configs import base, qwen3_4b_8k


def get_config(variant: str = ""):
    c = qwen3_4b_8k.get_config()
    c.model.size = "qwen3-30b-a3b"
    # Every chip gathers a layer's experts, 1.2 GB, for its own tokens. With an expert axis the tokens would travel
    # instead, each to eight experts: that is more bytes, and buffers must hold the worst imbalance.
    c.rollout.tensor = 4  # 15 GB of weights on a chip
    return base.variant(c, variant)
