"""The learned baseline V_φ: a head on the hidden states of a decoder of its own."""

import dataclasses
from typing import Any

import flax.nnx as nnx
import flax.struct
import jax
import jax.numpy as jnp

from rpg_jax import losses, masking
from rpg_jax.losses import Metrics
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.policy_logprobs import completion_hidden
from rpg_jax.types import Batch, Rows

_HEAD, _OUTPUT = "value", "lm_head"  # entries of parameter trees: a critic has the first, a policy the second
_WEIGHT = 0.5  # of the value loss; with Adam it matters only where the gradient is clipped


@flax.struct.dataclass
class CriticState:
    """Parameters of the critic (its trunk's and its head's, as `Critic.init` makes them) and their optimizer slots."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Critic:
    """How values are computed and trained.

    Attributes:
      graphdef: of the critic's trunk, a decoder without output embedding, which starts from the policy's weights.
      optimizer: of the critic's own parameters.
      gamma, gae_lambda: γ and λ in [0, 1], the arguments of `losses.gae`.
      clip: > 0, how far `losses.value_loss` lets a value move from its old value, in units of reward; None: no limit.
    """

    graphdef: Any
    optimizer: Optimizer
    gamma: float = 1.0
    gae_lambda: float = 1.0
    clip: float | None = 0.2

    def init(self, policy: Any) -> Any:
        """Returns parameters of a critic whose every value is 0: a copy of the trunk of `policy`, the policy's weights,
        and the entry "value", which is the head: a weight f32[D] and a bias f32[]."""
        trunk = {k: jax.tree.map(jnp.copy, v) for k, v in policy.items() if k != _OUTPUT}
        head = {"weight": jnp.zeros(policy["final_norm"].shape, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
        return {**trunk, _HEAD: head}

    def like(self, policy: Any, head: Any) -> Any:
        """Returns the tree of `init`: leaves of `policy` (shapes, shardings) for the trunk, `head` for weight, bias."""
        trunk = {k: v for k, v in policy.items() if k != _OUTPUT}
        return {**trunk, _HEAD: {"weight": head, "bias": head}}

    def values(self, params: Any, rows: Rows) -> jax.Array:
        """Returns V f32[B, C], the value of the state before each completion token of `rows`; `params`: the critic."""
        model = nnx.merge(self.graphdef, {k: v for k, v in params.items() if k != _HEAD})
        hidden = completion_hidden(model, rows.unrouted)
        head = params[_HEAD]
        return jnp.einsum("bcd,d->bc", hidden.astype(jnp.float32), head["weight"]) + head["bias"]

    def advantages(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns advantages and returns f32[B, C], from `values` f32[B, C] and the batch's `rewards`; no gradient.
        Raises ValueError if the batch has no rewards, or if gamma or gae_lambda is out of its range."""
        decays = {"gamma": self.gamma, "gae_lambda": self.gae_lambda}
        return losses.gae(batch.known("rewards"), values, batch.mask, batch.completion_ids, **decays)

    def loss(self, values: jax.Array, batch: Batch, mean: losses.Mean) -> tuple[jax.Array, Metrics]:
        """Returns half of the value loss of `values` f[B, C], a sum over tokens by `mean`, differentiable in `values`;
        and metrics as (sum, weight), in which `value_loss` is not halved. The caller divides the sum by the weight of
        the policy's loss. Raises ValueError if the batch has no values or returns, or the clip is out of its range."""
        old_values, returns = batch.known("values"), batch.known("returns")
        token_loss = losses.value_loss(values, old_values, returns, clip=self.clip)
        total, weight = mean(token_loss.values, batch)
        metrics = {"value_loss": (total, weight)}
        tokens = jnp.sum(batch.mask != 0, dtype=jnp.float32)
        for name, event in token_loss.events.items():
            metrics[f"{name}_fraction"] = masking.masked_sum(event.astype(jnp.float32), batch.mask), tokens
        return _WEIGHT * total, metrics | losses.value_metrics(old_values, returns, batch.mask)
