"""Qwen3-4B with completions of 4,096 tokens, and two more held-out sets, as in the paper's Tables 5 and 7; everything
else is as in configs/qwen3_4b_2k.py.

Command:   python -m rpg_jax.train --config=configs/qwen3_4b_4k.py --config.model.path=Qwen/Qwen3-4B \
             --config.method=RPG-REINFORCE-URKL
Hardware:  v5p:4x4x4, 1.4 days expected for 400 steps; v5p:2x2x2 10.7 days, v6e:4x4 8.9.
           docs/plan.md says what this rests on.
Plan:      python -m rpg_jax.plan --config=configs/qwen3_4b_4k.py --topology=v6e:4x4
"""

from configs import base, qwen3_4b_2k


def get_config(variant: str = ""):
    c = qwen3_4b_2k.get_config()
    c.task.held_out_sets += ",Minerva=minerva,OlympiadBench=olympiadbench"
    c.evaluation.problems = 674  # all of OlympiadBench, the largest set
    c.rewards.parts = "by_source"  # as math_dapo, but for the two sets above: Math-Verify
    c.rollout.max_tokens = 4096
    c.train.packed_length = 10_240
    return base.variant(c, variant)
