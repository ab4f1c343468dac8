"""What the compiler's listings say of the decode kernels, beside JAX's own kernel of ragged paged attention."""

import os
import re
import subprocess
import sys

import pytest

from rpg_jax.models.ragged import _block
from rpg_jax.planning import topologies

pytestmark = pytest.mark.tpu_compile

SLOTS, HEADS, HEAD, CAPACITY = 32, 2, 128, 4096  # of a chip

_SCRIPT = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention
from rpg_jax import parallel
from rpg_jax.models.ragged import ragged_append, ragged_attention

devices = topologies.get_topology_desc(platform="tpu", topology_name="{topology}").devices
mesh = parallel.make_mesh(dict(fsdp=len(devices)), devices)
slots, whole = jax.P(("replica", "fsdp")), jax.P(None, ("replica", "fsdp"))
L, S, K, H, C, PAGE = 28, {slots} * len(devices), {heads}, {head}, {capacity}, 128

def array(spec, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

def ours(cache, lengths, q, token):
    keys, values, *scales = cache
    mixed = ragged_attention(keys, values, lengths, tuple(scales))(q, token[0], token[0], jnp.int32(3))
    small = token.astype(keys.dtype), token.astype(values.dtype), *(token[..., :1] for _ in scales)
    return ragged_append(cache, lengths, small), mixed

def paged(pages, lengths, q, token):
    def local(pages, lengths, q, token):
        n = len(lengths)
        own = jnp.arange(n * C // PAGE, dtype=jnp.int32).reshape(n, -1)
        pair = jnp.stack([token[0], token[0]], axis=2).reshape(n, 2 * K, H)
        pages = pages.at[own[jnp.arange(n), lengths // PAGE], lengths % PAGE].set(pair)
        queries, count = jnp.arange(n + 1, dtype=jnp.int32), jnp.array([n], jnp.int32)
        options = dict(num_kv_pages_per_block=16, num_queries_per_block={queries}, vmem_limit_bytes=2**26)
        return pages, ragged_paged_attention(q, pages, lengths + 1, own, queries, count, **options)

    specs = slots, slots, slots, whole
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=slots, check_vma=False)(pages, lengths, q, token)

kind = jnp.int8 if "{cache}" == "int8" else jnp.bfloat16
scales = [array(whole, L, S, K, 1, C, dtype=jnp.float32)] * 2 * (kind == jnp.int8)
caches = dict(ours=(array(whole, L, S, K, H, C, dtype=kind), array(whole, L, S, K, C, H, dtype=kind), *scales))
caches["paged"] = array(slots, S * C // PAGE, PAGE, 2 * K, H)
token = array(whole, L, S, K, H)
with parallel.activate(mesh):
    arguments = caches["{kernel}"], array(slots, S, dtype=jnp.int32), array(slots, S, 4 * K, H), token
    memory = jax.jit({kernel}, donate_argnums=0).lower(*arguments).compile().memory_analysis()
print(memory.peak_memory_in_bytes - memory.argument_size_in_bytes)
"""


def compile_kernels(folder, topology, kernel, *, cache="bf16", queries=32):
    """Compiles one decode step's attention and write of a token. Returns bytes beyond arguments, and {file: text}."""
    if (library := topologies.compiler_library()) is None:
        pytest.skip(f"needs the compiler for TPUs: {topologies.GET_COMPILER}")
    listing = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
    described = {"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}
    alone = {"TPU_LIBRARY_PATH": str(library), "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    sizes = {"slots": SLOTS, "heads": HEADS, "head": HEAD, "capacity": CAPACITY}
    script = _SCRIPT.format(topology=topology, kernel=kernel, cache=cache, queries=queries, **sizes)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | listing | described | alone, text=True, stdout=-1, check=True)
    return int(done.stdout.split()[-1]), folder


def listed(folder, kernel, stage):
    """The text of the largest listing of a kernel at a stage of compilation."""
    found = folder.glob(f"*-{kernel}*-{stage}.txt")
    return max(found, key=lambda path: path.stat().st_size).read_text(encoding="utf-8")


def cycles(folder, kernel):
    """Instruction words of the longest loop, each once, without loops in it: cycles of one pass without waiting."""
    loops = [re.findall(r": (>+) ", text) for text in listed(folder, kernel, "final_bundles").split(" LB")[1:]]
    return max(words.count(words[0]) for words in loops if words)


# Cycles of a core in which HBM brings it a byte at full bandwidth. The clock follows from peak FLOP/s: 459e12 = 2 cores
# x 4 arrays of 128 x 128 x 2 x 1.75 GHz, 197e12 = 4 such arrays x 1.5 GHz.
ARRIVAL = {"v5p:2x2x1": 1.75e9 / (2765e9 / 2), "v5e:2x2": 1.5e9 / 819e9}


@pytest.mark.parametrize(
    ("topology", "cache", "most"),
    [("v5p:2x2x1", "bf16", 1.0), ("v5e:2x2", "bf16", 0.7), ("v5p:2x2x1", "int8", 1.05), ("v5e:2x2", "int8", 0.75)],
)
def test_the_cores_share_the_kernels_and_a_block_takes_no_longer_than_planned(tmp_path, topology, cache, most):
    """Where cores wait for each other, how often the loop of one runs, and the cycles of a block beside its arrival."""
    compile_kernels(tmp_path, topology, "ours", cache=cache)
    attend, append = (listed(tmp_path, name, "original") for name in ("ragged_attention", "ragged_append"))
    shared = topology.startswith("v5p")
    assert ("BarrierMegacore" in attend) == ("BarrierMegacore" in append) == shared
    limits = [int(x) for x in re.findall(r"loop: start=0, step=1, limit=(\d+)", append)]
    assert max(limits) == 7 * SLOTS // (1 + shared) + 2  # two more fill and drain the pipeline
    assert "vmatpush.s8" in (bundles := listed(tmp_path, "ragged_attention", "final_bundles")) or cache == "bf16"
    assert "vmatpush.s8" not in bundles or cache == "int8"
    width = 1 if cache == "int8" else 2
    block = _block(HEADS * HEAD, width, CAPACITY)
    arrival = block * 2 * HEADS * (HEAD * width + 4 * (width == 1)) * ARRIVAL[topology]
    took = cycles(tmp_path, "ragged_attention")
    print(f"{topology}, {cache}: a block of {block} takes {took} cycles, its bytes {arrival:.0f}")
    assert 0.5 * most < took / arrival < most


@pytest.mark.parametrize(("queries", "least"), [(1, 0.9), (32, 2.3)])
def test_jax_kernel_of_ragged_paged_attention_uses_one_core_of_two(tmp_path, queries, least):
    """It runs over blocks of 2,048 positions, and multiplies each with `queries` slots' queries (32 by default)."""
    beyond, _ = compile_kernels(tmp_path / "paged", "v5p:2x2x1", "paged", queries=queries)
    own, _ = compile_kernels(tmp_path / "ours", "v5p:2x2x1", "ours")
    assert max(beyond, own) < 2**22, "both write in place"
    assert "BarrierMegacore" not in listed(tmp_path / "paged", "ragged_paged_attention", "original")
    theirs = cycles(tmp_path / "paged", "ragged_paged_attention_kernel") / 2048
    mine = cycles(tmp_path / "ours", "ragged_attention") / _block(HEADS * HEAD, 2, CAPACITY)
    print(f"cycles a position on a core: {theirs:.2f} and {mine:.2f}, here shared by two; beyond: {beyond} and {own}")
    assert theirs > least * mine / 2
