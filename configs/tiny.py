"""A 0.8 M-parameter Qwen3 learns two-digit addition by RPG on a laptop.

Command:   bash launch/local.sh
Hardware:  two CPU cores
"""

from configs import base


def get_config():
    c = base.get_config()

    c.model.num_layers = 4
    c.model.embed_dim = 128
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 32
    c.model.hidden_dim = 384
    c.model.rope_theta = 10_000.0  # sequences are ten tokens long
    c.model.tie_embeddings = True
    c.model.compute_dtype = "float32"  # CPUs emulate bfloat16
    c.model.remat = "none"  # the activations of ten tokens fit anywhere

    c.task.max_prompt_tokens = 6  # "99+99="
    c.rollout.max_tokens = 5  # "198", the stop token, and one to spare
    c.rewards.overlong_buffer = 1

    c.optimizer.learning_rate = 3e-4  # a small model from a short warm start; the paper's 1e-6 is for 4B and 7B
    c.optimizer.weight_decay = 0.0
    c.optimizer.warmup = "10 updates"

    c.warm_start.enabled = True
    c.warm_start.min_accuracy = 0.35
    c.warm_start.max_accuracy = 0.5  # sampled: an evaluation with other noise still finds less than 0.60

    c.reference.resident = True  # three megabytes
    c.reference.every = "16 updates"
    c.train.steps = 150
    return c
