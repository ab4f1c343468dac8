"""Qwen3-4B with completions of 8,192 tokens; everything else is as in configs/qwen3_4b_2k.py.

Command:   python -m rpg_jax.train --config=configs/qwen3_4b_8k.py --config.model.path=Qwen/Qwen3-4B \
             --config.method=RPG-REINFORCE-URKL
Hardware:  v5p:4x4x4, 3.8 days expected for 400 steps (3.4 to 4.9); v5p:2x2x2 29 days, v6e:4x4 27 days.
           docs/plan.md has memory and seconds.
"""

from configs import base, qwen3_4b_2k


def get_config(variant: str = ""):
    c = qwen3_4b_2k.get_config()
    c.rollout.max_tokens = 8192
    c.train.packed_length = 10_240  # the longest completion with its prompt; shorter ones share a row
    return base.variant(c, variant)
