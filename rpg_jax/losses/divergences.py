"""The divergences of RPG, each as one function of two log-ratios, and Schulman's estimators k1, k2, k3.

Samples come from the behaviour policy π_old. With w = π_θ/π_old, ρ = π_ref/π_old and r = w/ρ, a divergence D is written
as the function d(log w, log ρ) whose mean under π_old is D, so d is at once the value and the differentiable surrogate.
Its derivative in log w is the gradient weight K, ∇D = E_{π_old}[K ∇log π_θ]. KL is the Kullback–Leibler divergence; UKL
adds the difference of the masses of the two policies. With ρ = 1 and up to constants in θ these are Tables 1, 2 and 4
of arXiv:2505.17508. `js` and `ujs` are the means that the paper's public code calls by these names; neither is the
Jensen–Shannon divergence. A new divergence is one function here, with its name and its equations in the decorator.
All arrays are f[...], a number a token, in nats. Ratios are at most e²⁰ (`tokens.bounded_exp`).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.losses.declaration import Table
from rpg_jax.losses.tokens import bounded_exp

Function = Callable[[jax.Array, jax.Array], jax.Array]


class Coefficients(NamedTuple):
    """The numbers of a divergence's gradient weight K = w (a log r + b) − c ρ, with ∇D = E_{π_old}[K ∇log π_θ]. w =
    π_θ/π_old, ρ = π_ref/π_old, r = w/ρ. RPG for completions reads these numbers."""

    a: float
    b: float
    c: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A declared divergence of π_θ and π_ref. A call with (log w, log ρ), f[...] each, calls `function`.

    Attributes:
      function: d(log w, log ρ) per token, f[...], nats; w = π_θ/π_old, ρ = π_ref/π_old. The mean of d under π_old is
        D. The gradient flows through both arguments.
      objective, value, weight: LaTeX of D, of d and of the gradient weight K = ∂d/∂log w, for docs/methods.md.
      coefficients: K in numbers; without them a divergence is defined for tokens alone.
    """

    function: Function
    objective: str
    value: str
    weight: str
    coefficients: Coefficients | None = None

    def __call__(self, log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
        return self.function(log_w, log_rho)

    @property
    def direction(self) -> Literal["forward", "reverse"]:
        """The direction: forward for KL(π_ref‖π_θ), reverse for KL(π_θ‖π_ref), with or without mass terms. In K a
        forward divergence has the term c ρ, a reverse divergence the term a log r. Raises ValueError for a mean of both
        and for a divergence without coefficients."""
        a, _, c = self.of_completions()
        if (a == 0) == (c == 0):
            raise ValueError(f"the divergence {self.objective} is neither forward nor reverse: a={a:g} and c={c:g}")
        return "forward" if a == 0 else "reverse"

    def of_completions(self) -> Coefficients:
        """The coefficients of the divergence. Raises ValueError if the divergence declares no coefficients."""
        if self.coefficients is None:
            raise ValueError(
                f"the divergence {self.objective} is defined for tokens alone: declare its Coefficients(a, b, c), with "
                "K = w (a log r + b) - c rho, or use level='token' without estimator='exact'"
            )
        return self.coefficients


DIVERGENCES = Table(Divergence)


@DIVERGENCES.declare(
    r"\mathrm{KL}(\pi_\mathrm{ref}\Vert\pi_\theta)",
    r"\rho \log(\rho / w)",
    r"-\rho",
    Coefficients(a=0, b=0, c=1),
    name="fkl",
)
def forward_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """`fkl`, KL(π_ref‖π_θ) per token in nats: ρ log(ρ/w), K = −ρ; w = π_θ/π_old, ρ = π_ref/π_old, f[...]."""
    return bounded_exp(log_rho) * (log_rho - log_w)


@DIVERGENCES.declare(
    r"\mathrm{UKL}(\pi_\mathrm{ref}\Vert\pi_\theta)",
    r"\rho \log(\rho / w) - \rho + w",
    r"w - \rho",
    Coefficients(a=0, b=1, c=1),
    name="ufkl",
)
def unnormalized_forward_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """`ufkl`, UKL(π_ref‖π_θ) per token in nats: ρ log(ρ/w) − ρ + w, K = w − ρ; w = π_θ/π_old, ρ = π_ref/π_old."""
    return forward_kl(log_w, log_rho) - bounded_exp(log_rho) + bounded_exp(log_w)


@DIVERGENCES.declare(
    r"\mathrm{KL}(\pi_\theta\Vert\pi_\mathrm{ref})",
    r"w \log r",
    r"w (\log r + 1)",
    Coefficients(a=1, b=1, c=0),
    name="rkl",
)
def reverse_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """`rkl`, KL(π_θ‖π_ref) per token in nats: w log(w/ρ), K = w (log(w/ρ) + 1); w = π_θ/π_old, ρ = π_ref/π_old."""
    return bounded_exp(log_w) * (log_w - log_rho)


@DIVERGENCES.declare(
    r"\mathrm{UKL}(\pi_\theta\Vert\pi_\mathrm{ref})",
    r"w \log r - w + \rho",
    r"w \log r",
    Coefficients(a=1, b=0, c=0),
    name="urkl",
)
def unnormalized_reverse_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """`urkl`, UKL(π_θ‖π_ref) per token in nats: w log(w/ρ) − w + ρ, K = w log(w/ρ). The UKL is w·k3 at y = ρ/w."""
    return reverse_kl(log_w, log_rho) - bounded_exp(log_w) + bounded_exp(log_rho)


@DIVERGENCES.declare(
    r"\tfrac12(\mathrm{rkl} + \mathrm{fkl})",
    r"\tfrac12 (w - \rho) \log r",
    r"\tfrac12 (w (\log r + 1) - \rho)",
    Coefficients(a=0.5, b=0.5, c=0.5),
    name="js",
)
def mean_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """`js` and `ujs`, ½ (reverse + forward KL) per token in nats: ½ (w − ρ) log(w/ρ); w = π_θ/π_old, ρ = π_ref/π_old,
    each at most e²⁰. The UKLs' mass terms cancel."""
    return 0.5 * (reverse_kl(log_w, log_rho) + forward_kl(log_w, log_rho))


DIVERGENCES["ujs"] = dataclasses.replace(DIVERGENCES["js"], objective=r"\tfrac12(\mathrm{urkl} + \mathrm{ufkl})")


def gradient_weight(divergence: Function, log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """K = ∂d/∂log w, the weight of ∇log π_θ in ∇D, in the shape and dtype of `log_w`; nats. `divergence` computes d.
    K itself is differentiable. If K is homogeneous in (w, ρ), K/w is the same function at w = 1 and ρ/w = 1/r."""
    _, weight = jax.jvp(lambda x: divergence(x, log_rho), (log_w,), (jnp.ones_like(log_w),))
    return weight


def k1(log_y: jax.Array) -> jax.Array:
    """−log y in nats, log y = log(π_ref/π_θ): unbiased for KL(π_θ‖π_ref) under π_θ, of either sign (Schulman 2020)."""
    return -log_y


def k2(log_y: jax.Array) -> jax.Array:
    """½ (log y)² in nats, log y = log(π_ref/π_θ): biased for KL(π_θ‖π_ref), never negative (Schulman 2020)."""
    return 0.5 * jnp.square(log_y)


def k3(log_y: jax.Array) -> jax.Array:
    """y − 1 − log y in nats, y = π_ref/π_θ: unbiased for UKL(π_θ‖π_ref) under π_θ, never negative (Schulman 2020)."""
    return jnp.exp(log_y) - 1 - log_y
