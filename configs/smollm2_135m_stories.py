"""SmolLM2-135M-Instruct learns to write the equation of a short story with two numbers.

Weights:   python -m launch.pretrained smollm2-135m
Command:   python -m rpg_jax.train --config=configs/smollm2_135m_stories.py --config.model.path=smollm2-135m
Hardware:  two CPU cores
Expect:    0.27 held out before, 0.59 after eight steps, in five and a half minutes
Pass:      0.45 held out. The score has 51 problems with four completions of each
"""

from configs import base, smollm2_135m_sums


def get_config(variant: str = ""):
    c = smollm2_135m_sums.get_config()
    c.task.name = "examples.sums:Stories"
    c.task.max_prompt_tokens = 72
    c.rewards.parts = "examples.sums:equation"

    c.rollout.temperature = 0.6  # at 1 the policy solves less than half as many to begin with
    c.rollout.max_tokens = 32
    c.train.packed_length = 328  # a prompt and its eight completions
    c.evaluation.temperature = 0.6
    c.evaluation.every = 8
    c.evaluation.k = 4
    return base.variant(c, variant)
