"""What the turns of a conversation are given credit for: its whole reward, or what was paid from each turn on.

A completion without an environment is one turn.
"""

from collections.abc import Sequence

import numpy as np

from rpg_jax.data import Group

CREDITS = ("completion", "turn")


def returns(group: Group, environment_weight: float) -> list[np.ndarray]:
    """The returns to go of each completion's k turns, f32[k]: R_t = R − ω Σ_{j<t} r_j.

    R is the completion's reward. So R_1 = R, and what R has beside the environment's rewards is paid with the last
    turn: the other parts of the reward, and its shaping.

    Args:
      environment_weight: ω, of the environment's part in the reward.
    """
    found = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        paid = np.zeros(1) if completion.turns is None else completion.turns.rewards.astype(np.float64)
        before = np.cumsum(paid) - paid
        found.append((np.float64(reward) - environment_weight * before).astype(np.float32))
    return found


def token_rewards(groups: Sequence[Group], credit: str, environment_weight: float) -> list[list[np.ndarray]]:
    """What each token was paid, f32[n] for each group and completion, for a learned baseline.

    With credit "completion" the last token that the policy sampled gets the completion's reward; with "turn" the last
    one of each turn gets what the turn was paid.
    """
    return [
        [
            _at_the_ends(completion.turn_numbers, completion.sampled, own if credit == "turn" else own[:1])
            for completion, own in zip(group.completions, returns(group, environment_weight), strict=True)
        ]
        for group in groups
    ]


def _at_the_ends(numbers: np.ndarray, sampled: np.ndarray, own: np.ndarray) -> np.ndarray:
    """f32[n] with R_t − R_{t+1} at the last sampled token of turn t; a single return is that of all turns."""
    paid = np.zeros(len(numbers), np.float32)
    for turn, (now, later) in enumerate(zip(own, [*own[1:], np.float32(0)], strict=True)):
        last = np.flatnonzero(sampled & ((numbers == turn) | (len(own) == 1)))[-1]
        paid[last] = now - later
    return paid
