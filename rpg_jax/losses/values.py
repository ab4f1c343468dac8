"""A learned baseline: advantages of tokens from the values of the states before them, and the loss of the values.

V_t is the value of the prefix that token t continues, so the end of a completion has value 0. Tokens that an
environment wrote between turns do not count (`mask` 0), and t + 1 is the next token that counts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rpg_jax import masking
from rpg_jax.losses.advantages import LEARNED_ADVANTAGES
from rpg_jax.losses.declaration import TokenLoss
from rpg_jax.losses.metrics import Metrics


@LEARNED_ADVANTAGES.declare(
    r"\textstyle\sum_k (\gamma\lambda)^k \delta_{t+k}, \quad \delta_t = R_t + \gamma V_{t+1} - V_t"
)
def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    completion_ids: jax.Array | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimates and the returns that they imply (arXiv:1506.02438 eq. 16).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  returns_t = A_t + V_t; V and A are 0 after the last token. λ
    = 0 gives the one-step error δ; λ = 1 gives the discounted sum of rewards minus V.

    Args:
      rewards: f[B, T], the reward of each token: usually a completion's reward at its last token, 0 elsewhere.
      values: f[B, T], V_t of the prefix that token t continues.
      mask: [B, T]; a token with mask 0 is left out: its reward and V are not read, t + 1 skips it, nothing discounts.
      completion_ids: i32[B, T], tells the completions of a packed row apart; None is one completion a row.
      gamma, gae_lambda: γ and λ, in [0, 1], or ValueError.

    Returns:
      advantages and returns, f32[B, T] (f64 for f64 values), 0 where `mask` is 0. No gradient.
    """
    if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
        raise ValueError(f"gamma and gae_lambda must be in [0, 1], got {gamma=} and {gae_lambda=}")
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    values = lax.stop_gradient(masking.masked_fill(values.astype(dtype), mask))
    rewards = lax.stop_gradient(masking.masked_fill(rewards.astype(dtype), mask))
    upcoming = _scan_back(values, 0.0, mask, completion_ids)  # of the first token from t on that counts
    errors = rewards + gamma * _next(upcoming, completion_ids) - values
    advantages = masking.masked_fill(_scan_back(errors, gamma * gae_lambda, mask, completion_ids), mask)
    return advantages, advantages + values


def value_loss(values: jax.Array, old_values: jax.Array, returns: jax.Array, *, clip: float | None) -> TokenLoss:
    """½ max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²) (minimise), as in PPO's public implementations; f[B, T].

    Args:
      values: f[B, T], V of the critic in training; the only argument with a gradient.
      old_values, returns: f[B, T], V_old of the critic before the first update on these tokens, and R.
      clip: ε > 0, in units of reward, or ValueError; None: ½ (V − R)² alone. The event `value_clip` needs a clip.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the clip of values must be > 0, or None for no clip; got {clip}")
    old_values, returns = lax.stop_gradient((old_values, returns))
    plain = jnp.square(values - returns)
    if clip is None:
        return TokenLoss(plain / 2)
    clipped = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    return TokenLoss(jnp.maximum(plain, clipped) / 2, {"value_clip": clipped > plain})


def value_metrics(old_values: jax.Array, returns: jax.Array, mask: jax.Array) -> Metrics:
    """Means over tokens: value, return, return_squared, value_error R − V and value_error_squared; V is `old_values`.
    Each is (sum, weight), scalars; arrays are f[B, T], and a token counts where `mask` is nonzero."""
    count = jnp.sum(mask != 0, dtype=old_values.dtype)
    error = returns - old_values
    means = {"value": old_values, "return": returns, "return_squared": jnp.square(returns)}
    means |= {"value_error": error, "value_error_squared": jnp.square(error)}
    return {name: (masking.masked_sum(x, mask), count) for name, x in means.items()}


def explained_variance(
    *, mean_return: float, mean_return_squared: float, mean_error: float, mean_error_squared: float
) -> float:
    """1 − Var(R − V) / Var(R), from means over tokens of R, R², R − V and (R − V)²: 1 for perfect values V, 0 for
    constant V, below 0 for worse values. 0 if Var(R) <= max(1e-12, 1e-5 mean(R²)), which f32 sums do not resolve."""
    variance = mean_return_squared - mean_return**2
    floor = max(1e-12, 1e-5 * mean_return_squared)
    return 1 - (mean_error_squared - mean_error**2) / variance if variance > floor else 0.0


def _scan_back(x: jax.Array, decay: float, mask: jax.Array, completion_ids: jax.Array | None) -> jax.Array:
    """y_t = x_t + decay · y_{t+1} where a token counts, y_t = y_{t+1} where not."""
    decays = jnp.full_like(x, decay)
    return masking.completion_scan(x, mask, completion_ids, decay=decays, reverse=True)


def _next(x: jax.Array, completion_ids: jax.Array | None) -> jax.Array:
    """x at the next place; 0 at the last place of a completion."""
    following = jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)
    if completion_ids is None:
        return following
    return jnp.where(jnp.roll(completion_ids, -1, axis=1) == completion_ids, following, 0)
