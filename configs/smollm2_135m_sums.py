"""SmolLM2-135M-Instruct learns "What is a + b?" by RPG on two CPU cores.

Weights:   python -m launch.pretrained smollm2-135m
Command:   python -m rpg_jax.train --config=configs/smollm2_135m_sums.py --config.model.path=smollm2-135m
Hardware:  two CPU cores, 7 GB of memory
Expect:    0.06 held out before, 0.6 to 0.8 after eight steps, in three and a half minutes
Pass:      0.5 held out. The score has 51 problems with one completion of each
"""

from configs import base


def get_config(variant: str = ""):
    c = base.get_config()
    c.model.size = "smollm2-135m"
    c.model.compute_dtype = "float32"  # CPUs emulate bfloat16
    c.model.remat = "none"

    c.task.name = "examples.sums:Problems"
    c.task.max_prompt_tokens = 48
    c.rewards.parts = "examples.sums:last_number"
    c.rewards.overlong_shaping = False

    c.rollout.max_tokens = 20
    c.rollout.prompts_per_step = 8
    c.rollout.group_size = 8
    c.rollout.slots = 64
    c.dynamic_sampling.enabled = False

    c.train.steps = 8
    c.train.updates_per_step = 1  # the update's log-probs are those of the policy that sampled: one pass less
    c.train.packed_length = 208  # a prompt and its eight completions
    c.train.microbatch_size = 4
    c.reference.every = "1 step"

    c.optimizer.learning_rate = 3e-5
    c.optimizer.warmup = "0 updates"
    c.optimizer.weight_decay = 0.0

    c.evaluation.every = 4
    c.evaluation.problems = 51
    c.evaluation.k = 1
    c.checkpoint.every = 8
    c.log.rollouts_every = 4
    return base.variant(c, variant)
