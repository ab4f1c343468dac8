"""Writes trained.json: where runs of docs/objective.md end when their loss is another library's own function.

In the environment of `call_libraries.py`, from the repository's root:
PYTHONPATH=. peers/bin/python tests/external/train_libraries.py

Each run is that of `experiments.objective` with β = 0.1, 8 updates a batch and the mean over tokens. The library's
function gets the log-probs of an update as an array, and its framework computes the gradient with respect to them.
Beside it stands the run of the same seed with this project's loss. Rounding makes two runs drift apart, so the runs
after `EARLY` updates are compared as well, and `twin` is this project's loss times 1 + 2e-7.
"""

import dataclasses
import functools
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import call_libraries as libraries
import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments import kept
from experiments.estimators.estimators import NO_CLIP as OURS_NO_CLIP
from experiments.estimators.estimators import Estimator, Losses, Scalar, library
from experiments.objective import runs as objective
from experiments.objective.design import GRPO, K1, ROWS, TOKEN, ObjectiveSettings
from experiments.objective.paths import make_task
from experiments.objective.runs import best_rates
from experiments.objective.training import Lane, judge, train
from rpg_jax.losses.tokens import Tokens

BETA, UPDATES_A_BATCH, EARLY = 0.1, 8, 48
NO_CLIP = {"low": 1 - 1e-9, "high": 1e9}
OPENRLHF_UTILS, OPENRLHF_LOSSES = libraries.openrlhf_modules()
Arrays = dict[str, Any]
Loss = Callable[[Any, Arrays], Any]  # (log-probs, other arrays) -> the mean over tokens


def verl_loss(kind: str) -> Loss:
    """As verl's actor adds them: the policy loss and β times the penalty."""
    ratios = {"clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
    config = libraries.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **ratios)

    def loss(logprobs: torch.Tensor, given: Arrays) -> torch.Tensor:
        of, verl = (given["behaviour_logprobs"], logprobs, given["advantages"], given["mask"]), libraries.verl
        policy = verl.compute_policy_loss_vanilla(*of, loss_agg_mode="token-mean", config=config)[0]
        penalty = verl.kl_penalty(logprobs, given["ref_logprobs"], kind)
        return policy + BETA * verl.agg_loss(penalty, given["mask"], "token-mean")

    return loss


def openrlhf_loss(logprobs: torch.Tensor, given: Arrays) -> torch.Tensor:
    """OpenRLHF's policy loss and β times its KL term with the unbiased gradient."""
    made = OPENRLHF_LOSSES.PolicyLoss(clip_eps_low=NO_CLIP["low"], clip_eps_high=NO_CLIP["high"])
    old, mask = given["behaviour_logprobs"], given["mask"]
    options = {"kl_estimator": "k3", "unbiased_gradient": True, "log_probs_old": old}
    kl = OPENRLHF_UTILS.compute_approx_kl(logprobs, given["ref_logprobs"], **options)
    return made(logprobs, old, given["advantages"], mask)[0] + BETA * OPENRLHF_LOSSES.aggregate_loss(kl, mask)


def tunix_loss(kind: str) -> Loss:
    options = {"kl_loss_mode": kind, "epsilon": NO_CLIP["low"], "epsilon_high": NO_CLIP["high"]}
    return lambda logprobs, given: libraries.tunix_loss(logprobs, given, "token-mean", BETA, **options)


def trl_loss(**options: Any) -> Loss:
    return functools.partial(libraries.trl_loss, loss_type="dapo", beta=BETA, **NO_CLIP, **options)


@dataclasses.dataclass(frozen=True)
class Called:
    """A library's functions, and the row of `experiments.objective` with the same loss; `ours` replaces its loss."""

    library: str
    functions: Sequence[Callable]
    term: str
    row: str
    loss: Loss
    ours: Losses | None = None


TRL, TUNIX = (libraries.GRPOTrainer._compute_loss,), (libraries.algo_core.grpo_loss_fn,)
VERL = (libraries.verl.compute_policy_loss_vanilla, libraries.verl.kl_penalty)
OPENRLHF = (OPENRLHF_LOSSES.PolicyLoss.forward, OPENRLHF_UTILS.compute_approx_kl)
CALLED = (
    Called("trl", TRL, "k₃", GRPO, trl_loss()),
    Called("trl", TRL, "w·k₃", "per token (corrected GRPO): w·k₃", trl_loss(corrected=True)),
    Called("verl", VERL, "k₃, at most 10", GRPO, verl_loss("k3"), library("grpo", kl_clamp=10.0, **OURS_NO_CLIP)),
    Called("verl", VERL, "k₂", "per token: k₂", verl_loss("k2")),
    Called("openrlhf", OPENRLHF, "min(w, 10)·log r, constant, times ∇log π_θ", TOKEN, openrlhf_loss),
    Called("google-tunix", TUNIX, "k₃", GRPO, tunix_loss("low_var_kl")),
    Called("google-tunix", TUNIX, "k₁", K1, tunix_loss("kl")),
)


def on_host(loss: Loss, logprobs: Any, given: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The value of a PyTorch loss and its gradient with respect to the log-probs."""
    leaf = torch.tensor(np.asarray(logprobs), requires_grad=True)
    value = loss(leaf, {name: torch.tensor(np.asarray(x)) for name, x in given.items()})
    value.backward()
    return value.detach().numpy().astype(np.float32), leaf.grad.numpy().astype(np.float32)


def differentiable(called: Called) -> Loss:
    """The library's loss as a function that JAX differentiates."""
    if called.library == "google-tunix":
        return called.loss

    def both(logprobs: jax.Array, given: Arrays) -> Any:
        shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(logprobs.shape, jnp.float32)
        call = functools.partial(on_host, called.loss)
        return jax.pure_callback(call, shapes, logprobs, given, vmap_method="sequential")

    @jax.custom_vjp
    def loss(logprobs: jax.Array, given: Arrays) -> jax.Array:
        return both(logprobs, given)[0]

    loss.defvjp(both, lambda gradient, cotangent: (cotangent * gradient, None))
    return loss


def losses_of(called: Called) -> Losses:
    """The loss of a batch as the first of [B, T] token losses, whose sum over the count of tokens is the batch's."""
    function = differentiable(called)

    def losses(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
        names = ("behaviour_logprobs", "ref_logprobs", "advantages")
        mask = tokens.mask.astype(jnp.float32)
        given = {name: getattr(tokens, name) for name in names} | {"mask": mask}
        value = function(tokens.logprobs, given)
        return jnp.zeros_like(mask).at[0, 0].set(value * jnp.sum(mask))

    return losses


def times(losses: Losses, factor: float) -> Losses:
    return lambda tokens, kl_coef: losses(tokens, kl_coef) * factor


def regrets(estimator: Estimator, s: ObjectiveSettings, rate: float, updates: int) -> list[float]:
    """The regret of every seed after so many updates."""
    task = dataclasses.replace(s.task, updates=updates)
    tasks = [make_task(task, seed) for seed in s.seeds]
    lanes = [Lane(drawn, seed, BETA, rate, True, 0) for drawn, seed in zip(tasks, s.seeds, strict=True)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lanes)
    made = jax.jit(jax.vmap(functools.partial(train, estimator, task, UPDATES_A_BATCH)))(stacked)
    found = jax.vmap(lambda lane, policy: judge(task, lane.task, policy, lane.kl_coef))(stacked, made)
    return np.round(np.asarray(found["regret"], np.float64), 6).tolist()


def main() -> None:
    torch.set_num_threads(1)
    s, rates = ObjectiveSettings(), best_rates([line["record"] for line in objective.read(objective.DATA)[1]])
    rows = []
    for called in CALLED:
        began, row, rate = time.monotonic(), ROWS[called.row], rates[called.row, UPDATES_A_BATCH]
        ours = called.ours or row.losses
        losses = {"ours": ours, "theirs": losses_of(called), "twin": times(ours, 1 + 2e-7)}
        of = {
            name: {n: regrets(dataclasses.replace(row, losses=loss), s, rate, n) for n in (EARLY, s.task.updates)}
            for name, loss in losses.items()
        }
        origins = [libraries.origin(called.library, function) for function in called.functions]
        rows.append({"called": origins, "term": called.term, "row": called.row, "rate": rate, **of})
        seconds = time.monotonic() - began
        for n, theirs in of["theirs"].items():
            change = np.subtract(theirs, of["ours"][n])
            gap = f"{change.mean():+.6f}, of one seed at most {np.abs(change).max():.6f}"
            twin = np.abs(np.subtract(of["twin"][n], of["ours"][n])).max()
            print(
                f"{called.library} {called.term}, {n}: {np.mean(theirs):.4f}, {gap} (twin {twin:.6f}); {seconds:.0f} s"
            )
    versions = {n: importlib.metadata.version(n) for n in ("verl", "trl", "openrlhf", "google-tunix", "torch", "jax")}
    written = {"versions": versions, "made_with": kept.made_with(), "rows": rows}
    Path(__file__).with_name("trained.json").write_text(
        json.dumps(written, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
