"""The estimators that the laboratory compares on completions of several tokens, with their exact moments.

A completion's gradient is Σ_t G_t ∇log π_θ(a_t). Its mean and variance under π_old are sums over all completions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.completions.trees import Prompt, Tree
from experiments.estimators.estimators import Moments
from experiments.estimators.scenes import divergence_to
from rpg_jax.losses import LOSSES, completions, divergences, regularized_pg, token_loss
from rpg_jax.losses.clipping import Bounds
from rpg_jax.losses.divergences import DIVERGENCES
from rpg_jax.losses.tokens import Tokens, checked

Scalar = jax.Array | float
# (tokens, β) -> the loss of every token, f[B, T]
Losses = Callable[[Tokens, Scalar], jax.Array]
NO_CLIP = {"clip_low": 1 - 1e-9, "clip_high": 1e9, "clip_dual": None}


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row of the laboratory.

    Attributes:
      name: its name in tables, without the divergence.
      term: its KL term, for example URKL or k₃.
      losses: its loss.
      meant: the divergence that it is meant to descend, `forward` or `reverse`.
      baseline: the name of the divergence whose leave-one-out baseline it subtracts, or None.
      present: the baseline has the others' log(π_θ/π_ref), not log(π_old/π_ref) as `rpg` computes it from `group_ids`.
    """

    name: str
    term: str
    losses: Losses
    meant: str
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


def k2_in_the_loss(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
    return library("ppo", **NO_CLIP)(tokens, kl_coef) + kl_coef * divergences.k2(-tokens.log_r)


def to_go_in_the_k3_form(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
    """`to_go` with d = w log r − w + ρ of the tokens to come, which no hyperparameter of the loss offers."""
    weights = completions.to_go(tokens, DIVERGENCES["urkl"], completions.Options(kl_coef), low_variance=True)
    return regularized_pg.clipped(tokens, weights, "reinforce", "none", Bounds(0.2, 0.2, None)).values


def rpg(name: str, divergence: str, present: bool = False, **options: Any) -> Estimator:
    """A row of the `rpg` loss without clip; `sequence` subtracts the KL's leave-one-out baseline."""
    losses = library("rpg", divergence=divergence, clip="none", **options)
    baseline = divergence if options.get("level") == "sequence" else None
    return Estimator(name, divergence.upper(), losses, DIVERGENCES[divergence].direction, baseline, present)


def each(name: str, **options: Any) -> tuple[Estimator, ...]:
    return tuple(rpg(name, divergence, **options) for divergence in ("rkl", "urkl", "fkl", "ufkl"))


ONE: dict[str, Any] = {"level": "sequence", "weight": "none"}
TO_GO, STALE = "to-go, weight w", "sequence, stale log r (KL in the reward)"
LOG_VARIANCE = "sequence, weight 1, present baseline"
ESTIMATORS = (
    *each("per token"),
    *each("sequence, weight W", level="sequence", weight="product"),
    *each("sequence, weight w", level="sequence"),
    *each("sequence, weight 1", **ONE),
    rpg(LOG_VARIANCE, "urkl", present=True, **ONE),
    *each("to-go, exact", level="to_go", weight="product", trace_cap=float("inf")),
    *(rpg(TO_GO, d, level="to_go") for d in ("urkl", "ufkl")),
    rpg(f"{TO_GO}, λ = ½", "urkl", level="to_go", trace_decay=0.5),
    Estimator(f"{TO_GO}, k₃ form", "URKL", to_go_in_the_k3_form, "reverse"),
    rpg(f"{STALE}, weight w", "urkl", level="sequence", kl_ratio="behaviour"),
    rpg(f"{STALE}, weight W", "urkl", level="sequence", kl_ratio="behaviour", weight="product"),
    Estimator("per token (GRPO)", "k₃", library("grpo", **NO_CLIP), "reverse"),
    Estimator("per token (corrected GRPO)", "w·k₃", library("grpo", kl_weighting="importance", **NO_CLIP), "reverse"),
    Estimator("per token", "k₂", k2_in_the_loss, "reverse"),
    Estimator("per token (Tunix)", "k₁", library("reinforce_pp", **NO_CLIP), "reverse"),
)
# RKL differs from URKL, and FKL from UFKL, in noise alone.
ENDS = tuple(
    e
    for e in ESTIMATORS
    if e.term not in ("RKL", "FKL", "w·k₃") and "½" not in e.name and (e.name, e.term) != (TO_GO, "UFKL")
)


def tokens_of(tree: Tree, prompt: Prompt, advantages: jax.Array) -> Tokens:
    """All completions of a prompt as a batch [N, T]; advantages f[N]."""
    policy, behaviour, reference = (tree.along(x) for x in (prompt.policy, prompt.behaviour, prompt.reference))
    return checked(
        logprobs=policy,
        behaviour_logprobs=behaviour,
        ref_logprobs=reference,
        advantages=advantages,
        mask=jnp.ones_like(policy),
        sampler_logprobs=None,
        completion_ids=None,
    )


def expected_advantages(
    estimator: Estimator, tree: Tree, prompt: Prompt, kl_coef: Scalar, rewarded: Scalar
) -> jax.Array:
    """R − E_old[R], and the mean of the KL's leave-one-out baseline where the estimator has one; f[N].

    A leave-one-out baseline does not depend on the completion, and no loss here is clipped. So the mean gradient over
    groups is the gradient with the mean baseline.
    """
    behaviour = tree.completions(prompt.behaviour)
    advantages = (prompt.rewards - jnp.exp(behaviour) @ prompt.rewards) * rewarded
    if estimator.baseline is None:
        return advantages
    a, b, c = DIVERGENCES[estimator.baseline].of_completions()
    policy = tree.completions(prompt.policy) if estimator.present else behaviour
    log_ratio = jnp.exp(behaviour) @ (policy - tree.completions(prompt.reference))
    return advantages + kl_coef * (a * log_ratio + b - c)


def moments(estimator: Estimator, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0) -> Moments:
    """Mean f[S, V] and total variance of a completion's gradient in the logits. `rewarded` 0 takes A as 0."""
    tokens = tokens_of(tree, prompt, expected_advantages(estimator, tree, prompt, kl_coef, rewarded))
    g = jax.grad(lambda x: jnp.sum(estimator.losses(dataclasses.replace(tokens, logprobs=x), kl_coef)))(tokens.logprobs)
    sampled = jnp.exp(tree.completions(prompt.behaviour))
    _, pull = jax.vjp(lambda logits: tree.along(jax.nn.log_softmax(logits)), prompt.policy)
    mean = pull(sampled[:, None] * g)[0]
    probabilities = jnp.exp(prompt.policy)
    score_norms = 1 - 2 * probabilities + jnp.sum(probabilities**2, axis=-1, keepdims=True)  # |e_a − π|²
    second = sampled @ jnp.sum(g**2 * tree.along(score_norms), axis=1)
    return Moments(mean, second - jnp.sum(mean**2))


def objective(
    level: str, divergence: str, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0
) -> jax.Array:
    """J by exact sums.

    `completions`: E_{π_θ}[R(x)] − β D over completions.
    `tokens`: the sum over prefixes drawn by π_old of E_{π_θ(a)}[Q_old(a)] − β D over actions; Q_old continues by π_old.
    """
    if level == "completions":
        policy, reference = tree.completions(prompt.policy), tree.completions(prompt.reference)
        value, distance = jnp.exp(policy) @ prompt.rewards, divergence_to(divergence, policy, reference)
    else:
        sampled = jnp.exp(tree.completions(prompt.behaviour))
        value = jnp.sum(jnp.exp(prompt.policy - prompt.behaviour) * tree.through(sampled * prompt.rewards))
        at_prefixes = jax.vmap(lambda p, q: divergence_to(divergence, p, q))(prompt.policy, prompt.reference)
        distance = jnp.sum(tree.through(sampled), axis=1) @ at_prefixes
    return value * rewarded - kl_coef * distance


def exact_gradient(
    level: str, divergence: str, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0
) -> jax.Array:
    """−∇J in the logits, f[S, V]."""

    def loss(logits: jax.Array) -> jax.Array:
        now = dataclasses.replace(prompt, policy=jax.nn.log_softmax(logits))
        return -objective(level, divergence, tree, now, kl_coef, rewarded=rewarded)

    return jax.grad(loss)(prompt.policy)
