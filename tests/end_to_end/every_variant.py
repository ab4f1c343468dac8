"""Trains what needs more than weights and AdamW's slots to resume, straight and interrupted; run by test_resume.py."""

import shutil
import sys
from pathlib import Path

from absl import logging

from rpg_jax.runs import reinforcement
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro

PACKED = {"train.packed_length": 33, "train.microbatch_size": 4}
TALK = {
    "task.name": "examples.guessing:Problems",
    "environment.name": "examples.guessing:Game",
    "environment.options": '{"base": 36}',
    "environment.max_turns": 4,
    "environment.turn_tokens": 3,
    "rollout.max_tokens": 18,
    "rewards.overlong_shaping": False,
    "rewards.right_above": 0.0,
    "loss.credit": "turn",
}
CARRY = {"dynamic_sampling.enabled": True, "dynamic_sampling.surplus": "carry"}
VARIANTS = {
    "schedule_free": {"optimizer.name": "schedule_free_adamw"},
    "lion": {"optimizer.name": "lion", "optimizer.schedule": "cosine", "optimizer.warmup": "2 updates"},
    "sgd": {"optimizer.name": "sgd", "optimizer.decayed": "matrices", "offload": "optimizer"},
    "every": {"reference.rule": "every", "reference.every": "3 updates"},
    "kl": {"reference.rule": "kl", "reference.kl_threshold": 1e-5},
    "ppo": {"method": "PPO", **CARRY, **PACKED},
    "lora": {"model.lora.rank": 2, "optimizer.learning_rate": 3e-3, "train.microbatch_size": 4},
    "entropy": {"loss.entropy_coef": 0.01, **PACKED},
    "turns": {**TALK, **PACKED, "method": "RPG-SEQ-RKL"},
    "turns_ppo": {**TALK, **CARRY, "method": "PPO", "critic.gae_lambda": 0.9},
}


def run(runs, warm_starts, name, changes):
    """Three steps, to the end or on from the checkpoints that are there."""
    config = micro.get_config()
    config.run.dir, config.run.name = str(runs), name
    config.warm_start.dir = warm_starts
    config.checkpoint.every, config.checkpoint.keep = 1, 3
    config.log.rollouts_every = 2
    config.update_from_flattened_dict({**changes, "train.steps": 3})
    print(name, flush=True)
    code = reinforcement.run(resolve(config))
    if code:
        raise SystemExit(f"{name} ended with {code}")


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    runs, warm_starts = Path(sys.argv[1]), sys.argv[2]
    for name in sys.argv[3:] or VARIANTS:
        changes = VARIANTS[name]
        run(runs, warm_starts, f"{name}-straight", changes)
        shutil.copytree(runs / f"{name}-straight", runs / f"{name}-resumed")
        for step in (2, 3):
            shutil.rmtree(runs / f"{name}-resumed" / "checkpoints" / str(step))
        run(runs, warm_starts, f"{name}-resumed", changes)
