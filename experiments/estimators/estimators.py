"""The estimators that the laboratory compares on completions of one token."""

from typing import Any

from experiments.completions.estimators import NO_CLIP, Estimator, Losses, added, library
from rpg_jax.losses import divergences
from rpg_jax.losses.methods import CLIP_HIGHER


def rpg(divergence: str, **options: Any) -> Losses:
    return library("rpg", divergence=divergence, **{"estimator": "differentiable", "clip": "none"} | options)


# The penalty is computed when tokens are sampled and counts as reward.
IN_REWARD = rpg("urkl", estimator="reinforce", level="sequence", kl_ratio="behaviour")
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
    Estimator("k₁ in the reward", "−w(A − β log(π_old/π_ref))", IN_REWARD, "reverse"),
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
