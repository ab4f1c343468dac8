"""The estimators that the laboratory compares, with their exact means and variances.

The loss of a sampled token x has the gradient g(x) ∇log π_θ(x), with g = ∂L/∂log π_θ(x). Its mean and variance under
π_s are finite sums over V tokens. Nothing is sampled: bias is exact to rounding, and only the scenes have a seed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.estimators.scenes import Scene, divergence_to
from rpg_jax.losses import LOSSES, divergences, token_loss
from rpg_jax.losses.methods import CLIP_HIGHER
from rpg_jax.losses.tokens import Tokens, checked

Scalar = jax.Array | float
# (tokens, β) -> the loss of every token, f[B, T]
Losses = Callable[[Tokens, Scalar], jax.Array]
NO_CLIP = {"clip_low": 1 - 1e-9, "clip_high": 1e9, "clip_dual": None}


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row of a laboratory.

    Attributes:
      name: its name in tables, without the divergence.
      term: its KL term, for example URKL or k₃; on completions of one token the whole loss as text.
      losses: its loss.
      meant: the divergence that it is meant to descend, `forward` or `reverse`; None without a KL term.
      baseline: the name of the divergence whose leave-one-out baseline it subtracts, or None.
      present: the baseline has the others' log(π_θ/π_ref), not log(π_old/π_ref) as `rpg` computes it from `group_ids`.
    """

    name: str
    term: str
    losses: Losses
    meant: str | None
    baseline: str | None = None
    present: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}: {self.term}"


def library(name: str, **hyperparameters: Any) -> Losses:
    """A loss of `rpg_jax.losses`; losses with a KL term are given β."""
    regularized = "kl_coef" in LOSSES[name].hyperparameters

    def losses(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
        return token_loss(name, tokens, **hyperparameters, **({"kl_coef": kl_coef} if regularized else {})).values

    return losses


def added(penalty: Callable[[jax.Array], jax.Array]) -> Losses:
    """−wA + β·penalty(log y), y = π_ref/π_θ: a KL estimate that is added to the loss and differentiated."""
    return lambda tokens, kl_coef: -tokens.w * tokens.advantages + kl_coef * penalty(-tokens.log_r)


def k1_in_reward(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
    """−w (A − β log(π_old/π_ref)): the penalty is computed when tokens are sampled and counts as reward."""
    return -tokens.w * (tokens.advantages + kl_coef * tokens.log_rho)


def rpg(divergence: str, **options: Any) -> Losses:
    return library("rpg", divergence=divergence, **{"estimator": "differentiable", "clip": "none"} | options)


KL_TERMS = (
    Estimator("RPG-FKL", "−wA − βρ log π_θ", rpg("fkl"), "forward"),
    Estimator("RPG-UFKL", "−wA + β(w − ρ log w)", rpg("ufkl"), "forward"),
    Estimator("RPG-RKL", "−wA + βw log r", rpg("rkl"), "reverse"),
    Estimator("RPG-URKL", "−wA + β(w log r − w)", rpg("urkl"), "reverse"),
    Estimator(
        "w·k₃ in the loss (corrected GRPO)",
        "−wA + βw·k₃",
        library("grpo", kl_weighting="importance", **NO_CLIP),
        "reverse",
    ),
    Estimator("k₁ in the loss (Tunix)", "−wA + βk₁", added(divergences.k1), "reverse"),
    Estimator("k₂ in the loss", "−wA + βk₂", added(divergences.k2), "reverse"),
    Estimator("k₃ in the loss (GRPO)", "−wA + βk₃", added(divergences.k3), "reverse"),
    Estimator("k₁ in the reward", "−w(A − β log(π_old/π_ref))", k1_in_reward, "reverse"),
)

CLIPS = (
    Estimator("RPG-URKL, no clip", "−wA + β(w log r − w)", rpg("urkl"), "reverse"),
    Estimator("RPG-URKL, clip dual", "Algorithm 2", rpg("urkl", clip="dual"), "reverse"),
    Estimator("RPG-URKL, clip truncate", "eq. 4.1", rpg("urkl", clip="truncate"), "reverse"),
    Estimator("RPG-URKL, clip reward", "dual clip of −wA alone", rpg("urkl", clip="reward"), "reverse"),
    Estimator("RPG-URKL, clip dual, form verl", "public code", rpg("urkl", clip="dual", form="verl"), "reverse"),
    Estimator("GRPO", "PPO clip + βk₃", library("grpo"), "reverse"),
    Estimator("REINFORCE++", "PPO clip + βk₁", library("reinforce_pp"), "reverse"),
    Estimator("DAPO", "PPO clip, no KL", library("ppo", **CLIP_HIGHER), None),
    Estimator("CISPO", "−SG(min(w, 1 + ε₂))A log π_θ", library("cispo"), None),
    Estimator("GSPO", "PPO clip of the sequence ratio", library("gspo"), None),
)

DPPO_KL = library("dppo", mask_divergence="kl", mask_threshold=0.05)
COMPARATORS = (
    Estimator("DPPO-TV", "−wA where |π_θ − π_old| ≤ 0.15", library("dppo"), None),
    Estimator("DPPO-KL", "−wA where the binary KL is at most 0.05", DPPO_KL, None),
    Estimator("DRPO", "−wA + |A|/(2δ) π_old (w − 1)²", library("drpo"), None),
    Estimator("SAPO", "−(4/τ)σ(τ(w − 1))A", library("sapo"), None),
    Estimator("GMPO", "−A times the mean of clipped ratios", library("gmpo"), None),
    Estimator("CISPO, ε₁ 0.2", "−SG(clip(w, 1 − ε₁, 1 + ε₂))A log π_θ", library("cispo", clip_low=0.2), None),
    Estimator("OPMD", "−A log π_θ + ½β(log r)²", library("opmd"), "reverse"),
)

SAMPLERS = (
    Estimator("RPG-URKL, clip dual", "π_old recomputed by the trainer", rpg("urkl", clip="dual"), "reverse"),
    *(
        Estimator(
            f"RPG-URKL, clip dual, TIS {ceiling}",
            f"times min(π_old/π_s, {ceiling})",
            rpg("urkl", clip="dual", sampler_correction="truncate", sampler_high=ceiling),
            "reverse",
        )
        for ceiling in (1.2, 2.0)
    ),
    Estimator("DAPO", "PPO clip, no KL", library("ppo", **CLIP_HIGHER), None),
    Estimator(
        "DAPO, TIS 2.0",
        "times min(π_old/π_s, 2.0)",
        library("ppo", sampler_correction="truncate", **CLIP_HIGHER),
        None,
    ),
    Estimator(
        "DAPO, IcePop 0.5 to 5",
        "times π_old/π_s, or 0 beyond the bounds",
        library("ppo", sampler_correction="mask", **CLIP_HIGHER),
        None,
    ),
    Estimator(
        "DAPO, rejection 0.5 to 2",
        "times 1, or 0 where π_old/π_s is beyond the bounds",
        library("ppo", sampler_correction="geometric", sampler_low=0.5, sampler_high=2.0, **CLIP_HIGHER),
        None,
    ),
    Estimator(
        "DAPO, anchored",
        "π_s in place of π_old",
        library("ppo", sampler_correction="anchor", **CLIP_HIGHER),
        None,
    ),
)


class Moments(NamedTuple):
    """Mean f[V] and total variance f[] = tr Cov of a loss's gradient in the logits, over tokens from π_s."""

    mean: jax.Array
    variance: jax.Array


def tokens_of(scene: Scene, advantages: jax.Array) -> Tokens:
    """All V tokens of a scene as completions of one token, [V, 1]; advantages f[V]."""
    policy = jax.nn.log_softmax(scene.logits)[:, None]
    return checked(
        logprobs=policy,
        behaviour_logprobs=scene.behaviour[:, None],
        ref_logprobs=scene.reference[:, None],
        sampler_logprobs=scene.sampler[:, None],
        advantages=advantages,
        mask=jnp.ones_like(policy),
        completion_ids=None,
    )


def moments(losses: Losses, scene: Scene, kl_coef: float, *, rewarded: bool = True) -> Moments:
    """E_{π_s}[∇L] and tr Cov_{π_s}[∇L] of one scene.

    The advantage is A = R − E_{π_old}[R]. Without `rewarded` it is 0: the KL term alone is left.
    """
    tokens = tokens_of(scene, (scene.rewards - jnp.exp(scene.behaviour) @ scene.rewards) * rewarded)

    def loss(logprobs: jax.Array) -> jax.Array:
        return jnp.sum(losses(dataclasses.replace(tokens, logprobs=logprobs), kl_coef))

    # A token's loss depends on its own log-probability alone: the gradient of the sum holds the g of each token.
    g = jax.grad(loss)(tokens.logprobs)[:, 0]
    probabilities, sampled = jnp.exp(tokens.logprobs[:, 0]), jnp.exp(scene.sampler)
    mean = sampled * g - (sampled @ g) * probabilities
    score_norms = 1 - 2 * probabilities + probabilities @ probabilities  # |e_x − π|²
    return Moments(mean, sampled @ (g**2 * score_norms) - mean @ mean)


def exact_gradient(scene: Scene, kl_coef: float, divergence: str | None, *, rewarded: bool = True) -> jax.Array:
    """−∇J in the logits, f[V], by differentiating the exact sums: J = E_{π_θ}[R] − β D.

    D is that of `divergence_to`.
    """

    def objective(logits: jax.Array) -> jax.Array:
        policy = jax.nn.log_softmax(logits)
        value = jnp.exp(policy) @ scene.rewards * rewarded
        return value - kl_coef * divergence_to(divergence, policy, scene.reference)

    return -jax.grad(objective)(scene.logits)


def descend(
    gradient: Callable[[jax.Array, jax.Array], jax.Array],
    start: jax.Array,
    optimizer: optax.GradientTransformation,
    *,
    refresh: int,
    steps: int,
) -> jax.Array:
    """log π_θ where a descent along `gradient` ends, a function of (logits, log π_old); both are `start` at first.

    π_old becomes π_θ every `refresh` updates; with 0 it stays.
    """

    def step(carry: tuple[jax.Array, jax.Array, Any], number: jax.Array) -> tuple[tuple[Any, ...], None]:
        logits, behaviour, state = carry
        policy = jax.nn.log_softmax(logits)
        behaviour = jnp.where(number % refresh == 0, policy, behaviour) if refresh else behaviour
        updates, state = optimizer.update(gradient(logits, behaviour), state)
        return (optax.apply_updates(logits, updates), behaviour, state), None

    (logits, *_), _ = jax.lax.scan(step, (start, start, optimizer.init(start)), jnp.arange(steps))
    return jax.nn.log_softmax(logits)


def converge(losses: Losses, scene: Scene, kl_coef: float, *, refresh: int, steps: int) -> jax.Array:
    """log π_θ, f[V], at the end of `descend` along the mean gradient from π_old; π_s is π_old."""

    def gradient(logits: jax.Array, behaviour: jax.Array) -> jax.Array:
        now = dataclasses.replace(scene, logits=logits, behaviour=behaviour, sampler=behaviour)
        return moments(losses, now, kl_coef).mean

    return descend(gradient, scene.behaviour, optax.sgd(0.2), refresh=refresh, steps=steps)
