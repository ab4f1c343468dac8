"""The clips of a policy gradient: RPG-style clip, PPO's dual clip, and a clamp.

Regions and weights are constants in θ. The caller decides whether clipped tokens have a gradient (`weighted`). JAX
splits the gradient of `min`, `max` and `clip` evenly at ties, so a gradient that must vanish never relies on them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from rpg_jax.losses.tokens import Tokens

# A ratio within this many units of rounding of a bound counts as at the bound: log w is a difference of two rounded
# numbers. Half of it covers log-probabilities down to −16 nats, whose roundings are up to 4 units each.
TIE_ULPS = 16


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The clip range [1 − `low`, 1 + `high`] of the importance ratio, and the dual bound c (None: no dual clip). Each
    is one number, or f[B, T] with a number for each token."""

    low: float | jax.Array
    high: float | jax.Array
    dual: float | jax.Array | None

    @property
    def lower(self) -> float | jax.Array:
        """1 − `low`, the lower bound of the ratio."""
        return 1 - self.low

    @property
    def upper(self) -> float | jax.Array:
        """1 + `high`, the upper bound of the ratio."""
        return 1 + self.high

    @property
    def dual_upper(self) -> float | jax.Array:
        """c, or infinity without a dual clip."""
        return math.inf if self.dual is None else self.dual


@dataclasses.dataclass(frozen=True)
class Region:
    """Tokens whose ratio is clipped, bool[B, T]: `high` at 1 + ε₂, `low` at 1 − ε₁, `dual` at c. They are disjoint."""

    high: jax.Array
    low: jax.Array
    dual: jax.Array

    @property
    def clipped(self) -> jax.Array:
        """bool[B, T], True where the ratio is clipped at any bound."""
        return self.high | self.low | self.dual

    def events(self) -> dict[str, jax.Array]:
        """The events of a `TokenLoss`, bool[B, T] each: clip (any bound), clip_high, clip_low and clip_dual."""
        return {"clip": self.clipped, "clip_high": self.high, "clip_low": self.low, "clip_dual": self.dual}

    def select(self, high: ArrayLike, low: ArrayLike, dual: ArrayLike, otherwise: jax.Array) -> jax.Array:
        """f[B, T]: `high`, `low` or `dual` at the tokens of that region, `otherwise` at tokens that are not clipped."""
        for where, value in ((self.high, high), (self.low, low), (self.dual, dual)):
            otherwise = jnp.where(where, value, otherwise)
        return otherwise


def rpg_region(advantage: jax.Array, w: jax.Array, bounds: Bounds) -> Region:
    """The tokens that RPG-style clip clips (arXiv:2505.17508 Algorithms 1 and 2).

    A token is in `high` if advantage >= 0 and w >= 1 + ε₂; in `low` if advantage < 0 and w <= 1 − ε₁; in `dual` if
    advantage < 0 and w >= c. A w within `TIE_ULPS` roundings of a bound counts as at the bound. `advantage` f[B, T] is
    the regularized advantage, or the plain advantage if only the reward is clipped. `w` f[B, T] is the ratio.
    """
    slack = TIE_ULPS * float(jnp.finfo(w.dtype).eps)
    gain = advantage >= 0
    return Region(
        high=gain & (w >= bounds.upper * (1 - slack)),
        low=~gain & (w <= bounds.lower * (1 + slack)),
        dual=~gain & (w >= bounds.dual_upper * (1 - slack)),
    )


def weighted(weight: jax.Array, tokens: Tokens, estimator: str, stopped: jax.Array | None = None) -> jax.Array:
    """A loss whose gradient is −weight · ∇log π_θ; f[B, T], to be minimised.

        `reinforce`, `exact`   −SG(weight) · log π_θ
        `differentiable`       −SG(weight) · π_θ/SG(π_θ), whose value is −weight

    Where `stopped` bool[B, T] is True, the gradient is zero and the value does not change. `weight` is f[B, T].
    """
    x = tokens.logprobs
    if estimator == "differentiable":
        x = jnp.exp(x - stop_gradient(x))
    if stopped is not None:
        x = jnp.where(stopped, stop_gradient(x), x)
    return -stop_gradient(weight) * x


def reward_term(
    tokens: Tokens, ratio: jax.Array, estimator: str, clip: str, bounds: Bounds
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """RPG's loss without the KL term, −SG(C A) x as f[B, T] (minimise), and its clip events, {} for clip `none`. A is
    the advantage, x is log π_θ, or π_θ/SG(π_θ) for `estimator` "differentiable". For `clip` "none", C is `ratio`
    f[B, T]. For another clip the sign of A decides the bound (`rpg_region`): where `ratio` is clipped, C is the bound,
    and the token has no gradient."""
    if clip == "none":
        return weighted(ratio * tokens.advantages, tokens, estimator), {}
    region = rpg_region(tokens.advantages, ratio, bounds)
    bound = region.select(bounds.upper, bounds.lower, bounds.dual_upper, ratio)
    return weighted(bound * tokens.advantages, tokens, estimator, region.clipped), region.events()


def clamp(x: jax.Array, low: ArrayLike, high: ArrayLike) -> jax.Array:
    """x clipped to [low, high], in x's shape; gradient 1 inside, bounds included, and 0 outside."""
    return jnp.where((x >= low) & (x <= high), x, stop_gradient(jnp.clip(x, low, high)))


def ppo_dual_clip(w: jax.Array, advantages: jax.Array, bounds: Bounds) -> tuple[jax.Array, Region]:
    """PPO's clip with the dual bound: max(−wA, −clip(w, 1 − ε₁, 1 + ε₂) A), and where A < 0 at most −cA.

    Args:
      w: f[B, T], importance ratio of tokens or of completions; the gradient flows through it.
      advantages: f[B, T].
      bounds: ε₁, ε₂ and c; `dual=None` leaves the last minimum out.

    Returns:
      f[B, T], to be minimised, and the clipped tokens. At exact ties the public PyTorch code has the same gradient.

    Source: arXiv:1707.06347 eq. 7 and arXiv:1912.09729 eq. 5.
    """
    unclipped = -advantages * w
    loss = jnp.maximum(unclipped, -advantages * clamp(w, bounds.lower, bounds.upper))
    if bounds.dual is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(-advantages * bounds.dual, loss), loss)
    loses = advantages < 0
    dual = loses & (w > bounds.dual_upper)
    return loss, Region(high=(advantages > 0) & (w > bounds.upper), low=loses & (w < bounds.lower), dual=dual)
