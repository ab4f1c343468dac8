"""The table from logical axes, the names of a model's dimensions, to mesh axes; its checks, and its overrides."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.parallel.mesh import MESH_AXES

Rules = Mapping[str, tuple[str, ...]]
"""The mesh axes that cut each logical axis; () leaves it whole on every device."""

RULES: Rules = MappingProxyType(
    {
        # Parameters: FSDP shards the model dimension, tensor parallelism everything that is local to a head, a hidden
        # unit or a vocabulary entry. Activations of heads lie where the heads are.
        "layers": (),
        "vocab": ("tensor",),
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "hidden": ("tensor",),
        "experts": ("expert",),
        "router": (),
        "norm": (),
        # Rows and positions of a training batch, and the rows of a decode step. The rows of a prefill are few, and are
        # whole on every device.
        "batch": ("replica", "fsdp", "expert"),
        "length": ("context",),
        "slots": ("replica", "fsdp", "expert"),
    }
)

_SUMMED = ("vocab", "heads", "hidden")  # a device computes its part of a sum over these, for its tokens
_TOKENS = ("batch", "length", "slots")

# The caches of jax.jit do not know under which of Flax's rules a program was traced. They know this context.
_IN_FORCE = jax.make_user_context()


def override(overrides: Rules, rules: Rules = RULES) -> Rules:
    """Returns a copy of `rules` with the entries of `overrides`. An entry maps a logical axis to mesh axes; with none,
    every device holds the dimension whole. Raises ValueError if `rules` lacks the logical axis, `MESH_AXES` lacks a
    mesh axis, or an entry names a mesh axis twice."""
    unknown = sorted(set(overrides) - set(rules))
    if unknown:
        raise ValueError(f"unknown logical axes {unknown}; the rules name {', '.join(sorted(rules))}")
    for name, axes in overrides.items():
        strangers = [axis for axis in axes if axis not in MESH_AXES]
        if strangers:
            raise ValueError(f"rule {name} -> {axes}: no mesh axis {strangers}; the axes are {', '.join(MESH_AXES)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"rule {name} -> {axes} names a mesh axis twice; name it once")
    return MappingProxyType({**rules, **overrides})


def parse_rules(text: str | None) -> Rules:
    """Returns `RULES` with the entries of `text`, e.g. "embed=fsdp+context,kv_heads="; `RULES` alone for None or "". An
    entry without a mesh axis replicates. Raises ValueError if an entry has no "=", names an unknown logical axis or
    mesh axis, or names a mesh axis twice, or if two entries are of one logical axis."""
    overrides: dict[str, tuple[str, ...]] = {}
    for entry in (part.strip() for part in (text or "").split(",") if part.strip()):
        name, sign, axes = entry.partition("=")
        if not sign:
            raise ValueError(f"sharding: {entry!r} is not of the form LOGICAL=MESH_AXIS[+MESH_AXIS]")
        if name in overrides:
            raise ValueError(f"sharding: {name} stands twice; give it once")
        overrides[name] = tuple(axes.split("+")) if axes else ()
    return override(overrides)


def shards(name: str, sizes: Mapping[str, int], rules: Rules = RULES) -> int:
    """Returns the number of parts into which a mesh with axes of `sizes` cuts the logical axis `name` under `rules`."""
    return math.prod(sizes[axis] for axis in rules[name])


def shardings(logical_axes: Any, shapes: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Returns the tree of `shapes`, arrays or ShapeDtypeStructs, with a NamedSharding on `mesh` in place of each.

    `logical_axes` is the same tree with a tuple in place of each array: the logical name of each dimension, or None for
    a dimension that is not sharded.

    Raises ValueError if `rules` lacks a name, two dimensions fall on one mesh axis, mesh axes do not divide a
    dimension, or the names are not as many as the dimensions; it names the leaf. Or if `check` refuses the rules.
    """
    check(rules, mesh.shape)

    def leaf(path, array, names):
        where = jax.tree_util.keystr(path) or "array"
        return NamedSharding(mesh, _partition_spec(where, tuple(array.shape), names, mesh, rules))

    return jax.tree_util.tree_map_with_path(leaf, shapes, logical_axes)


@contextlib.contextmanager
def activate(mesh: Mesh, rules: Rules = RULES) -> Iterator[None]:
    """A context in which `mesh` is JAX's mesh, and programs that are traced constrain their activations by `rules`. A
    jitted function that was traced under other rules is traced anew. Raises ValueError if `check` refuses the rules."""
    check(rules, mesh.shape)
    table = tuple(rules.items())
    with jax.set_mesh(mesh), flax.linen.logical_axis_rules(table), _IN_FORCE(table):
        yield


def check(rules: Rules, sizes: Mapping[str, int]) -> None:
    """Refuses rules under which a model on a mesh would compute other numbers than on one device.

    A device may hold a part of the vocabulary, of the heads or of the hidden units. The model then sums the results of
    the device's tokens over the devices that hold the other parts. These devices must hold the same tokens. Therefore a
    mesh axis that cuts the vocabulary, heads or hidden units must not cut rows or positions. The model dimension and
    experts may share an axis with rows: before a product, devices gather the parts or the tokens. `sizes` has the size
    of every axis in `MESH_AXES`.

    Raises ValueError if a mesh axis breaks this rule, or cuts both rows and positions of a batch; or if the key-value
    heads are neither on all devices nor sharded as the query heads.
    """
    wide = {name: tuple(axis for axis in axes if sizes[axis] > 1) for name, axes in rules.items()}
    for part, tokens in itertools.product(_SUMMED, _TOKENS):
        for axis in (axis for axis in wide[part] if axis in wide[tokens]):
            raise ValueError(
                f"sharding: {part} and {tokens} both fall on mesh axis {axis!r}, where the sum over {part} would add "
                f"up different tokens; take {axis} from {part} ({part}= replicates it) or from {tokens}"
            )
    for axis in (axis for axis in wide["batch"] if axis in wide["length"]):
        raise ValueError(f"sharding: batch and length both fall on mesh axis {axis!r}; take {axis} from one of them")
    if wide["kv_heads"] not in ((), wide["heads"]):
        keys, queries = ("+".join(wide[name]) or "no axis" for name in ("kv_heads", "heads"))
        raise ValueError(
            f"sharding: kv_heads fall on {keys} and heads on {queries}, so that a device lacks the key-value heads of "
            "its queries; give both the same axes, or set kv_heads="
        )


def _partition_spec(where: str, shape: tuple[int, ...], names: Any, mesh: Mesh, rules: Rules) -> PartitionSpec:
    if not isinstance(names, tuple) or len(names) != len(shape):
        raise ValueError(f"{where}: shape {shape} needs a tuple of {len(shape)} logical axes, got {names!r}")
    entries: list[tuple[str, ...]] = []
    taken: dict[str, str] = {}
    for size, name in zip(shape, names, strict=True):
        if name is not None and name not in rules:
            raise ValueError(f"{where}: no rule for logical axis {name!r}; the rules name {', '.join(sorted(rules))}")
        axes = rules[name] if name is not None else ()
        for axis in axes:
            if axis in taken:
                raise ValueError(f"{where}: {taken[axis]!r} and {name!r} both fall on mesh axis {axis!r}; override one")
            taken[axis] = str(name)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(
                f"{where}: {name} of size {size} is not divided by {parts} devices of mesh axes {axes}; "
                f"choose another mesh or override the rule ({name}= replicates it)"
            )
        entries.append(axes)
    return PartitionSpec(*entries)
