"""The objective of an update, as a function of log-probs and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import losses, masking
from rpg_jax.data import Group, RolloutBatch
from rpg_jax.losses import Metrics
from rpg_jax.training.critic import Critic
from rpg_jax.types import Batch

LossFn = Callable[[jax.Array, Batch], tuple[jax.Array, jax.Array, Metrics]]
"""Log-probs f32[B, C] and their batch -> (sum, weight, metrics)."""


@functools.lru_cache(maxsize=128, typed=True)
def policy_loss_fn(name: str | losses.Loss, **hyperparameters: Any) -> LossFn:
    """Returns `losses.policy_loss` as a `LossFn`, with the metric of `kl_share`. Equal arguments give one function.
    `hyperparameters` are those of the loss. The metric is absent if the loss has no β that may be 0, if β is the number
    0, or if the KL is summed over the vocabulary. Raises ValueError for an unknown name of a loss."""
    kl_coef, declared = hyperparameters.get("kl_coef", 1.0), losses.find_loss(name).hyperparameters.get("kl_coef")
    regularized = (isinstance(kl_coef, jax.Array) or kl_coef > 0) and hyperparameters.get("estimator") != "exact"
    regularized &= any(isinstance(allowed, losses.Range) and allowed.holds(0) for allowed in get_args(declared))

    def loss(logprobs: jax.Array, batch: Batch):
        total, weight, metrics = losses.policy_loss(name, logprobs=logprobs, **batch.loss_inputs, **hyperparameters)
        return total, weight, metrics | (kl_share(name, logprobs, batch, **hyperparameters) if regularized else {})

    return loss


def kl_share(name: str | losses.Loss, logprobs: jax.Array, batch: Batch, **hyperparameters: Any) -> Metrics:
    """The metric `kl_gradient_share`, the KL term's share of the gradient, as the pair (‖g − g₀‖², ‖g‖²); no gradient.

        share = ‖g − g₀‖ / ‖g‖,   g = ∂(Σ loss)/∂ log π_θ of every trained token, g₀ = the same at β = 0

    `losses.divided` makes the share of the pair. The norms are over the trained tokens. g₀ also lacks the KL's baseline
    in the advantages. A clip may take another branch at β = 0; the difference counts to the KL. The entropy bonus and
    the critic's loss are not in g. The weights' gradient is Σ_t g_t ∇log π_θ(a_t): the KL's share of this sum is larger
    if the KL's parts agree more than the parts of the rewards.
    """
    # Behind the barrier the compiler cannot fuse this with the loss that is trained, whose bits stay as they are.
    given = jax.lax.stop_gradient(logprobs), batch.loss_inputs, batch.kl_baseline
    logprobs, inputs, baseline = jax.lax.optimization_barrier(given)
    of_rewards = inputs["advantages"] if baseline is None else inputs["advantages"] - baseline

    def total(logprobs: jax.Array, **changed: Any) -> jax.Array:
        return losses.policy_loss(name, **inputs | {"logprobs": logprobs} | changed)[0]

    whole = jax.grad(total)(logprobs, **hyperparameters)
    part = whole - jax.grad(total)(logprobs, **hyperparameters | {"advantages": of_rewards, "kl_coef": 0.0})
    squares = (masking.masked_sum(jnp.square(x), inputs["mask"]) for x in (part, whole))
    return {"kl_gradient_share": (next(squares), next(squares))}


@functools.lru_cache(maxsize=128, typed=True)
def mean_fn(aggregate: str, constant_length: int | None) -> losses.Mean:
    """Returns `losses.aggregate` as a function of values f[B, C] and a batch, which returns (sum, weight). `aggregate`
    is a name of `AGGREGATES`, `constant_length` in tokens is for `constant`. Equal arguments: one function."""
    return lambda values, batch: losses.aggregate(values, batch, aggregate, constant_length)


Advantages = Callable[[RolloutBatch], Mapping[str, np.ndarray | list[list[np.ndarray]]]]
"""A batch with its log-probs -> its columns `advantages` and, for RPG of completions, `kl_baseline`.

A column has one number for each prompt and completion, or f32[n] with one number for each token.
"""


def advantages_fn(
    advantage: str,
    loss: str,
    part_weights: Sequence[float] = (),
    *,
    credit: str = "completion",
    environment_weight: float = 0.0,
    **hyperparameters: Any,
) -> Advantages:
    """Returns the function from a batch to its column `advantages`, which is computed from the rewards of the batch.

    RPG of completions also has a leave-one-out baseline of the KL. The function adds this baseline to the advantages,
    and returns the column `kl_baseline` too. The loss cannot compute the baseline: a micro-batch may split a group.

    Args:
      advantage: a name of `ADVANTAGES`.
      loss: a name of `LOSSES`; "rpg" with level="sequence" has the baseline of the KL.
      part_weights: the weights of the parts of the reward, for advantages as `gdpo` and for `returns`.
      credit: "completion", or "turn" for advantages of turns (`losses.turn_advantages` of `returns`).
      environment_weight: the weight of the environment's part in the reward; only "turn" reads it.
      **hyperparameters: those of the loss.
    """
    own: dict[str, Any] = {"advantage": advantage, "part_weights": part_weights}
    of_rewards: Callable[[RolloutBatch], Any] = functools.partial(completion_advantages, **own)
    if credit == "turn":
        of_rewards = functools.partial(turn_advantages, environment_weight=environment_weight, **own)
    if loss != "rpg" or hyperparameters.get("level", "token") != "sequence":
        return lambda batch: {"advantages": of_rewards(batch)}
    return lambda batch: with_kl_baseline(of_rewards(batch), batch, **hyperparameters)


def completion_advantages(batch: RolloutBatch, *, advantage: str, part_weights: Sequence[float] = ()) -> np.ndarray:
    """Advantages f32[P, G] of the rewards of P groups of G completions, by the name `advantage` of `ADVANTAGES`.
    Completions that are not `Group.counted` have 0. `part_weights` weigh the parts of the reward, for `gdpo`."""
    rewards = np.stack([g.rewards for g in batch.groups])
    trained = np.array(batch.trained, np.int32)
    known = [g.parts for g in batch.groups if g.parts is not None]
    of_parts: dict[str, Any] = {"parts": np.stack(known) if known else None, "part_weights": part_weights}
    return np.asarray(losses.advantages(advantage, rewards, lengths=trained, counted=counted_of(batch), **of_parts))


def turn_advantages(batch: RolloutBatch, *, advantage: str, **weights: Any) -> list[list[np.ndarray]]:
    """Advantages of turns: for each group and completion f32[n], one number for each of its n tokens. `advantage`
    compares the returns to go of turns, see `losses.turn_advantages`; `weights` are those of `returns`."""
    paid = [returns(g, **weights) for g in batch.groups]
    of_turns = losses.turn_advantages(advantage, paid, [g.counted for g in batch.groups])
    return [
        [own[c.turn_numbers] for own, c in zip(of_group, g.completions, strict=True)]
        for of_group, g in zip(of_turns, batch.groups, strict=True)
    ]


def with_kl_baseline(
    advantages: np.ndarray | list[list[np.ndarray]], batch: RolloutBatch, **hyperparameters: Any
) -> Mapping[str, np.ndarray | list[list[np.ndarray]]]:
    """{"advantages": the sum of `advantages` and the baseline, "kl_baseline": f32[P, G], the leave-one-out baseline of
    the KL that RPG of completions has}, from log π_old − log π_ref of `batch` and the loss's `hyperparameters`. Every
    process must call it. Raises ValueError if the batch has no `behaviour_logprobs` or `ref_logprobs`."""
    log_ratios = [b.known("behaviour_logprobs") - b.known("ref_logprobs") for b in batch.batches]
    sums = np.array([[np.sum(x) for x in own] for own in batch.of_sampled(log_ratios)], np.float32)
    baseline = np.asarray(losses.kl_baseline(jnp.asarray(sums), counted=counted_of(batch), **hyperparameters))
    both = [[x + b for x, b in zip(*pair, strict=True)] for pair in zip(advantages, baseline, strict=True)]
    return {"advantages": both, "kl_baseline": baseline}


def counted_of(batch: RolloutBatch) -> jax.Array | None:
    """Returns bool[P, G], the completions that are `Group.counted`; None if all are."""
    counted = np.stack([g.counted for g in batch.groups])
    return None if counted.all() else jnp.asarray(counted)


def supervised_loss(logprobs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
    """Returns −Σ log π_θ, `logprobs` f[B, C], over the trained tokens (nats, minimise), their number, and the metric
    `loss` of both."""
    total, weight = -masking.masked_sum(logprobs, batch.mask), jnp.sum(batch.mask)
    return total, weight, {"loss": (total, weight)}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss, minus an entropy bonus, plus the loss of a learned baseline.

    Attributes:
      loss: the loss of the log-probs.
      mean: aggregates the bonus and the value loss in the way in which the loss aggregates its tokens.
      entropy_coef: >= 0, the weight of the entropy bonus; at 0 the bonus is not computed.
      critic: the learned baseline, or None.
      on_policy: π_old is the policy in training, see `loop.Algorithm`. Then the log-probs of the update are also log
        π_old, and log π_ref of a batch without it; no gradient. Its metrics have the entropy and the sampler's gap.

    Raises ValueError for an entropy bonus or a critic without `mean`.
    """

    loss: LossFn
    mean: losses.Mean | None = None
    entropy_coef: float = 0.0
    critic: Critic | None = None
    on_policy: bool = False

    def __post_init__(self):
        if self.mean is None and (self.entropy_coef or self.critic):
            raise ValueError(
                f"entropy_coef={self.entropy_coef} and critic={self.critic} add means over tokens to the loss: give "
                "mean, the function that aggregates them"
            )


CREDITS = ("completion", "turn")


def returns(group: Group, environment_weight: float, part_weights: Sequence[float] = ()) -> list[np.ndarray]:
    """The returns to go of each completion's k turns, f32[k]: R_t = R − ω Σ_{j<t} r_j. Without an environment k is 1.

    R is the completion's reward, so R_1 = R. r_j is the environment's reward of turn j, and ω = `environment_weight` is
    the weight of the environment's part in the reward. The last turn gets the rest of R beyond the environment's
    rewards: the other parts of the reward, and its shaping. With `part_weights`, R is the exact sum of `Group.parts`,
    so that turns that are paid alike have returns of equal bits: an advantage would enlarge the rounding.
    """
    parts = group.parts if len(part_weights) else None
    rewards, found = group.rewards if parts is None else parts.astype(np.float64) @ part_weights, []
    for completion, reward in zip(group.completions, rewards, strict=True):
        paid = np.zeros(1) if completion.turns is None else completion.turns.rewards.astype(np.float64)
        to_go = np.cumsum(paid[::-1])[::-1]
        all_paid = np.float32(to_go[0])  # as the environment's part in `Group.parts`: it cancels without rounding
        found.append((np.float64(reward) + environment_weight * (to_go - all_paid)).astype(np.float32))
    return found


def token_rewards(groups: Sequence[Group], credit: str, environment_weight: float) -> list[list[np.ndarray]]:
    """Returns the reward of each token, f32[n] for each group and completion, for a learned baseline.

    With `credit` "completion", the last token that the policy sampled gets the reward of the completion. With "turn",
    the last sampled token of turn t gets the reward of the turn, R_t − R_{t+1} of `returns`. All other rewards are 0.
    `environment_weight` is the weight of the environment's part in the reward.
    """
    return [
        [
            _at_the_ends(completion.turn_numbers, completion.sampled, own if credit == "turn" else own[:1])
            for completion, own in zip(group.completions, returns(group, environment_weight), strict=True)
        ]
        for group in groups
    ]


def _at_the_ends(numbers: np.ndarray, sampled: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns f32[n] with R_t − R_{t+1} at the last token of turn t that is `sampled`, bool[n]. `numbers` i32[n] has
    each token's turn, and `own` the R_t; 0 follows the last R_t. A single number in `own` counts for all turns."""
    paid = np.zeros(len(numbers), np.float32)
    for turn, (now, later) in enumerate(zip(own, [*own[1:], np.float32(0)], strict=True)):
        last = np.flatnonzero(sampled & ((numbers == turn) | (len(own) == 1)))[-1]
        paid[last] = now - later
    return paid
