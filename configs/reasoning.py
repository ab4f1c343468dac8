"""A Qwen3 of 0.2 M parameters learns to evaluate expressions line by line, in completions that may grow or collapse.

Command:   python -m rpg_jax.reproduce --table=reasoning   (every cell)
           python -m rpg_jax.train --config=configs/reasoning.py --config.method=DAPO   (one)
Hardware:  two CPU cores
Rows:      every name of --config.method
"""

from configs import tiny


def get_config():
    c = tiny.get_config()
    c.model.num_layers = 2
    c.model.embed_dim = 64
    c.model.num_heads = 2
    c.model.num_kv_heads = 1
    c.model.head_dim = 32
    c.model.hidden_dim = 192

    c.task.name = "chains"
    c.task.operations = "+-*"
    c.task.held_out_sets = "held out,harder,old skill"
    c.task.max_prompt_tokens = 34  # ten operations
    c.rollout.max_tokens = 80
    c.rewards.overlong_buffer = 24
    c.rollout.prompts_per_step = 32
    c.rollout.group_size = 8
    c.rollout.slots = 256

    c.warm_start.max_tokens = 64
    c.warm_start.batch_size = 128
    c.warm_start.check_every = 200
    c.warm_start.learning_rate = 3e-3
    c.warm_start.min_accuracy = 0.45
    c.warm_start.max_accuracy = 0.8

    c.train.steps = 200
    c.train.updates_per_step = 16
    c.train.packed_length = 114
    c.train.microbatch_size = 8
    c.optimizer.learning_rate = 3e-4
    c.dynamic_sampling.max_batches = 4

    c.evaluation.every = 20
    c.evaluation.problems = 64  # per set
    c.evaluation.k = 2
    c.evaluation.drift = True
    c.checkpoint.every = 100
    c.log.rollouts_every = 0
    return c
