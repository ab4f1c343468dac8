"""One cell of the reasoning table: a Qwen3 of 0.1 M parameters works out chains of operations, line by line.

Command:   python -m rpg_jax.reproduce --table=reasoning   (every cell)
           python -m rpg_jax.train --config=configs/reasoning.py --config.method=DAPO   (one)
Hardware:  two CPU cores
Rows:      every name of --config.method

Time:      a minute of a core
Result:    docs/tables/reasoning.md

Completions have about 29 tokens at the start and may grow to 80. The set "harder" has longer chains than training; "old
skill" has what the start has learnt and RL does not train.

All runs start from the weights in configs/chains_start, which solve about a third of the chains. They come with the
code, because warm starts by one recipe differ from machine to machine, and by more than methods do. They were made by

  python -m rpg_jax.train --config=configs/reasoning.py --config.model.path= --config.warm_start.enabled=True
    --config.train.packed_length=228 --config.train.microbatch_size=4 --config.train.steps=1
    --config.optimizer.learning_rate=1e-12 --config.run.name=start
  python -m rpg_jax.export --run=runs/start --out=configs/chains_start --dtype=bfloat16

in ten minutes of a core: 1,000 supervised updates. configs/chains_start_1 and _2 were made by the same commands with
--config.seed and --config.warm_start.seed of 1 and 2: 750 updates each.
"""

from configs import tiny


def get_config():
    c = tiny.get_config()
    c.model.path = "configs/chains_start"  # what follows is its shape
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
    c.rollout.driver = "lockstep"  # with 64 slots: a tenth less time a step than 256 and the orchestrator
    c.rollout.slots = 64
    c.dynamic_sampling.max_batches = 3

    c.warm_start.enabled = False
    c.warm_start.max_tokens = 64
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    c.warm_start.check_every = 250
    c.warm_start.min_accuracy = 0.22  # guessing has 0.14
    c.warm_start.max_accuracy = 0.4

    c.train.steps = 60
    c.train.updates_per_step = 16
    c.train.packed_length = 114
    c.train.microbatch_size = 8
    c.optimizer.learning_rate = 2e-4

    c.evaluation.every = 15
    c.evaluation.problems = 64  # per set
    c.evaluation.k = 2
    c.evaluation.drift = True
    c.checkpoint.every = 60
    c.log.rollouts_every = 0
    return c
