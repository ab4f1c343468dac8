"""The losses that are compared, on completions of one token and of several."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from rpg_jax.losses import LOSSES, completions, divergences, token_loss
from rpg_jax.losses.divergences import DIVERGENCES
from rpg_jax.losses.methods import CLIP_HIGHER
from rpg_jax.losses.tokens import Tokens

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

# Completions of one token.
SURROGATE: dict[str, Any] = {"estimator": "differentiable", "clip": "none"}


def urkl(name: str, term: str, **options: Any) -> Estimator:
    return Estimator(f"RPG-URKL, {name}", term, library("rpg", divergence="urkl", **SURROGATE | options), "reverse")


def dapo(name: str, term: str, **options: Any) -> Estimator:
    return Estimator(name, term, library("ppo", **options, **CLIP_HIGHER), None)


# The penalty is computed when tokens are sampled and counts as reward.
IN_REWARD = library("rpg", divergence="urkl", clip="none", level="sequence", kl_ratio="behaviour")
CORRECTED = library("grpo", kl_weighting="importance", **NO_CLIP)
KL_TERMS = (
    Estimator("RPG-FKL", "−wA − βρ log π_θ", library("rpg", divergence="fkl", **SURROGATE), "forward"),
    Estimator("RPG-UFKL", "−wA + β(w − ρ log w)", library("rpg", divergence="ufkl", **SURROGATE), "forward"),
    Estimator("RPG-RKL", "−wA + βw log r", library("rpg", divergence="rkl", **SURROGATE), "reverse"),
    Estimator("RPG-URKL", "−wA + β(w log r − w)", library("rpg", divergence="urkl", **SURROGATE), "reverse"),
    Estimator("w·k₃ in the loss (corrected GRPO)", "−wA + βw·k₃", CORRECTED, "reverse"),
    Estimator("k₁ in the loss (Tunix)", "−wA + βk₁", added(divergences.k1), "reverse"),
    Estimator("k₂ in the loss", "−wA + βk₂", added(divergences.k2), "reverse"),
    Estimator("k₃ in the loss (GRPO)", "−wA + βk₃", added(divergences.k3), "reverse"),
    Estimator("k₁ in the reward", "−w(A − β log(π_old/π_ref))", IN_REWARD, "reverse"),
)

CLIPS = (
    urkl("no clip", "−wA + β(w log r − w)"),
    urkl("clip dual", "Algorithm 2", clip="dual"),
    urkl("clip truncate", "eq. 4.1", clip="truncate"),
    urkl("clip reward", "dual clip of −wA alone", clip="reward"),
    urkl("clip dual, form verl", "public code", clip="dual", form="verl"),
    Estimator("GRPO", "PPO clip + βk₃", library("grpo"), "reverse"),
    Estimator("REINFORCE++", "PPO clip + βk₁", library("reinforce_pp"), "reverse"),
    dapo("DAPO", "PPO clip, no KL"),
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

TRUNCATED: dict[str, Any] = {"sampler_correction": "truncate"}
REJECTED: dict[str, Any] = {"sampler_correction": "geometric", "sampler_low": 0.5, "sampler_high": 2.0}
SAMPLERS = (
    urkl("clip dual", "π_old recomputed by the trainer", clip="dual"),
    *(
        urkl(f"clip dual, TIS {high}", f"times min(π_old/π_s, {high})", clip="dual", **TRUNCATED, sampler_high=high)
        for high in (1.2, 2.0)
    ),
    dapo("DAPO", "PPO clip, no KL"),
    dapo("DAPO, TIS 2.0", "times min(π_old/π_s, 2.0)", **TRUNCATED),
    dapo("DAPO, IcePop 0.5 to 5", "times π_old/π_s, or 0 beyond the bounds", sampler_correction="mask"),
    dapo("DAPO, rejection 0.5 to 2", "times 1, or 0 where π_old/π_s is beyond the bounds", **REJECTED),
    dapo("DAPO, anchored", "π_s in place of π_old", sampler_correction="anchor"),
)
