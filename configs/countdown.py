"""Qwen2.5-3B learns Countdown: to write an expression of given numbers that equals a target. Models of
0.5B do not learn it.

Command:   python -m rpg_jax.train --config=configs/countdown.py --config.model.path=Qwen/Qwen2.5-3B \
             --config.method=RPG-REINFORCE-URKL
           after .venv/bin/python -m pip install reasoning-gym, which makes the held-out problems
Hardware:  v5p:2x2x1
Plan:      python -m rpg_jax.plan --config=configs/countdown.py --topology=v5p:2x2x1
"""

from configs import base


def get_config(variant: str = ""):
    c = base.get_config()
    c.model.size = "qwen2.5-3b"

    c.task.name = "files"
    c.task.train = "countdown"
    c.task.held_out_sets = "Countdown=reasoning_gym:countdown"
    c.task.max_prompt_tokens = 256
    c.rewards.parts = "countdown"

    c.rollout.prompts_per_step = 256
    c.rollout.group_size = 8
    c.rollout.max_tokens = 1024
    c.rollout.tensor = 1  # weights of 6.2 GB; a chip has 95 GB
    c.rewards.overlong_buffer = 256  # of rollout.max_tokens

    c.optimizer.learning_rate = 1e-6  # of every method
    c.optimizer.warmup = "10 updates"
    c.reference.every = "16 updates"

    c.train.steps = 200
    c.train.updates_per_step = 4
    c.train.packed_length = 8192
    c.train.microbatch_size = 8
    return base.variant(c, variant)
