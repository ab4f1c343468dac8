"""The model compiles for TPUs that are only described, with their kernels and shardings."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies

from rpg_jax import models, parallel
from rpg_jax.planning import compiling, hlo
from rpg_jax.planning.topologies import GET_COMPILER, compiler_library
from rpg_jax.rollout import DecodeEngine, Decoding, Weights
from rpg_jax.training.state import abstract

pytestmark = pytest.mark.tpu_compile


def library() -> str:
    """The path of the compiler; skips the test where there is none."""
    if (found := compiler_library()) is None:
        pytest.skip(f"needs the compiler for TPUs: {GET_COMPILER}")
    return str(found)


@pytest.fixture
def topology(monkeypatch):
    """Describes a TPU slice by name, as `v5p:2x2x1`."""
    for name, value in {
        "TPU_LIBRARY_PATH": library(),
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


@pytest.mark.parametrize("mesh_shape", [{"expert": 2, "fsdp": 2}, {"fsdp": 4}], ids=str)
def test_a_mixture_computes_for_the_chosen_experts_only(topology, mesh_shape):
    config = dataclasses.replace(models.size("Qwen3-30B-A3B"), num_layers=2)
    mesh = parallel.make_mesh(mesh_shape, topology("v5p:2x2x1").devices)
    compiled = compile_gradient(config, mesh, 4, 1024)
    text = compiled.as_text()
    assert "reduce-scatter" in text
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**30
    chosen = compiling.training_flops(config, rows=4, length=1024, predicted=0, remat="full") / mesh.size
    # over an expert axis the kernels are counted with the rows of other devices' experts, which they skip
    assert hlo.count(text).flops < 1.2 * mesh.shape["expert"] * chosen


def compile_decode(config, mesh, slots, capacity, int8_kv=False):
    """One decode step that gives its cache back, as the rollout engine's loop does."""
    graphdef, params = models.abstract(config, jnp.bfloat16, compute_dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: models.KVCache.empty(config, slots, capacity, jnp.bfloat16, int8=int8_kv))
    tokens = jax.ShapeDtypeStruct((slots,), jnp.int32)
    axes = models.logical_axes(config), cache.logical_axes, ("slots",)
    layout = [parallel.shardings(a, x, mesh) for a, x in zip(axes, (params, cache, tokens), strict=True)]
    arguments = [
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), x, s)
        for x, s in zip((params, cache, tokens), layout, strict=True)
    ]

    def steps(params, cache, tokens):
        def step(_, carry):
            cache, tokens = carry
            hidden, cache, _ = nnx.merge(graphdef, params).decode(tokens, cache)
            return cache, tokens + jnp.sum(hidden, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 16, step, (cache, tokens))

    with parallel.activate(mesh):
        return jax.jit(steps, donate_argnums=1, out_shardings=(layout[1], None)).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("name", "size", "mesh_shape"),
    [
        ("v5e:2x2", "Qwen3-4B", {"tensor": 4}),
        ("v5p:2x2x1", "Qwen3-4B", {"tensor": 4}),
        ("v6e:2x2", "Qwen3-4B", {"tensor": 2, "replica": 2}),
        ("v5p:2x2x1", "Qwen2.5-7B", {"fsdp": 4}),
        ("v5p:2x2x1", "Qwen3-30B-A3B", {"tensor": 2, "expert": 2}),
        ("v5p:2x2x1", "Qwen3-30B-A3B", {"tensor": 4}),  # 192 hidden units a chip, which fill no tile
    ],
    ids=str,
)
def test_a_decode_step_reads_by_the_kernel_and_updates_the_cache_in_place(topology, name, size, mesh_shape):
    config = dataclasses.replace(models.size(size), num_layers=4)
    mesh = parallel.make_mesh(mesh_shape, topology(name).devices)
    compiled = compile_decode(config, mesh, slots=64, capacity=4096)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert "ragged_attention" in text and "ragged_append" in text
    held = memory.alias_size_in_bytes // 2**20 * 2**19  # keys, or values, on a chip; the lengths are less than a MiB
    assert not moving(text, {held, held // config.num_layers})
    assert memory.temp_size_in_bytes < 2**29


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_keys_and_values_in_eight_bits_take_little_more_than_half_the_memory(topology, name):
    config = dataclasses.replace(models.size("Qwen3-4B"), num_layers=4)
    mesh = parallel.make_mesh({"tensor": 4}, topology(name).devices)
    wide, narrow = (compile_decode(config, mesh, slots=64, capacity=4096, int8_kv=x) for x in (False, True))
    text, memory = narrow.as_text(), narrow.memory_analysis()
    assert "ragged_attention" in text and "ragged_append" in text
    assert memory.alias_size_in_bytes < 0.6 * wide.memory_analysis().alias_size_in_bytes
    assert memory.temp_size_in_bytes < 2**29


def moving(text, sizes):
    """Instructions that do more than hand a buffer on, and have a bf16 result of one of these sizes, in bytes."""
    instruction = r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z0-9\-]*)\("
    handing_on = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "custom-call"}
    return [
        (op, dims)
        for kind, op in re.findall(instruction, text, re.MULTILINE)
        for dims in re.findall(r"bf16\[([\d,]+)\]", kind)
        if op not in handing_on and 2 * math.prod(map(int, dims.split(","))) in sizes
    ]


def test_qwen3_4b_decodes_64_slots_of_4096_within_a_gibibyte_of_temporaries(topology):
    """The temporaries of the engine's own program, sampling included; weights and cache do not count."""
    config, chips = models.size("Qwen3-4B"), topology("v5p:2x2x1").devices
    mesh = parallel.make_mesh({"tensor": 4}, chips)
    graphdef, shapes = models.abstract(config, jnp.bfloat16, compute_dtype=jnp.bfloat16)
    params = abstract(shapes, parallel.shardings(models.logical_axes(config), shapes, mesh))
    decoding = Decoding(slots=64, capacity=4096, mesh=mesh)
    compiled = DecodeEngine(config, graphdef, Weights(params), decoding).lower(8, 256)["decode"].compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2**30 < memory.alias_size_in_bytes / 8
    assert not moving(compiled.as_text(), {memory.alias_size_in_bytes // 2**20 * 2**19})


@pytest.mark.parametrize("int8_kv", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize(("capacity", "head_dim"), [(32, 16), (96, 64), (208, 64)], ids=str)
def test_a_small_model_in_float32_decodes_at_any_capacity(topology, capacity, head_dim, int8_kv):
    """As configs/tiny.py and configs/smollm2_135m_sums.py, whose slots are no whole tiles of 128."""
    config = dataclasses.replace(models.size("Qwen2.5-0.5B"), num_layers=2, head_dim=head_dim, vocab_size=256)
    mesh = parallel.make_mesh({"replica": 4}, topology("v5p:2x2x1").devices)
    graphdef, shapes = models.abstract(config, jnp.float32, compute_dtype=jnp.float32)
    params = abstract(shapes, parallel.shardings(models.logical_axes(config), shapes, mesh))
    decoding = Decoding(slots=8, capacity=capacity, mesh=mesh, int8_kv=int8_kv)
    text = DecodeEngine(config, graphdef, Weights(params), decoding).lower(1, 16)["decode"].compile().as_text()
    assert "ragged_attention" in text and "ragged_append" in text
