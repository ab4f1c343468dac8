"""Writes called.json: what the functions of TRL, verl, OpenRLHF and Tunix return for the same numbers.

python -m venv peers; peers/bin/pip install torch trl google-tunix ray peft tensordict codetiming orjson
peers/bin/pip install --no-deps verl openrlhf
peers/bin/python tests/external/call_libraries.py

The functions are those of the installed packages. A stand-in replaces only the model, which gives them log-probs.
Packages that OpenRLHF imports for other purposes (deepspeed, flash_attn) may be missing.
"""

import importlib.metadata
import importlib.util
import inspect
import json
import math
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from tunix.rl import algo_core, common
from verl.trainer.config import algorithm  # noqa: F401  (verl's config classes import each other)
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig, PolicyLossConfig

LENGTHS = [6, 5, 6, 3, 6, 1, 4, 6]
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}


def inputs() -> dict[str, np.ndarray]:
    """Two groups of four completions of at most six tokens; ratios to the behaviour policy from e⁻² to e³."""
    rng = np.random.default_rng(0)
    mask = (np.arange(6) < np.array(LENGTHS)[:, None]).astype(np.float64)
    logprobs = -rng.exponential(1.5, mask.shape) - 0.05
    behaviour = np.minimum(logprobs + rng.normal(0, 0.3, mask.shape), -0.02)
    behaviour[0, 1], behaviour[2, 3], behaviour[4, 0] = logprobs[0, 1] - 3, logprobs[2, 3] - 2.5, logprobs[4, 0] - 1
    logprobs[6, 2] = behaviour[6, 2] - 2
    ref = np.minimum(logprobs + rng.normal(0, 0.8, mask.shape), -0.02)
    rewards = np.array([1.0, 0, 0, 0.5, 1, 1, 0, 0.25])
    centred = (rewards.reshape(2, 4) - rewards.reshape(2, 4).mean(1, keepdims=True)).reshape(-1, 1)
    return {
        "logprobs": logprobs,
        "behaviour_logprobs": behaviour,
        "ref_logprobs": ref,
        "advantages": np.broadcast_to(centred, mask.shape),
        "mask": mask,
        "rewards": rewards.reshape(2, 4),
    }


INPUTS = inputs()
Case = dict[str, Any]
CASES: list[Case] = []


def origin(library: str, function: Callable) -> Case:
    """The library and the name of a function, and the file and the line of its definition."""
    defined = inspect.unwrap(function)
    file = Path(inspect.getsourcefile(defined)).as_posix().partition("site-packages/")[2]
    line = inspect.getsourcelines(defined)[1]
    return {"library": library, "function": function.__qualname__, "where": f"{file}:{line}"}


def add(library: str, function: Callable, ours: Case, value: float | None, gradient: Any, **more: Any) -> None:
    gradient = np.asarray(gradient, np.float64).round(12).tolist()
    CASES.append({**origin(library, function), "ours": ours, "value": value, "gradient": gradient, **more})


def torch_gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, np.ndarray]:
    logprobs = torch.tensor(INPUTS["logprobs"], requires_grad=True)
    value = loss(logprobs)
    value.backward()
    return value.item(), logprobs.grad.numpy()


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name])


def of_verl() -> None:
    def case(function, ours, mode="token-mean", value=True, more=None, **config):
        def loss(logprobs):
            actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **config)
            given = tensor("behaviour_logprobs"), logprobs, tensor("advantages"), tensor("mask")
            return function(*given, loss_agg_mode=mode, config=actor)[0]

        found, gradient = torch_gradient(loss)
        add("verl", function, ours | {"aggregate": AGGREGATES[mode]}, found if value else None, gradient, **more or {})

    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    for mode in AGGREGATES:
        dual = {"name": "ppo", **CLIP, "clip_dual": 3.0}
        case(verl.compute_policy_loss_vanilla, dual, mode, clip_ratio_c=3.0, **clips)
    by_sequence = "seq-mean-token-mean"
    gspo = {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15}
    case(verl.compute_policy_loss_gspo, gspo, by_sequence, clip_ratio_low=0.1, clip_ratio_high=0.15)
    case(verl.compute_policy_loss_sapo, {"name": "sapo"}, by_sequence, policy_loss=PolicyLossConfig())
    geometric = {"name": "gmpo", "clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    case(verl.compute_policy_loss_geo_mean, geometric, by_sequence, clip_ratio_low=0.4, clip_ratio_high=0.4)
    case(
        verl.compute_policy_loss_cispo,
        {"name": "cispo", "clip_low": 0.2, "clip_high": 0.5},
        **clips | {"clip_ratio_high": 0.5},
    )
    squared = {"name": "opmd", "kl_coef": 0.2, "penalty_level": "token"}
    dro = PolicyLossConfig(dro_beta=0.2)
    case(verl.compute_policy_loss_dro, squared, policy_loss=dro, more={"without_reference": True})
    tv = {"name": "dppo", "mask_divergence": "tv", "mask_threshold": 0.05}
    # verl's value is −w̄ A log π_θ with w̄ constant: of the same gradient, and another number
    thresholds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    case(verl.compute_policy_loss_dppo_tv, tv, value=False, clip_ratio_c=1e9, **thresholds)
    kl = {"name": "dppo", "mask_divergence": "kl", "mask_threshold": 0.02}
    thresholds = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02}
    case(verl.compute_policy_loss_dppo_kl, kl, value=False, clip_ratio_c=1e9, **thresholds)
    for kind, ours in {
        "k1": {"name": "reinforce_pp", "kl_coef": 1.0},
        "k3": {"name": "grpo", "kl_coef": 1.0, "kl_clamp": 10.0},
    }.items():

        def penalty(logprobs, kind=kind):
            return verl.agg_loss(verl.kl_penalty(logprobs, tensor("ref_logprobs"), kind), tensor("mask"), "token-mean")

        value, gradient = torch_gradient(penalty)
        add("verl", verl.kl_penalty, ours | {"aggregate": "token_mean"}, value, gradient, kl_only=True)


def trl_loss(
    logprobs: torch.Tensor,
    given: dict[str, torch.Tensor],
    loss_type: str,
    level: str = "token",
    beta: float = 0.0,
    corrected: bool = False,
    low: float = 0.2,
    high: float = 0.28,
    delta: float | None = None,
) -> torch.Tensor:
    """The loss of TRL's trainer, in which a stand-in for the model gives the log-probs."""
    args = SimpleNamespace(
        use_bias_correction_kl=corrected,
        delta=delta,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.25,  # exact in float32, to which torch.where rounds it
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=args,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=6,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=accelerator,
    )
    ids = torch.zeros(given["mask"].shape, dtype=torch.long)
    batch = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids}
    batch |= {"completion_mask": given["mask"], "advantages": given["advantages"][:, 0]}
    batch |= {"old_per_token_logps": given["behaviour_logprobs"], "ref_per_token_logps": given["ref_logprobs"]}
    return GRPOTrainer._compute_loss(trainer, None, batch | {"num_items_in_batch": given["mask"].sum()})


def of_trl() -> None:
    def case(ours, loss_type, **options):
        given = {name: tensor(name) for name in INPUTS}
        value, gradient = torch_gradient(lambda logprobs: trl_loss(logprobs, given, loss_type, **options))
        add("trl", GRPOTrainer._compute_loss, ours, value, gradient, loss_type=loss_type)

    ppo = {"name": "ppo", **CLIP, "clip_dual": None}
    case(ppo | {"aggregate": "sequence_mean_token_mean"}, "grpo")
    case(ppo | {"aggregate": "token_mean"}, "dapo")
    case(ppo | {"aggregate": "constant", "constant_length": 6.0}, "dr_grpo")
    grpo = {"name": "grpo", **CLIP, "clip_dual": None, "kl_coef": 0.3, "aggregate": "sequence_mean_token_mean"}
    case(grpo, "grpo", beta=0.3)
    case(grpo | {"kl_weighting": "importance"}, "grpo", beta=0.3, corrected=True)
    case({"name": "sapo", "tau_negative": 1.25, "aggregate": "sequence_mean_token_mean"}, "sapo")
    case({"name": "cispo", "clip_high": 0.5, "aggregate": "token_mean"}, "cispo", high=1.5)
    gspo = {"name": "gspo", **CLIP, "aggregate": "sequence_mean_token_mean"}
    case(gspo, "grpo", level="sequence")


def openrlhf_modules() -> tuple[Any, Any]:
    """OpenRLHF's `models.utils` and `models.loss`."""
    for name in ("deepspeed", "flash_attn"):
        sys.modules.setdefault(name, types.ModuleType(name))
    folder = Path(importlib.util.find_spec("openrlhf").origin).parent / "models"
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(folder)]
    sys.modules["openrlhf.models"] = package  # its own __init__ imports every model
    return importlib.import_module("openrlhf.models.utils"), importlib.import_module("openrlhf.models.loss")


def of_openrlhf() -> None:
    utils, losses = openrlhf_modules()

    def policy(ours, **options):
        made = losses.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, **options)
        given = tensor("behaviour_logprobs"), tensor("advantages"), tensor("mask")
        value, gradient = torch_gradient(lambda logprobs: made(logprobs, *given)[0])
        add("openrlhf", losses.PolicyLoss.forward, ours, value, gradient)

    policy({"name": "ppo", **CLIP, "clip_dual": None, "aggregate": "token_mean"})
    policy({"name": "ppo", **CLIP, "clip_dual": 3.0, "aggregate": "token_mean"}, dual_clip=3.0)
    policy({"name": "gspo", **CLIP, "aggregate": "sequence_mean_token_mean"}, policy_loss_type="gspo")

    def penalty(ours, **options):
        def loss(logprobs):
            found = utils.compute_approx_kl(logprobs, tensor("ref_logprobs"), **options)
            return losses.aggregate_loss(found.double(), tensor("mask"))

        value, gradient = torch_gradient(loss)
        unbiased = options.get("unbiased_gradient")
        bound = {"weight_bound": utils.KL_IS_WEIGHT_CLIP} if unbiased else {}
        add("openrlhf", utils.compute_approx_kl, ours, None if unbiased else value, gradient, kl_only=True, **bound)

    penalty({"name": "reinforce_pp", "kl_coef": 1.0, "aggregate": "token_mean"}, kl_estimator="k1")
    penalty({"name": "grpo", "kl_coef": 1.0, "kl_clamp": 10.0, "aggregate": "token_mean"}, kl_estimator="k3")
    # min(w, 10) log r behind a stop: below the bound, the gradient of the unnormalised reverse KL at every sample
    penalty(
        {"name": "rpg", "divergence": "urkl", "clip": "none", "kl_coef": 1.0, "aggregate": "token_mean"},
        kl_estimator="k3",
        unbiased_gradient=True,
        log_probs_old=tensor("behaviour_logprobs"),
    )


def tunix_loss(logprobs: jax.Array, given: dict[str, jax.Array], mode: str, beta: float, **options: Any) -> jax.Array:
    """Tunix' GRPO loss, in which a stand-in for the model gives the log-probs; `options` are fields of its config."""
    fields = {"epsilon": 0.2, "epsilon_high": 0.28, "epsilon_c": None, "loss_algo": "grpo", "temperature": 1.0}
    fields |= {"beta": beta, "loss_agg_mode": mode, "kl_loss_mode": "kl", "kl_clamp_value": None}
    ids = jnp.zeros(given["mask"].shape, jnp.int32)
    example = SimpleNamespace(
        prompt_ids=ids,
        completion_ids=ids,
        completion_mask=given["mask"],
        advantages=given["advantages"][:, 0],
        old_per_token_logps=given["behaviour_logprobs"],
        ref_per_token_logps=given["ref_logprobs"],
    )
    common.compute_per_token_logps = lambda *_, **__: (logprobs, jnp.zeros((*logprobs.shape, 2)))
    algo_core.nnx = SimpleNamespace(split=lambda model: (None, None))
    return inspect.unwrap(algo_core.grpo_loss_fn)(None, example, SimpleNamespace(**fields | options), 0, 0)[0]


def of_tunix() -> None:
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in INPUTS.items()}

    def case(ours, mode, beta, method="kl", epsilon_c=None):
        options = {"kl_loss_mode": method, "epsilon_c": epsilon_c}
        value, gradient = jax.value_and_grad(tunix_loss)(arrays["logprobs"], arrays, mode, beta, **options)
        add("google-tunix", algo_core.grpo_loss_fn, ours, float(value), gradient)

    grpo = {"name": "grpo", **CLIP, "clip_dual": None, "kl_coef": 0.3}
    case({**grpo, "aggregate": "sequence_mean_token_mean"}, "sequence-mean-token-mean", 0.3, "low_var_kl")
    case({**grpo, "aggregate": "token_mean"}, "token-mean", 0.3, "low_var_kl")
    k1 = {"name": "reinforce_pp", **CLIP, "clip_dual": None, "kl_coef": 0.3, "aggregate": "token_mean"}
    case(k1, "token-mean", 0.3, "kl")
    case({"name": "ppo", **CLIP, "clip_dual": 3.0, "aggregate": "token_mean"}, "token-mean", 0.0, epsilon_c=3.0)


def advantages() -> list[Case]:
    """The advantages of both groups of four completions, each from its reward."""
    rewards, groups = INPUTS["rewards"], np.repeat([0, 1], 4)
    found: list[Case] = []

    def note(library, function, ours, values):
        values = np.asarray(values, np.float64).reshape(2, 4).round(12).tolist()
        found.append({**origin(library, function), "ours": ours, "values": values})

    mask = tensor("mask")
    scores = torch.zeros_like(mask)
    scores[torch.arange(8), torch.tensor(LENGTHS) - 1] = torch.tensor(rewards.reshape(-1))

    def of_verl(function, ours, **options):
        values = function(scores, mask, index=groups, **options)[0]
        note("verl", function, ours, values[:, 0])

    of_verl(verl.compute_grpo_outcome_advantage, "group_standardised", norm_adv_by_std_in_grpo=True)
    of_verl(verl.compute_grpo_outcome_advantage, "group_mean", norm_adv_by_std_in_grpo=False)
    of_verl(verl.compute_rloo_outcome_advantage, "leave_one_out")
    of_verl(verl.compute_reinforce_plus_plus_baseline_outcome_advantage, "whitened_group_mean")
    flat = rewards.reshape(-1)
    note("google-tunix", algo_core.compute_advantages, "group_standardised", algo_core.compute_advantages(flat, 4))
    note("google-tunix", algo_core.compute_rloo_advantages, "leave_one_out", algo_core.compute_rloo_advantages(flat, 4))
    drgrpo = algo_core.compute_drgrpo_advantages
    note("google-tunix", drgrpo, "group_mean", drgrpo(flat, 4))
    return found


def main() -> None:
    of_verl()
    of_trl()
    of_openrlhf()
    of_tunix()
    packages = ("verl", "trl", "openrlhf", "google-tunix", "torch")
    written = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "inputs": {name: np.asarray(x).round(12).tolist() for name, x in INPUTS.items()},
        "called_losses": CASES,
        "called_advantages": advantages(),
    }
    Path(__file__).with_name("called.json").write_text(json.dumps(written) + "\n", encoding="utf-8")
    print(f"{len(CASES)} losses and {len(written['called_advantages'])} advantages of {written['versions']}")


if __name__ == "__main__":
    main()
