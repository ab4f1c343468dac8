"""SmolLM2-135M-Instruct learns the shortest problems of reasoning-gym's chain_sum: one digit plus or minus another.

Needs:     pip install reasoning-gym
Weights:   python -m launch.pretrained smollm2-135m
Command:   python -m rpg_jax.train --config=configs/smollm2_135m_chain_sum.py --config.model.path=smollm2-135m
Hardware:  two CPU cores
Expect:    0.33 held out before, 0.60 after eight steps, in three minutes on cores with other work beside
Pass:      0.45 held out. The score has 46 problems with two completions of each
"""

from configs import base, smollm2_135m_stories


def get_config(variant: str = ""):
    c = smollm2_135m_stories.get_config()
    c.task.name = "files"
    c.task.train = "reasoning_gym:chain_sum"
    c.task.held_out_sets = "held out=reasoning_gym:chain_sum"
    c.task.template = "none"
    c.task.generated = 1500
    c.task.max_prompt_tokens = 46  # problems with more digits or more terms are dropped: few of them are solved
    c.rewards.parts = "examples.sums:last_integer"
    c.rollout.max_tokens = 20
    c.train.packed_length = 206  # a prompt and its eight completions
    c.evaluation.problems = 1500  # the short ones among them: 46
    c.evaluation.k = 2
    return base.variant(c, variant)
