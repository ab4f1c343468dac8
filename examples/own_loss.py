"""A loss and an advantage of your own, trained through `rpg_jax.train`.

    python -m examples.own_loss

The same program continues a run that was interrupted. The command line trains the same loss:

    python -m rpg_jax.train --config=tiny --config.loss.name=examples.own_loss:tempered \\
        --config.loss.arguments='{"tau": 0.5}' --config.loss.advantage=examples.own_loss:median_baseline \\
        --config.dynamic_sampling.enabled=False
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp

import rpg_jax
from rpg_jax import losses


def tempered(
    tokens: losses.Tokens,
    *,
    tau: Annotated[float, losses.Range("(0, 1]")] = 1.0,
    kl_coef: Annotated[float, losses.Range("[0, inf)")] = 1e-4,
) -> losses.TokenLoss:
    """−A w^τ / τ + β k₂: the importance ratio w to a power below one, which has a smaller variance.

    Its gradient is −A w^τ ∇log π_θ + β log r ∇log π_θ. With τ = 1 the first term is the plain surrogate −A w.

    Args:
      tokens: log-probabilities, advantages and mask, f32[B, T] each. `tokens.log_w` is log π_θ − log π_old, and
        `tokens.log_r` is log π_θ − log π_ref.
      tau: τ, declared with its range. `loss.arguments` sets τ, and a value out of the range is refused.
      kl_coef: β. A hyperparameter with the name of a config field is set by this field, `loss.kl_coef`.

    Returns:
      A loss for each token, to be minimised, and events to be counted: `far` becomes the metric `far_fraction`.
    """
    reward = -tokens.advantages * jnp.exp(tau * tokens.log_w) / tau
    return losses.TokenLoss(reward + kl_coef * 0.5 * tokens.log_r**2, {"far": jnp.abs(tokens.log_w) > 0.2})


def median_baseline(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """R − median of the group, f[P, G], for rewards f[P, G]; `counted` bool[P, G]: which have a reward (None: all)."""
    known = rewards if counted is None else jnp.where(counted, rewards, jnp.nan)
    return rewards - jnp.nan_to_num(jnp.nanmedian(known, axis=1, keepdims=True))


def main(steps: int = 20, tau: float = 0.5, **overrides) -> rpg_jax.Result:
    """Trains the policy of configs/tiny.py in a run folder; `overrides` are other config fields by dotted name."""
    return rpg_jax.train(
        "tiny",
        loss=functools.partial(tempered, tau=tau),
        advantage=median_baseline,
        # Groups with equal rewards have advantages of 0 and stay in the batch.
        overrides={"train.steps": steps, "dynamic_sampling.enabled": False, **overrides},
    )


if __name__ == "__main__":
    from examples import own_loss  # the run keeps the name of this module, which is __main__ here

    result = own_loss.main()
    print(result.folder, {name: round(result.metrics[-1][name], 3) for name in ("reward", "far_fraction", "kl")})
