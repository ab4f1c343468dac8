"""Prompts with completions of one token, of policies at chosen distances from each other."""

import functools

import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from experiments.completions.trees import Prompt, Tree, at_distance, chain_rule_kl


def make_scenes(
    count: int, *, tokens: int, drift: float, reference_kl: float, sampler_kl: float = 0.0, seed: int = 0
) -> Prompt:
    """Makes `count` random prompts of `Tree(tokens, 1)`, stacked, with rewards of +1 and -1.

    π_old = softmax(N(0, 1)); each other policy lies on a random exponential-family line through π_old, in nats at
    KL(π_θ‖π_old) = `drift`, KL(π_ref‖π_old) = `reference_kl`, KL(π_s‖π_old) = `sampler_kl`.
    """
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        behaviour = log_softmax(rng.normal(size=(1, tokens)), axis=-1)
        policy, reference, sampler = (_away(behaviour, kl, rng) for kl in (drift, reference_kl, sampler_kl))
        rewards = np.where(np.arange(tokens) < tokens // 3, 1.0, -1.0)
        rows.append((policy, behaviour, reference, sampler, rng.permutation(rewards)))
    return Prompt(*(jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)))


def _away(base: np.ndarray, distance: float, rng: np.random.Generator) -> np.ndarray:
    """`at_distance` in a random direction: in a line the distance grows up to -log π_base(argmax u), so that another
    direction is drawn if this is too near."""
    if distance == 0:
        return base
    direction = rng.normal(size=base.shape)
    while -base.flat[np.argmax(direction)] < 1.2 * distance:
        direction = rng.normal(size=base.shape)
    return at_distance(base, distance, direction, functools.partial(chain_rule_kl, Tree(base.size, 1)))
