"""What every divergence has to be, by hand: arXiv:2505.17508 (Tables 1, 2 and 4), extended to ρ ≠ 1.

The formulas share no code with the losses. A new divergence is one row here: test_divergences, test_regularized_pg and
test_clipping then prove its value, both estimators and all clips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from rpg_jax.losses import DIVERGENCES


class Oracle(NamedTuple):
    """D of measures p = π_θ and q = π_ref, summed over outcomes; K at the ratios w = p/π_old and ρ = q/π_old."""

    objective: Callable
    weight: Callable


ORACLES = {
    "fkl": Oracle(lambda p, q: q * jnp.log(q / p), lambda w, rho: -rho),
    "ufkl": Oracle(lambda p, q: q * jnp.log(q / p) + p - q, lambda w, rho: w - rho),
    "rkl": Oracle(lambda p, q: p * jnp.log(p / q), lambda w, rho: w * (jnp.log(w / rho) + 1)),
    "urkl": Oracle(lambda p, q: p * jnp.log(p / q) + q - p, lambda w, rho: w * jnp.log(w / rho)),
    "js": Oracle(
        lambda p, q: 0.5 * (p * jnp.log(p / q) + q * jnp.log(q / p)),
        lambda w, rho: 0.5 * (w * (jnp.log(w / rho) + 1) - rho),
    ),
    "ujs": Oracle(
        lambda p, q: 0.5 * (p * jnp.log(p / q) + q - p + q * jnp.log(q / p) + p - q),
        lambda w, rho: 0.5 * (w * jnp.log(w / rho) + w - rho),
    ),
}
OF_COMPLETIONS = [name for name, row in DIVERGENCES.items() if row.coefficients and name in ORACLES]
"""What whole completions and the estimator `exact` take: a divergence without `Coefficients` is of tokens alone."""
