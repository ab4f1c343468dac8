"""The methods, of the paper's tables and others. A row holds all choices but the model and the data.

A row's loss is `policy_loss(method.loss, aggregate=method.aggregate, **method.hyperparameters, …)` on the advantages
`advantages(method.advantage, rewards, …)`. Aggregate `constant` (Dr. GRPO) also takes `constant_length`, the completion
budget in tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rpg_jax.losses.baselines import cispo, grpo, gspo, ppo, reinforce_pp
from rpg_jax.losses.comparators import GMPO_HIGH, GMPO_LOW, ctpo, dppo, drpo, gmpo, opmd, sapo
from rpg_jax.losses.declaration import LOSSES, TokenLoss, lookup
from rpg_jax.losses.regularized_pg import rpg


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of `METHODS`.

    Attributes:
      loss: name in `LOSSES`.
      advantage: name in `ADVANTAGES`, or in `LEARNED_ADVANTAGES`, which need a critic.
      aggregate: name in `AGGREGATES`.
      reference: the KL anchor, a name in `training.reference.RULES`.
      dynamic_sampling: draw prompts until enough groups have rewards that are not all equal.
      overlong_shaping: subtract from the reward of completions close to the length limit.
      learning_rate: of the policy, for pretrained models.
      source: the origin of the row and its values; docs/methods.md prints it.
      hyperparameters: keyword arguments of the loss by name; other arguments have the loss's defaults.
    """

    loss: str
    advantage: str
    aggregate: str
    reference: str
    dynamic_sampling: bool
    overlong_shaping: bool
    learning_rate: float
    source: str
    hyperparameters: Mapping[str, Any]


# The recipes of RPG, DAPO and REINFORCE++ share this range; GRPO's is symmetric (arXiv:2505.17508 section 5). Public
# recipes of arXiv:2505.17508 are those of complex-reasoning/RPG at ec8e30b, recipe/rpg/7b.
CLIP_HIGHER: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}
SYMMETRIC_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 10.0}


def row(
    loss: Callable[..., TokenLoss],
    advantage: str,
    source: str,
    *,
    aggregate: str | None = None,
    reference: str = "behaviour",
    dapo_batches: bool = False,
    learning_rate: float = 1e-6,
    **hyperparameters: Any,
) -> Method:
    """A method whose loss is the function `loss`, of a row of `LOSSES`; `hyperparameters` are arguments of this
    function. If `aggregate` is None, the method has the aggregate that the loss declares. `dapo_batches` switches
    dynamic sampling and overlong shaping on. The other arguments are attributes of `Method`."""
    name = loss.__name__
    aggregate = aggregate or LOSSES[name].aggregate
    options = MappingProxyType(hyperparameters)
    return Method(name, advantage, aggregate, reference, dapo_batches, dapo_batches, learning_rate, source, options)


def regularized(divergence: str, estimator: str, *, source: str, **changed: Any) -> Method:
    """A row of RPG: group-mean advantages, token mean, reference `every`, clip `dual` with `CLIP_HIGHER`, β = 1e-4,
    DAPO's sampling and shaping. `estimator` is "differentiable" or "reinforce", and sets the learning rate. `changed`
    replaces hyperparameters of `rpg` in this recipe, for example kl_coef=0.1, or the `learning_rate`."""
    recipe: dict[str, Any] = {"divergence": divergence, "estimator": estimator, "clip": "dual", "kl_coef": 1e-4}
    recipe["learning_rate"] = {"differentiable": 1e-6, "reinforce": 5e-7}[estimator]
    return row(rpg, "group_mean", source, reference="every", dapo_batches=True, **recipe | CLIP_HIGHER | changed)


REGULARIZED = {
    f"{prefix}-{divergence.upper()}": regularized(divergence, estimator, source=f"arXiv:2505.17508 {source}", clip=clip)
    for prefix, estimator, clip, source in (
        ("RPG", "differentiable", "reward", "Tables 1 and 4; clip of the public recipes"),
        ("RPG-REINFORCE", "reinforce", "dual", "sections 4 and 5, Algorithm 2"),
    )
    for divergence in ("fkl", "ufkl", "rkl", "urkl")
}
# The public recipe of DPPO: verl-project/verl pull request 5397, examples/dppo_trainer.
DPPO: dict[str, Any] = {"aggregate": "constant", "sampler_correction": "anchor"}
REINFORCE_PP: dict[str, Any] = {
    "source": "public recipes of arXiv:2505.17508; arXiv:2501.03262 has k₁ in the reward, not in the loss",
    "reference": "every",
    "dapo_batches": True,
    "kl_coef": 1e-4,
    **CLIP_HIGHER,
}
GRPO: dict[str, Any] = {"reference": "fixed", "kl_coef": 1e-3, **SYMMETRIC_CLIP}


def of_completions(divergence: str, source: str, **hyperparameters: float | str) -> Method:
    """A row of RPG for completions: leave-one-out advantages, a fixed reference, completions count by their token sums.

    `hyperparameters` of `rpg` replace values of the recipe; `source` is the paper or page of the method. Dynamic
    sampling is off: it would drop groups with equal rewards, and the KL of these groups too. `COMPLETIONS` has no row
    of an unnormalized divergence, because the baseline removes the mass term.
    """
    recipe: dict[str, Any] = {"estimator": "reinforce", "level": "sequence", "clip": "dual", "kl_coef": 0.1}
    return row(
        rpg,
        "leave_one_out",
        source,
        aggregate="sequence_mean_token_sum",
        reference="fixed",
        divergence=divergence,
        **CLIP_HIGHER | recipe | hyperparameters,
    )


COMPLETIONS = {
    f"RPG-SEQ-{divergence.upper()}": of_completions(divergence, "ours: arXiv:2505.17508 with x a completion")
    for divergence in ("fkl", "rkl")
} | {
    "KL-in-reward": of_completions(
        "urkl", "KL in the reward with a leave-one-out baseline, arXiv:2402.14740", kl_ratio="behaviour"
    ),
    "Log-variance": of_completions(
        "urkl",
        "VarGrad, arXiv:2010.10436, on the regularized return; its baseline has π_old's log-ratios",
        weight="none",
        clip="none",
    ),
}


def distilled(source: str, **hyperparameters: float | str) -> Method:
    """A row of on-policy distillation: the KL to a teacher with β = 1, without a clip, beside the rewards.
    `hyperparameters` of `rpg` replace values of the recipe; with `level` among them the row is for completions. A run
    switches the rewards off by `rewards.parts=exact:0`."""
    recipe: dict[str, Any] = {"divergence": "rkl", "estimator": "reinforce", "clip": "none", "kl_coef": 1.0}
    completions = "level" in hyperparameters
    return row(
        rpg,
        "leave_one_out" if completions else "group_mean",
        source,
        aggregate="sequence_mean_token_sum" if completions else "token_mean",
        reference="teacher",
        **recipe | hyperparameters,
    )


DISTILLATION = {
    "OPD": distilled("on-policy distillation of single tokens, as public systems have it", divergence="urkl"),
    "OPD-EXACT": distilled(
        "the same, summed over the vocabulary: arXiv:2306.13649, arXiv:2504.10637", estimator="exact"
    ),
    "OPD-FKL": distilled("forward KL on the student's samples, arXiv:2306.13649", divergence="fkl", estimator="exact"),
    "OPD-TO-GO": distilled("ours: the KL of completions by the chain rule", level="to_go"),
    "OPD-SEQ": distilled("ours: the KL of completions", level="sequence"),
}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "GRPO": row(
            grpo,
            "group_standardised",
            "arXiv:2402.03300; public recipes of arXiv:2505.17508",
            aggregate="token_mean",
            kl_clamp=10.0,
            **GRPO,
        ),
        "GRPO-DeepSeekMath": row(grpo, "group_standardised", "arXiv:2402.03300 eq. 3 and 4; ε and β of GRPO", **GRPO),
        "DAPO": row(ppo, "group_standardised", "arXiv:2503.14476", dapo_batches=True, **CLIP_HIGHER),
        "REINFORCE++": row(reinforce_pp, "whitened_returns", **REINFORCE_PP),
        "REINFORCE++-Baseline": row(reinforce_pp, "whitened_group_mean", **REINFORCE_PP),
        **REGULARIZED,
        "PPO": row(
            ppo, "gae", "arXiv:1707.06347, with the dual clip of arXiv:1912.09729; a learned baseline", **SYMMETRIC_CLIP
        ),
        "RLOO": row(
            ppo, "leave_one_out", "arXiv:2402.14740, with PPO's clip since batches are reused", **SYMMETRIC_CLIP
        ),
        "Dr.GRPO": row(ppo, "group_mean", "arXiv:2503.20783", aggregate="constant", **SYMMETRIC_CLIP),
        "GSPO": row(gspo, "group_standardised", "arXiv:2507.18071", clip_low=3e-4, clip_high=4e-4),
        "CISPO": row(
            cispo, "group_standardised", "arXiv:2506.13585, which gives no ε₂; that of Trinity-RFT", clip_high=0.28
        ),
        "CTPO": row(
            ctpo,
            "group_standardised",
            "arXiv:2605.07331 and its code",
            width_low=0.025,
            width_high=0.05,
            width_dual=0.05,
        ),
        **{
            f"DPPO-{divergence.upper()}": row(
                dppo,
                "group_mean",
                "arXiv:2602.04879; δ of verl, not its cap of w",
                mask_divergence=divergence,
                mask_threshold=threshold,
                **DPPO,
            )
            for divergence, threshold in (("tv", 0.15), ("kl", 0.05))
        },
        "DRPO": row(drpo, "group_mean", "arXiv:2606.09821; its δ was not read: DPPO's", trust_region=0.15, **DPPO),
        "SAPO": row(sapo, "group_standardised", "arXiv:2511.20347", tau_positive=1.0, tau_negative=1.05),
        "GMPO": row(gmpo, "group_standardised", "arXiv:2507.20673", clip_low=GMPO_LOW, clip_high=GMPO_HIGH),
        "MaxRL": row(ppo, "maxrl", "arXiv:2602.02710, with PPO's clip since batches are reused", **SYMMETRIC_CLIP),
        "GDPO": row(
            ppo,
            "gdpo",
            "arXiv:2601.05242, for rewards of several parts",
            aggregate="sequence_mean_token_mean",
            **SYMMETRIC_CLIP,
        ),
        "OPMD": row(opmd, "group_mean", "arXiv:2501.12599 section 2.3.2; it gives no β", kl_coef=0.1),
        **COMPLETIONS,
        **DISTILLATION,
    }
)


def get_method(name: str) -> Method:
    """The method `name`. Raises ValueError for an unknown name, with the known names and the closest one."""
    return lookup(METHODS, "method", name)
