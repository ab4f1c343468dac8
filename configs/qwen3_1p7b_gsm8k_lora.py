"""Adapters of rank 16 of Qwen3-1.7B learn GSM8K on one chip of 16 GB, where all weights would not fit. Not yet run.

Command:   python -m rpg_jax.train --config=configs/qwen3_1p7b_gsm8k_lora.py --config.model.path=Qwen/Qwen3-1.7B \
             --config.method=RPG-REINFORCE-URKL
Hardware:  v5e:1x1, one chip; docs/lora.md has its plan, and the figures of a T4 by arithmetic
Plan:      python -m rpg_jax.plan --config=configs/qwen3_1p7b_gsm8k_lora.py --topology=v5e:1x1

Everything else is as in configs/qwen3_1p7b_gsm8k.py, whose header has the scores to reach. Full training holds 14 bytes
a weight, 24 GB, unless its optimizer waits in the host's memory.
"""

from configs import base, qwen3_0p6b_gsm8k


def get_config(variant: str = ""):
    c = qwen3_0p6b_gsm8k.get_config()
    c.model.size = "qwen3-1.7b"
    c.model.lora.rank = 16
    c.optimizer.learning_rate = 1e-5  # ten times the full rate, the best by thinkingmachines.ai/blog/lora
    c.optimizer.weight_decay = 0.0  # it would pull the policy to the base, where the KL term pulls to the reference
    c.rollout.slots = None  # as many as fit
    c.reference.resident = True  # 70 MB
    return base.variant(c, variant)
