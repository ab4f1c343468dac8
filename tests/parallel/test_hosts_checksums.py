"""Checksums are made where the arrays are."""

import re

import jax
import jax.numpy as jnp
import pytest

from rpg_jax.parallel import hosts


@pytest.mark.parametrize("axes", [("x", None), (None, "x"), (("x", "y"), None), ("y", "x")])
def test_a_checksum_sends_sums_between_devices_and_no_weights(axes):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    weights = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P(*axes)))
    text = hosts.checksum_of_tree.lower({"w": weights}).compile().as_text()
    sent = re.findall(r"= (\S.*?) ((?:all|collective)-[a-z-]+)\(", text)
    assert {name for _, name in sent} == {"all-reduce"}
    assert {number for kind, _ in sent for number in re.findall(r"\w+\[[\d,]*\]", kind)} <= {"u32[]", "u32[2]"}
