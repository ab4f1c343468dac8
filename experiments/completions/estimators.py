"""The estimators that the laboratory compares on completions of several tokens, with their exact moments.

A completion's gradient is Σ_t G_t ∇log π_θ(a_t). Its mean and variance under π_s are sums over all completions. Nothing
is sampled: bias is exact to rounding, and only the prompts have a seed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.completions.trees import Prompt, Tree, divergence_to
from rpg_jax.losses import LOSSES, PrefixKL, completions, divergences, token_loss
from rpg_jax.losses.divergences import DIVERGENCES
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


def rpg(name: str, divergence: str, present: bool = False, **options: Any) -> Estimator:
    """A row of the `rpg` loss, without clip by default; `sequence` subtracts the KL's leave-one-out baseline."""
    losses = library("rpg", divergence=divergence, **{"clip": "none"} | options)
    baseline = divergence if options.get("level") == "sequence" else None
    return Estimator(name, divergence.upper(), losses, DIVERGENCES[divergence].direction, baseline, present)


def each(name: str, **options: Any) -> tuple[Estimator, ...]:
    return tuple(rpg(name, divergence, **options) for divergence in ("rkl", "urkl", "fkl", "ufkl"))


def with_prefix_baseline(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
    """URKL per token with the baseline −β KL(π_θ‖π_ref) of the prefix (vOPD, arXiv:2605.07865)."""
    known = tokens.plus_advantages(kl_coef * jax.lax.stop_gradient(completions.prefix_kl(tokens).reverse))
    return library("rpg", divergence="urkl", clip="none")(known, kl_coef)


ONE: dict[str, Any] = {"level": "sequence", "weight": "none"}
WHOLE = "KL over the vocabulary"
TO_GO, STALE = "to-go, weight w", "sequence, stale log r (KL in the reward)"
LOG_VARIANCE = "sequence, weight 1, present baseline"
EXACT_TO_GO: dict[str, Any] = {"level": "to_go", "weight": "product", "trace_cap": float("inf")}
ESTIMATORS = (
    *each("per token"),
    *each("sequence, weight W", level="sequence", weight="product"),
    *each("sequence, weight w", level="sequence"),
    *each("sequence, weight 1", **ONE),
    rpg(LOG_VARIANCE, "urkl", present=True, **ONE),
    *each("to-go, exact", **EXACT_TO_GO),
    *(rpg(TO_GO, d, level="to_go") for d in ("urkl", "ufkl")),
    rpg(f"{TO_GO}, λ = ½", "urkl", level="to_go", trace_decay=0.5),
    rpg(f"{STALE}, weight w", "urkl", level="sequence", kl_ratio="behaviour"),
    rpg(f"{STALE}, weight W", "urkl", level="sequence", kl_ratio="behaviour", weight="product"),
    Estimator("per token (GRPO)", "k₃", library("grpo", **NO_CLIP), "reverse"),
    Estimator("per token (corrected GRPO)", "w·k₃", library("grpo", kl_weighting="importance", **NO_CLIP), "reverse"),
    Estimator("per token", "k₂", added(divergences.k2), "reverse"),
    Estimator("per token (Tunix)", "k₁", library("reinforce_pp", **NO_CLIP), "reverse"),
)
# RKL differs from URKL, and FKL from UFKL, in noise alone.
ENDS = tuple(
    e
    for e in ESTIMATORS
    if e.term not in ("RKL", "FKL", "w·k₃") and "½" not in e.name and (e.name, e.term) != (TO_GO, "UFKL")
)
# The sampled term beside its mean given the prefix. Summed over the vocabulary RKL is URKL, and FKL is UFKL.
VOCABULARY = (
    *each("per token"),
    Estimator("per token, baseline of the prefix (vOPD)", "URKL", with_prefix_baseline, "reverse"),
    *(rpg(f"per token, {WHOLE}", d, estimator="exact") for d in ("rkl", "fkl")),
    *each("to-go, exact", **EXACT_TO_GO),
    *(rpg(f"to-go, exact, {WHOLE}", d, estimator="exact", **EXACT_TO_GO) for d in ("rkl", "fkl")),
)


def prefix_kl(policy: jax.Array, reference: jax.Array) -> PrefixKL:
    """KL of two log-policies f[..., V] at each prefix, f[...]."""
    both = ((policy, reference), (reference, policy))
    return PrefixKL(*(jnp.sum(jnp.exp(of) * (of - to), axis=-1) for of, to in both))


def tokens_of(tree: Tree, prompt: Prompt, advantages: jax.Array) -> Tokens:
    """All completions of a prompt as a batch [N, T]; advantages f[N]."""
    policy = tree.along(prompt.policy)
    return checked(
        prefix_kl=prefix_kl(*map(tree.at_prefixes, (prompt.policy, prompt.reference))),
        logprobs=policy,
        behaviour_logprobs=tree.along(prompt.behaviour),
        ref_logprobs=tree.along(prompt.reference),
        advantages=advantages,
        mask=jnp.ones_like(policy),
        sampler_logprobs=tree.along(prompt.sampler),
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


class Moments(NamedTuple):
    """Mean f[S, V] and total variance f[] = tr Cov of a loss's gradient in the logits, over completions from π_s."""

    mean: jax.Array
    variance: jax.Array


def moments(estimator: Estimator, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0) -> Moments:
    """E_{π_s}[∇L] and tr Cov_{π_s}[∇L] of a completion. `rewarded` 0 takes A as 0: the KL term alone is left."""
    tokens = tokens_of(tree, prompt, expected_advantages(estimator, tree, prompt, kl_coef, rewarded))

    def visited(logits: jax.Array) -> tuple[jax.Array, PrefixKL]:
        policy = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(policy, tree.along(actions)[..., None], axis=-1)[..., 0]
        return chosen, prefix_kl(policy, tree.at_prefixes(prompt.reference))

    def loss(logprobs: jax.Array, kl: PrefixKL) -> jax.Array:
        return jnp.sum(estimator.losses(dataclasses.replace(tokens, logprobs=logprobs, prefix_kl=kl), kl_coef))

    actions = jnp.broadcast_to(jnp.arange(tree.actions), prompt.policy.shape)
    at_prefixes, to_table = jax.vjp(tree.at_prefixes, prompt.policy)
    numbers, to_logits = jax.vjp(visited, at_prefixes)
    [each] = to_logits(jax.grad(loss, argnums=(0, 1))(*numbers))  # f[N, T, V]: no completion passes a prefix twice
    sampled = jnp.exp(tree.completions(prompt.sampler))
    [mean] = to_table(sampled[:, None, None] * each)
    return Moments(mean, sampled @ jnp.sum(each**2, axis=(1, 2)) - jnp.sum(mean**2))


def objective(
    level: str, divergence: str | None, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0
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
    level: str, divergence: str | None, tree: Tree, prompt: Prompt, kl_coef: Scalar, *, rewarded: Scalar = 1.0
) -> jax.Array:
    """−∇J in the logits, f[S, V]."""

    def loss(logits: jax.Array) -> jax.Array:
        now = dataclasses.replace(prompt, policy=jax.nn.log_softmax(logits))
        return -objective(level, divergence, tree, now, kl_coef, rewarded=rewarded)

    return jax.grad(loss)(prompt.policy)
