"""Qwen2.5-0.5B-Instruct learns GSM8K on one accelerator of 16 GB. Not yet run.

Command:   python -m rpg_jax.train --config=configs/qwen2p5_0p5b_gsm8k.py \
             --config.model.path=Qwen/Qwen2.5-0.5B-Instruct --config.method=RPG-REINFORCE-URKL
           and the same with --config.method=GRPO
Hardware:  v5e:1x1, one chip. Planned: 12.9 of 15.75 GiB; 51 s a step expected, so 100 steps take 1.4 hours and $1.71.
           Compilation is not counted, nor are the groups that RPG's dynamic sampling drops
Plan:      python -m rpg_jax.plan --config=configs/qwen2p5_0p5b_gsm8k.py --topology=v5e:1x1

Everything else is as in configs/qwen3_0p6b_gsm8k.py. Evaluation, prompt and verifier are verl's: all 1,319 test
problems, greedy, "#### answer"; so is the limit of 512 tokens. The standard error of a score is 1.4 points. To reach:

  49.6 -> 56.7  PPO of verl (verl.readthedocs.io/en/latest/algo/baseline.html; 49.6 is Qwen's own figure for the model,
                not one of this prompt; github.com/verl-project/verl/issues/3742 could not reproduce 56.7)
  54.3, 58.7    GRPO with LoRA, PRIME (the same table)
  43.6 -> 50.2  GRPO of slime, 100 steps of 20 x 8 completions at the same rate, on one GB10 in 71 minutes; greedy, but
                the answer in a box (a comment in github.com/THUDM/slime/pull/1835)
"""

from configs import base, qwen3_0p6b_gsm8k


def get_config(variant: str = ""):
    c = qwen3_0p6b_gsm8k.get_config()
    c.model.size = "qwen2.5-0.5b"
    c.rollout.max_tokens = 512
    c.rollout.slots = 256  # 2 heads of keys and values: a tenth of Qwen3-0.6B's cache
    c.train.microbatch_size = 8
    return base.variant(c, variant)
