"""One cell of the small table: the paper's recipe at a scale of two CPU cores, on sums and differences of two digits.

Command:   python -m rpg_jax.reproduce --table=small   (every cell)
           python -m rpg_jax.train --config=configs/small.py --config.method=DAPO   (one)
Hardware:  two CPU cores
Rows:      every name of --config.method

The set "held out" stands for AMC23, "carry" (sums that carry, differences that borrow) for AIME24, and "negative"
(differences below zero) for AIME25. A step has eight updates, the paper's sixteen; so most updates are off-policy.
"""

from configs import tiny


def get_config():
    c = tiny.get_config()
    c.model.num_layers = 3
    c.model.remat = "dots"  # computing activations again is faster than reading them from memory

    c.task.operations = "+-"
    c.task.held_out_sets = "held out,carry,negative"
    c.rollout.max_tokens = 6  # "198", a sign, the stop token, and one to spare
    c.rollout.slots = 512  # a batch of 64 prompts at once
    c.rollout.driver = "lockstep"  # threads cost more than they hide where sampling and training share a core

    c.train.steps = 60
    c.train.updates_per_step = 8
    c.optimizer.learning_rate = 1e-4  # the best of 1e-4, 2e-4, 4e-4 for RPG-REINFORCE-URKL, seed 0
    c.dynamic_sampling.max_batches = 6  # few groups are mixed when the policy comes close to 100 %

    c.evaluation.every = 15  # at 30 and 60 too: with dynamic sampling 30 steps sample what 60 do without
    c.evaluation.problems = 32  # per set
    c.evaluation.k = 32
    c.checkpoint.every = 60  # after the last step and after a signal: a cell takes less than a minute
    return c
