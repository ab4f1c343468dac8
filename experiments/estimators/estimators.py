"""The estimators that the laboratory compares, with their exact means and variances.

The loss of a sampled token x has the gradient g(x) ∇log π_θ(x), with g = ∂L/∂log π_θ(x). Its mean and variance under
π_s are finite sums over V tokens. Nothing is sampled: bias is exact to rounding, and only the scenes have a seed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.estimators.scenes import Scene, divergence_to
from rpg_jax.losses import LOSSES, divergences, policy_loss
from rpg_jax.losses.methods import CLIP_HIGHER

# (log π_θ(x) f[V], scene, advantages f[V], β) -> Σ_x L(x), the sum of the losses of all V tokens; f[]
Losses = Callable[[jax.Array, Scene, jax.Array, float], jax.Array]


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row of the laboratory: the loss of a token as text (`formula`), and its sum Σ_x (`losses`).

    `meant` is the divergence that the loss is meant to descend, `forward` or `reverse`; None without a KL term.
    """

    name: str
    formula: str
    losses: Losses
    meant: str | None


def library(loss: str, **hyperparameters: Any) -> Losses:
    """A loss of `rpg_jax.losses` on completions of one token; a loss with a KL term gets β."""
    regularized = "kl_coef" in LOSSES[loss].hyperparameters

    def losses(logprobs: jax.Array, scene: Scene, advantages: jax.Array, kl_coef: float) -> jax.Array:
        options = {"kl_coef": kl_coef, **hyperparameters} if regularized else hyperparameters
        loss_sum, _, _ = policy_loss(
            loss,
            logprobs=logprobs[:, None],
            behaviour_logprobs=scene.behaviour[:, None],
            ref_logprobs=scene.reference[:, None],
            sampler_logprobs=scene.sampler[:, None],
            advantages=advantages,
            mask=jnp.ones((len(logprobs), 1)),
            aggregate="token_mean",
            **options,
        )
        return loss_sum

    return losses


def added(penalty: Callable[[jax.Array], jax.Array]) -> Losses:
    """−wA + β·penalty(log y), y = π_ref/π_θ: a KL estimate that is added to the loss and differentiated."""

    def losses(logprobs: jax.Array, scene: Scene, advantages: jax.Array, kl_coef: float) -> jax.Array:
        w = jnp.exp(logprobs - scene.behaviour)
        return jnp.sum(-w * advantages + kl_coef * penalty(scene.reference - logprobs))

    return losses


def k1_in_reward(logprobs: jax.Array, scene: Scene, advantages: jax.Array, kl_coef: float) -> jax.Array:
    """−w (A − β log(π_old/π_ref)): the penalty is computed when tokens are sampled and counts as reward."""
    penalty = scene.behaviour - scene.reference
    return jnp.sum(-jnp.exp(logprobs - scene.behaviour) * (advantages - kl_coef * penalty))


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
        library("grpo", kl_weighting="importance", clip_low=1 - 1e-9, clip_high=1e9, clip_dual=None),
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


def moments(losses: Losses, scene: Scene, kl_coef: float, *, rewarded: bool = True) -> Moments:
    """E_{π_s}[∇L] and tr Cov_{π_s}[∇L] of one scene.

    The advantage is A = R − E_{π_old}[R]. Without `rewarded` it is 0: the KL term alone is left.
    """
    policy, sampled = jax.nn.log_softmax(scene.logits), jnp.exp(scene.sampler)
    advantages = (scene.rewards - jnp.exp(scene.behaviour) @ scene.rewards) * rewarded
    # A token's loss depends on its own log-probability alone: the gradient of the sum holds the g of each token.
    g = jax.grad(losses)(policy, scene, advantages, kl_coef)
    probabilities = jnp.exp(policy)
    mean = sampled * g - (sampled @ g) * probabilities
    score_norms = 1 - 2 * probabilities + probabilities @ probabilities  # |e_x − π|²
    return Moments(mean, sampled @ (g**2 * score_norms) - mean @ mean)


def exact_gradient(scene: Scene, kl_coef: float, divergence: str | None, *, rewarded: bool = True) -> jax.Array:
    """−∇J in the logits, f[V], by differentiating the exact sums: J = E_{π_θ}[R] − β D.

    D is KL(π_θ‖π_ref) for `reverse`, KL(π_ref‖π_θ) for `forward`, and 0 for None.
    """

    def objective(logits: jax.Array) -> jax.Array:
        policy = jax.nn.log_softmax(logits)
        value = jnp.exp(policy) @ scene.rewards * rewarded
        if divergence is None:
            return value
        return value - kl_coef * divergence_to(divergence, policy, scene.reference)

    return -jax.grad(objective)(scene.logits)


def converge(
    losses: Losses, scene: Scene, kl_coef: float, *, refresh: int, steps: int, learning_rate: float = 0.2
) -> jax.Array:
    """log π_θ, f[V], at the end of a descent along the mean gradient from π_old.

    π_old and π_s become π_θ every `refresh` updates; with 0 they stay.
    """

    def step(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        logits, behaviour = carry
        policy = jax.nn.log_softmax(logits)
        behaviour = jnp.where(number % refresh == 0, policy, behaviour) if refresh else behaviour
        now = dataclasses.replace(scene, logits=logits, behaviour=behaviour, sampler=behaviour)
        return (logits - learning_rate * moments(losses, now, kl_coef).mean, behaviour), None

    (logits, _), _ = jax.lax.scan(step, (scene.behaviour, scene.behaviour), jnp.arange(steps))
    return jax.nn.log_softmax(logits)
