"""A Qwen3 of 0.1 M parameters learns to call a calculator that costs a fifth of a right answer.

Command:   python -m rpg_jax.train --config=configs/calculator.py
Hardware:  two CPU cores
Time:      200 CPU seconds with warm start and compilation; 9 minutes on cores that others shared
Result:    held-out accuracy 0.19, 0.20, 0.22 before the first step and 0.91, 0.89, 0.88 after the last, for three seeds
           with one warm start (256 conversations each, standard error 0.02). Of products it has 0.97, all by calls; of
           sums 0.70, four fifths of them by calls: it knew too few after the warm start to answer at once

"37*84=" is answered by "3108", or first by "calc 37*84", which the environment answers with the result. A quarter of
the problems are sums that never carry, which the model can learn; the others are products, which it cannot. The pupil
of the warm start calls for a sixth of either, and otherwise guesses products: he has 35 %.
"""

from configs import guessing


def get_config():
    c = guessing.get_config()
    c.task.name = "examples.calculator:Problems"
    c.task.held_out_sets = "held out,easy,hard"
    c.environment.name = "examples.calculator:Game"
    c.environment.options = '{"cost": 0.2}'
    c.environment.max_turns = 3
    c.environment.turn_tokens = 12  # "calc 37*84", the stop token, and one to spare
    c.task.max_prompt_tokens = 6
    c.rollout.max_tokens = 34  # two calls, two results of four digits, and an answer

    c.optimizer.learning_rate = 5e-4
    c.loss.entropy_coef = 0.01  # after 25 steps without it nothing is tried any more
    return c
