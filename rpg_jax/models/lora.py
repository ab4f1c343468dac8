"""LoRA (arXiv:2106.09685): a frozen matrix W becomes W + (alpha / rank) A B, of which A and B are trained.

Adapters are a tree of their own: {"layers": {"attention": {"q": {"a": A, "b": B}}}}, stacked over layers like the
matrices. Optimizer, checkpoints and the reference see this tree alone. `docs/lora.md` has the equations.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from rpg_jax.models.adapted import Adapted
from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import Params, logical_axes
from rpg_jax.models.hf_layout import Stored, layout
from rpg_jax.models.quantized import Int8

_ATTENTION, _MLP = frozenset({"q", "k", "v", "o"}), frozenset({"gate", "up", "down"})
TARGETS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"attention": _ATTENTION, "feed-forward": _MLP, "experts": _MLP, "all": _ATTENTION | _MLP}
)
"""The matrices that get adapters, by the value of `model.lora.targets`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
      rank: r, the width of A and the height of B.
      alpha: the adapter's product has the factor alpha / rank.
      targets: a name in `TARGETS`.
    """

    rank: int
    alpha: float
    targets: str = "all"

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"an adapter needs rank >= 1 and alpha > 0, got {self.rank=}, {self.alpha=}")
        if self.targets not in TARGETS:
            raise ValueError(f"unknown lora.targets {self.targets!r}; known: {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapted_matrices(config: DecoderConfig, lora: Lora) -> list[Stored]:
    """The matrices that get adapters. Their dimensions are [*stack, *inputs, *outputs], inputs as in `groups[1]`.

    Raises:
      ValueError: the model has no such matrices.
    """
    absent, instead = ("experts", "feed-forward") if config.experts is None else ("feed-forward", "experts")
    if lora.targets == absent:
        raise ValueError(f"model.lora.targets={absent!r}: this model has none; choose {instead}, attention or all")
    return [entry for entry in layout(config) if entry.path[-1] in TARGETS[lora.targets]]


def adapter_shapes(config: DecoderConfig, lora: Lora, dtype=jnp.float32) -> Params:
    """A `ShapeDtypeStruct` for every array of the adapters: a [*stack, *inputs, r] and b [*stack, r, *outputs]."""
    found = {}
    for entry in adapted_matrices(config, lora):
        cut = entry.stacked + len(entry.groups[1])
        found[*entry.path, "a"] = jax.ShapeDtypeStruct((*entry.shape[:cut], lora.rank), dtype)
        b = (*entry.shape[: entry.stacked], lora.rank, *entry.shape[cut:])
        found[*entry.path, "b"] = jax.ShapeDtypeStruct(b, dtype)
    return unflatten_dict(found)


def adapter_axes(config: DecoderConfig, lora: Lora) -> Params:
    """The logical axes of `adapter_shapes`: those of the matrix, and None for the rank, which no mesh splits."""
    found, names = {}, flatten_dict(logical_axes(config))
    for entry in adapted_matrices(config, lora):
        axes, cut = names[entry.path], entry.stacked + len(entry.groups[1])
        found[*entry.path, "a"] = (*axes[:cut], None)
        found[*entry.path, "b"] = (*axes[: entry.stacked], None, *axes[cut:])
    return unflatten_dict(found)


def init_adapters(
    config: DecoderConfig, lora: Lora, *, seed: int = 0, dtype=jnp.float32, shardings: Params | None = None
) -> Params:
    """Draws adapters: A from U(-1/√n, 1/√n) for n inputs, as the library peft does, and B = 0.

    So the first policy is the base itself. The adapters depend on `seed`, `config` and `lora` only.
    """

    def drawn(seed: jax.Array) -> Params:
        key, leaves = jax.random.key(seed), flatten_dict(adapter_shapes(config, lora, dtype))
        for i, entry in enumerate(adapted_matrices(config, lora)):
            a, b = leaves[*entry.path, "a"], leaves[*entry.path, "b"]
            fan_in = math.prod(entry.groups[1])
            uniform = jax.random.uniform(jax.random.fold_in(key, i), a.shape, dtype, -1.0, 1.0)
            leaves[*entry.path, "a"] = uniform * fan_in**-0.5
            leaves[*entry.path, "b"] = jnp.zeros(b.shape, b.dtype)
        return unflatten_dict(leaves)

    return jax.jit(drawn, out_shardings=shardings)(seed)


@flax.struct.dataclass
class Base:
    """The frozen weights of a model, and the factor of the adapters beside them."""

    weights: Params
    scale: float = flax.struct.field(pytree_node=False)

    def policy(self, adapters: Params) -> Params:
        """The params of the model with these adapters."""
        return attached(self.weights, scaled(adapters, self.scale))


def policy_params(base: Base | None, trained: Params) -> Params:
    """The params of the model: those that are trained, or with a base, the base with the trained adapters."""
    return trained if base is None else base.policy(trained)


def scaled(adapters: Params, scale: float) -> Params:
    """The adapters with alpha / rank as a factor of every B."""
    leaves = {path: x * scale if path[-1] == "b" else x for path, x in flatten_dict(adapters).items()}
    return unflatten_dict(leaves)


def attached(weights: Params, adapters: Params) -> Params:
    """`weights` with an `Adapted` in place of every matrix that has a (scaled) adapter."""
    own, found = flatten_dict(adapters), flatten_dict(weights)
    for path in {path[:-1] for path in own}:
        found[path] = Adapted(found[path], own[*path, "a"], own[*path, "b"])
    return unflatten_dict(found)


def merged(params: Params, dtype=None) -> Params:
    """`params` with W + A B, rounded once, in place of every `Adapted`; `dtype` is that of all weights, if given."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Adapted):
            return x.merged(dtype)
        x = x[...]
        return x if dtype is None else x.astype(dtype)

    return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, Adapted | Int8))
