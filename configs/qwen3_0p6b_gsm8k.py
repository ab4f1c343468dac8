"""Qwen3-0.6B learns GSM8K on one accelerator of 16 GB: the smallest run on published weights and data. Not yet run.

Command:   python -m rpg_jax.train --config=configs/qwen3_0p6b_gsm8k.py --config.model.path=Qwen/Qwen3-0.6B \
             --config.method=RPG-REINFORCE-URKL
           and the same with --config.method=GRPO
Hardware:  v5e:1x1, one chip. Planned: 14.2 of 15.75 GiB; 238 s a step expected, so 100 steps take 6.6 hours and $7.94.
           Compilation is not counted, nor are the groups that RPG's dynamic sampling drops
Plan:      python -m rpg_jax.plan --config=configs/qwen3_0p6b_gsm8k.py --topology=v5e:1x1

Without thinking. A score is Mean@1 of all 1,319 test problems, greedy; its standard error is 1.4 points. No public
score of this model by this evaluation is known here. The nearest: Qwen3-0.6B-Base goes from 31.1 to 57.1 by 100 steps
of GRPO after a warm start, pass@1 of 200 test problems (github.com/tenstorrent/tt-metal/pull/54390).
"""

from configs import base


def get_config(variant: str = ""):
    c = base.get_config()
    c.model.size = "qwen3-0.6b"

    c.task.name = "files"
    c.task.train = "gsm8k"
    c.task.held_out_sets = "GSM8K=gsm8k-test"
    c.task.max_prompt_tokens = 512
    c.rewards.parts = "gsm8k"
    c.rewards.overlong_buffer = 128  # of rollout.max_tokens

    c.rollout.prompts_per_step = 128
    c.rollout.group_size = 8
    c.rollout.max_tokens = 1024
    c.rollout.slots = 32  # a slot of 1,536 tokens has 168 MiB of keys and values
    c.rollout.tensor = 1  # weights of 1.2 GB: every chip decodes with its own copy

    c.optimizer.learning_rate = 1e-6  # of every method
    c.optimizer.warmup = "10 updates"
    c.reference.every = "16 updates"

    c.train.steps = 100
    c.train.updates_per_step = 4
    c.train.packed_length = 4096
    c.train.microbatch_size = 4

    c.evaluation.k = 1
    c.evaluation.temperature = 0.0  # greedy, as the public scores are
    c.evaluation.problems = 1319  # the whole set
    return base.variant(c, variant)
