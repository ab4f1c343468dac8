"""Qwen3-4B learns mathematics with completions of 2,048 tokens: the paper's recipe (arXiv:2505.17508, section 5).

Data:      the 13.9k English problems of DAPO-Math-17k from the Hugging Face hub; AIME24, AIME25 and AMC23 are held out.
Command:   python -m rpg_jax.train --config=configs/qwen3_4b_2k.py --config.model.path=Qwen/Qwen3-4B \
             --config.method=RPG-REINFORCE-URKL
           The method brings the learning rate: 5e-7 for the REINFORCE estimators, 1e-6 for all others.
           model.size is there for `plan`, which then needs no weights.
Hardware:  v5p:4x4x4, 0.6 days expected for 400 steps; v5p:2x2x2 3.8 days, v6e:4x4 2.8.
           docs/plan.md says what this rests on.
Plan:      python -m rpg_jax.plan --config=configs/qwen3_4b_2k.py --topology=v5p:2x2x2
"""

from configs import base


def get_config(variant: str = ""):
    c = base.get_config()
    c.model.size = "qwen3-4b"

    c.task.name = "files"
    c.task.train = "dapo-math-17k-eng"
    c.task.held_out_sets = "AIME24=aime-2024,AIME25=aime25,AMC23=amc-23"
    c.task.max_prompt_tokens = 2048
    c.task.too_long = "truncate"  # on the left
    c.rewards.parts = "math_dapo"

    c.rollout.prompts_per_step = 512
    c.rollout.group_size = 16
    c.rollout.max_tokens = 2048
    c.rollout.tensor = 4  # one copy of the bf16 weights on the four chips of a host
    c.dynamic_sampling.oversample = 3

    c.train.steps = 400
    c.train.updates_per_step = 16  # of 32 prompts each, all from one behaviour policy
    c.train.packed_length = 8192  # three to ten completions a row

    c.evaluation.k = 32
    c.checkpoint.every = 1  # updates take minutes, and those of a preempted step are done again
    return base.variant(c, variant)
