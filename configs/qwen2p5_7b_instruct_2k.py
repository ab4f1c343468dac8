"""Qwen2.5-7B-Instruct with completions of 2,048 tokens, on AdamW or Schedule-Free AdamW.

Command:   python -m rpg_jax.train --config=configs/qwen2p5_7b_instruct_2k.py \
             --config.model.path=Qwen/Qwen2.5-7B-Instruct --config.method=RPG-REINFORCE-URKL
           Add --config.optimizer.name=schedule_free_adamw for the paper's second table.
Hardware:  v5e:8x8, 1.6 days expected for 400 steps; v5p:4x4x4 0.67; docs/plan.md has memory and seconds
Plan:      python -m rpg_jax.plan --config=configs/qwen2p5_7b_instruct_2k.py --topology=v5e:8x8
"""

from configs import base, qwen3_4b_2k


def get_config(variant: str = ""):
    c = qwen3_4b_2k.get_config()
    c.model.size = "qwen2.5-7b"
    c.rollout.tensor = 4  # 3.8 GB of weights and one of the four key-value heads on a chip of 16 GB
    c.train.packed_length = 4096  # the longest row that fits a chip of 16 GB
    return base.variant(c, variant)
