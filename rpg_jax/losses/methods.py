"""The methods of the paper's tables: everything besides the model and the data that makes a row.

`policy_loss(method.loss, aggregate=method.aggregate, **method.hyperparameters, …)` with the advantages
`advantages(method.advantage, rewards, …)`; aggregate `constant` (Dr. GRPO) takes `constant_length` too, the completion
budget in tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from rpg_jax.losses.hyperparameters import lookup

Reference = Literal["behaviour", "fixed", "every", "kl"]


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the paper's tables.

    Attributes:
      loss: name for `policy_loss`.
      advantage: name for `advantages`; "gae" needs a critic.
      aggregate: name for `aggregate`.
      reference: the KL anchor. `behaviour`: the policy that sampled the step (costs nothing); `fixed`: the initial
        policy; `every`: a snapshot refreshed every K updates; `kl`: refreshed when the running token KL passes κ.
      dynamic_sampling: draw prompts until enough have rewards that are not all equal within their group.
      overlong_shaping: subtract from the reward of completions close to the length limit.
      hyperparameters: keyword arguments of the loss.
      source: where the row and its values are from.
    """

    loss: str
    advantage: str
    aggregate: str
    reference: Reference
    dynamic_sampling: bool
    overlong_shaping: bool
    source: str
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))


# The recipes of RPG, DAPO and REINFORCE++ share this range; GRPO's is symmetric (arXiv:2505.17508 section 5).
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}
SYMMETRIC_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 10.0}


def regularized(divergence: str, estimator: str, *, source: str, **changed: float | str | None) -> Method:
    """A row of RPG: group-mean advantages, token mean, RPG-style clip, β = 1e-4, DAPO's sampling and shaping.

    Args:
      divergence: name in `divergences.DIVERGENCES`.
      estimator: `differentiable` or `reinforce`.
      source: where the row is from; printed in docs/methods.md.
      changed: other hyperparameters of `rpg`, or other values, e.g. kl_coef=0.1.
    """
    hyperparameters = {"divergence": divergence, "estimator": estimator, "clip": "dual", "kl_coef": 1e-4, **CLIP_HIGHER}
    return Method(
        loss="rpg",
        advantage="group_mean",
        aggregate="token_mean",
        reference="every",
        dynamic_sampling=True,
        overlong_shaping=True,
        hyperparameters=MappingProxyType(hyperparameters | changed),
        source=source,
    )


def baseline(
    loss: str,
    advantage: str,
    hyperparameters: Mapping[str, Any],
    source: str,
    *,
    aggregate: str = "token_mean",
    reference: Reference = "behaviour",
    dapo_batches: bool = False,
) -> Method:
    """A row that RPG is compared with; `dapo_batches` switches dynamic sampling and overlong shaping on together."""
    return Method(
        loss, advantage, aggregate, reference, dapo_batches, dapo_batches, source, MappingProxyType(hyperparameters)
    )


REGULARIZED = {
    f"{prefix}-{divergence.upper()}": regularized(
        divergence, estimator, source=f"arXiv:2505.17508 sections 4 and 5, {algorithm}"
    )
    for prefix, estimator, algorithm in (
        ("RPG", "differentiable", "Algorithm 1 with the gradient stopped through A_reg"),
        ("RPG-REINFORCE", "reinforce", "Algorithm 2"),
    )
    for divergence in ("fkl", "ufkl", "rkl", "urkl")
}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "GRPO": baseline(
            "grpo",
            "group_standardised",
            {"kl_coef": 1e-3, **SYMMETRIC_CLIP},
            "arXiv:2402.03300; ε and β of the recipe of arXiv:2505.17508, no dynamic sampling, no shaping",
            aggregate="sequence_mean_token_mean",
            reference="fixed",
        ),
        "DAPO": baseline("ppo", "group_standardised", CLIP_HIGHER, "arXiv:2503.14476", dapo_batches=True),
        "REINFORCE++": baseline(
            "reinforce_pp",
            "whitened_returns",
            {"kl_coef": 1e-4, **CLIP_HIGHER},
            "arXiv:2501.03262; β of arXiv:2505.17508",
            reference="fixed",
        ),
        "REINFORCE++-Baseline": baseline(
            "reinforce_pp",
            "whitened_group_mean",
            {"kl_coef": 1e-4, **CLIP_HIGHER},
            "arXiv:2501.03262; β of arXiv:2505.17508",
            reference="fixed",
        ),
        **REGULARIZED,
        "PPO": baseline(
            "ppo", "gae", SYMMETRIC_CLIP, "arXiv:1707.06347, with the dual clip of arXiv:1912.09729; a learned baseline"
        ),
        "RLOO": baseline(
            "ppo", "leave_one_out", SYMMETRIC_CLIP, "arXiv:2402.14740, with PPO's clip since batches are reused"
        ),
        "Dr.GRPO": baseline("ppo", "group_mean", SYMMETRIC_CLIP, "arXiv:2503.20783", aggregate="constant"),
        "GSPO": baseline(
            "gspo",
            "group_standardised",
            {"clip_low": 3e-4, "clip_high": 4e-4},
            "arXiv:2507.18071",
            aggregate="sequence_mean_token_mean",
        ),
        "CISPO": baseline("cispo", "group_standardised", {"clip_high": 0.28}, "arXiv:2506.13585"),
    }
)


def get_method(name: str) -> Method:
    """The method of a name.

    Raises:
      ValueError: an unknown name; the message lists the known ones and the closest.
    """
    return lookup(METHODS, "method", name)
