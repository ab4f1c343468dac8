"""Adapters of rank 16 of Qwen3-4B learn mathematics with completions of 2,048 tokens on one chip of 16 GB. Not yet run.

Data:      as in configs/qwen3_4b_2k.py, whose task and limits these are; the batch is a sixteenth, for one chip.
Command:   python -m rpg_jax.train --config=configs/qwen3_4b_2k_lora.py --config.model.path=Qwen/Qwen3-4B \
             --config.method=RPG-REINFORCE-URKL
Hardware:  v5e:1x1, one chip; docs/lora.md has its plan, and the figures of a T4 by arithmetic
Plan:      python -m rpg_jax.plan --config=configs/qwen3_4b_2k_lora.py --topology=v5e:1x1
"""

from configs import base, qwen3_4b_2k


def get_config(variant: str = ""):
    c = qwen3_4b_2k.get_config()
    c.model.lora.rank = 16
    c.optimizer.learning_rate = 1e-5  # ten times the full rate, the best by thinkingmachines.ai/blog/lora
    c.optimizer.weight_decay = 0.0  # it would pull the policy to the base, where the KL term pulls to the reference
    c.rollout.tensor = None  # one chip
    c.rollout.prompts_per_step = 64
    c.rollout.group_size = 8
    c.train.updates_per_step = 4
    c.train.packed_length = 4096
    c.train.microbatch_size = 1
    c.dynamic_sampling.oversample = 1
    c.reference.resident = True  # 130 MB
    return base.variant(c, variant)
