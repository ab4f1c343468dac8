"""The rule table places arrays as declared and refuses what it cannot place."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rpg_jax.parallel import MESH_AXES, RULES, make_mesh, mesh_sizes, override, parse_rules, shardings, shards


def spec(names, shape, mesh, rules=RULES):
    return shardings(names, jax.ShapeDtypeStruct(shape, jnp.float32), mesh, rules).spec


def test_a_mesh_has_every_axis_and_fills_the_free_one():
    mesh = make_mesh({"fsdp": -1, "tensor": 2})
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}


def test_a_mesh_may_use_some_of_the_devices():
    assert make_mesh({"fsdp": 2}, jax.devices()[:2]).size == 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"data": 8}, "unknown mesh axes"),
        ({"fsdp": 3}, "does not cover 8 devices"),
        ({"fsdp": 0, "tensor": 8}, "does not cover"),
        ({"fsdp": -1, "tensor": -1}, "does not cover"),
        ({"fsdp": -1, "tensor": 3}, "does not cover"),
        ({"fsdp": -4, "tensor": 2}, "does not cover"),
    ],
)
def test_a_mesh_that_does_not_cover_the_devices_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(shape)


def test_each_dimension_falls_on_the_axes_of_its_rule():
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "replica": 2})
    assert spec(("layers", "embed", "heads", None), (3, 8, 4, 5), mesh) == PartitionSpec(None, "fsdp", "tensor", None)
    assert spec(("batch", "length", None), (8, 4, 3), mesh) == PartitionSpec(
        ("replica", "fsdp", "expert"), "context", None
    )


def test_rows_fall_on_every_axis_that_their_rule_names():
    sizes = mesh_sizes({"fsdp": 8, "expert": 8}, 64)
    assert shards("batch", sizes) == 64
    assert shards("batch", sizes, override({"batch": ("fsdp",)})) == shards("hidden", sizes | {"tensor": 8}) == 8
    assert shards("norm", sizes) == 1


def test_rules_are_read_from_the_config():
    assert parse_rules("embed=fsdp+context, kv_heads=") == override({"embed": ("fsdp", "context"), "kv_heads": ()})
    assert parse_rules(None) == parse_rules("") == RULES
    with pytest.raises(ValueError, match="'embed' is not of the form"):
        parse_rules("embed")
    with pytest.raises(ValueError, match="sharding: embed stands twice"):
        parse_rules("embed=fsdp, heads=, embed=context")


def test_an_override_changes_one_entry_and_leaves_the_table():
    rules = override({"kv_heads": (), "embed": ("fsdp", "expert")})
    assert rules["kv_heads"] == ()
    assert rules["embed"] == ("fsdp", "expert")
    assert RULES["kv_heads"] == ("tensor",)
    assert {k: rules[k] for k in rules if k not in ("kv_heads", "embed")} == {
        k: RULES[k] for k in RULES if k not in ("kv_heads", "embed")
    }


def test_unknown_names_are_refused_with_the_known_ones():
    mesh = make_mesh({"fsdp": 8})
    with pytest.raises(ValueError, match="unknown logical axes.*kv_heads"):
        override({"kv_head": ()})
    with pytest.raises(ValueError, match="no mesh axis.*tensor"):
        override({"kv_heads": ("model",)})
    with pytest.raises(ValueError, match="embed.*names a mesh axis twice"):
        override({"embed": ("fsdp", "fsdp")})
    with pytest.raises(ValueError, match=r"\['w'\].*no rule for logical axis 'embedding'"):
        shardings({"w": ("embedding",)}, {"w": jnp.zeros(8)}, mesh)


@pytest.mark.parametrize("size", [1, 8])  # JAX takes no axis twice, not even one of a single device
def test_a_collision_names_both_dimensions(size):
    with pytest.raises(ValueError, match="array: 'heads' and 'hidden' both fall on mesh axis 'tensor'"):
        spec(("heads", "hidden"), (8, 8), make_mesh({"tensor": size}, jax.devices()[:size]))


def test_a_dimension_that_does_not_divide_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="kv_heads of size 2 is not divided by 8.*kv_heads= replicates it"):
        spec(("kv_heads",), (2,), make_mesh({"tensor": 8}))


def test_every_dimension_needs_a_name():
    with pytest.raises(ValueError, match="needs a tuple of 2 logical axes"):
        spec(("heads",), (8, 8), make_mesh({"tensor": 8}))
