"""Qwen3-1.7B learns GSM8K on one accelerator of 32 GB, whose optimizer waits in the host's memory. Not yet run.

Command:   python -m rpg_jax.train --config=configs/qwen3_1p7b_gsm8k.py --config.model.path=Qwen/Qwen3-1.7B \
             --config.method=RPG-REINFORCE-URKL
           and the same with --config.method=GRPO
Hardware:  v6e:1x1, one chip of 32 GB; whether it fits was not planned yet: the next line tells
Plan:      python -m rpg_jax.plan --config=configs/qwen3_1p7b_gsm8k.py --topology=v6e:1x1

Everything else is as in configs/qwen3_0p6b_gsm8k.py: all 1,319 test problems, greedy. The standard error of a score of
0.8 is 0.011. To reach:

  0.8077 ± 0.005   mean reward of MaxText, 100 steps on v6e:8x8, several seeds; NeMo-RL has 0.8042 to 0.8199
                   (github.com/AI-Hypercomputer/maxtext/pull/4015; the answer in a box, and a reward of their own)
  0.314 -> 0.744   RLOO of marin at a rate of 1e-7, completions of 1,024 tokens
                   (github.com/marin-community/marin/issues/2024; its table does not say how it evaluates)
"""

from configs import base, qwen3_0p6b_gsm8k


def get_config(variant: str = ""):
    c = qwen3_0p6b_gsm8k.get_config()
    c.model.size = "qwen3-1.7b"
    c.offload = "optimizer"
    c.rollout.slots = 96
    return base.variant(c, variant)
