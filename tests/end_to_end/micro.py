"""A run of seconds: a model of 80 thousand weights and few completions, everything else as in configs/tiny.py."""

from configs import tiny


def get_config():
    c = tiny.get_config()
    c.model.num_layers = 2
    c.model.embed_dim = 64
    c.model.num_heads = 2
    c.model.num_kv_heads = 1
    c.model.head_dim = 32
    c.model.hidden_dim = 128
    c.rollout.slots = 16
    c.rollout.prompts_per_step = 8
    c.rollout.group_size = 4
    c.warm_start.min_accuracy = 0.1
    c.warm_start.max_accuracy = 0.85
    c.warm_start.batch_size = 128
    c.warm_start.learning_rate = 6e-3
    c.evaluation.problems = 32
    c.evaluation.k = 2
    c.evaluation.every = 2
    c.checkpoint.every = 2
    c.train.steps = 2
    return c
