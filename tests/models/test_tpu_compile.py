"""The model compiles for TPUs that are not there, with the kernel and the shardings meant for them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies

from rpg_jax import models, parallel

pytestmark = pytest.mark.tpu_compile


@pytest.fixture
def topology(monkeypatch):
    """Describes a TPU slice by name, as `v5p:2x2x1`."""
    pytest.importorskip("libtpu", reason="needs libtpu, the compiler for TPUs: pip install 'jax[tpu]'")
    for name, value in {
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name)


def compile_gradient(config, mesh, rows, length):
    graphdef, params = models.abstract(config, jnp.bfloat16, compute_dtype=jnp.bfloat16, remat="full")
    placed = parallel.shardings(models.logical_axes(config), params, mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, placed)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    ids = jax.ShapeDtypeStruct(ids.shape, ids.dtype, sharding=parallel.shardings(("batch", "length"), ids, mesh))

    def loss(params, *batch):
        return jnp.square(nnx.merge(graphdef, params)(*batch).astype(jnp.float32)).mean()

    with parallel.activate(mesh):
        return jax.jit(jax.grad(loss), out_shardings=placed).lower(params, ids, ids, ids).compile()


@pytest.mark.parametrize(
    ("size", "mesh_shape"),
    [
        ("Qwen3-0.6B", {"fsdp": 4}),
        ("Qwen2.5-0.5B", {"fsdp": 2, "context": 2}),
        ("Qwen3-4B", {"tensor": 2, "context": 2}),
    ],
    ids=str,
)
def test_the_step_uses_splash_and_never_holds_the_scores(topology, size, mesh_shape):
    config = dataclasses.replace(models.size(size), num_layers=2)
    mesh = parallel.make_mesh(mesh_shape, topology("v5p:2x2x1").devices)
    length = 4096
    rows = mesh.size // mesh.shape["tensor"] // mesh.shape["context"]
    compiled = compile_gradient(config, mesh, rows, length)
    text = compiled.as_text()
    assert len(re.findall(r"custom_call_target=\"tpu_custom_call\"", text)) >= 3  # forward, dq, dkv
    assert not re.search(rf"\[[\d,]*{length},{length}\]", text), "attention scores in memory"


def test_a_mixture_compiles_over_the_expert_axis(topology):
    config = dataclasses.replace(models.size("Qwen3-30B-A3B"), num_layers=2)
    mesh = parallel.make_mesh({"expert": 2, "fsdp": 2}, topology("v5p:2x2x1").devices)
    compiled = compile_gradient(config, mesh, 4, 1024)
    assert "reduce-scatter" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**30
