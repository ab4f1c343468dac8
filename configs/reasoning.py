"""One cell of the reasoning table: a Qwen3 of 0.1 M parameters works out chains of operations, line by line.

Command:   python -m rpg_jax.reproduce --table=reasoning   (every cell)
           python -m rpg_jax.train --config=configs/reasoning.py --config.method=DAPO   (one)
Hardware:  two CPU cores
Rows:      every name of --config.method

Time:      two minutes of a core; the warm start, which all runs share, six
Result:    docs/tables/reasoning.md

Completions have about 29 tokens after the warm start and may grow to 80. The set "harder" has longer chains than
training; "old skill" has what the warm start taught and RL does not train.
"""

from configs import tiny


def get_config():
    c = tiny.get_config()
    c.model.num_layers = 2
    c.model.embed_dim = 64
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 16
    c.model.hidden_dim = 192
    c.model.rope_theta = 100.0  # the working needs exact distances of one to three tokens

    c.task.name = "chains"
    c.task.operations = "+-*"
    c.task.held_out_sets = "held out,harder,old skill"
    c.task.max_prompt_tokens = 34  # ten operations
    c.rollout.max_tokens = 80
    c.rewards.overlong_buffer = 24
    c.rollout.prompts_per_step = 32
    c.rollout.group_size = 8
    c.rollout.slots = 256
    c.dynamic_sampling.max_batches = 3

    c.warm_start.max_tokens = 64
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    c.warm_start.check_every = 250
    c.warm_start.min_accuracy = 0.22  # guessing has 0.14
    c.warm_start.max_accuracy = 0.4
    c.warm_start.max_updates = 12_000

    c.train.steps = 100
    c.train.updates_per_step = 16
    c.train.packed_length = 114
    c.train.microbatch_size = 8
    c.optimizer.learning_rate = 2e-4

    c.evaluation.every = 25
    c.evaluation.problems = 64  # per set
    c.evaluation.k = 2
    c.evaluation.drift = True
    c.checkpoint.every = 100
    c.log.rollouts_every = 0
    return c
