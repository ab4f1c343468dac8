"""Compares each kernel of the platform with plain XLA, in shapes of published models: their difference, both times.

  python -m rpg_jax.bench kernels

On a TPU: splash attention, attention over a cache and the write into it (in bfloat16 and in int8), and the products of
experts. On a GPU: attention by cuDNN. Attention and experts are compared with their gradients. A CPU interprets the
TPU's kernels in float32 and in few tokens; then `kernel_seconds` says nothing about a kernel. A GPU before the
generation of A100 has no kernel, and nothing is printed.

`difference` is the largest distance between two vectors, one by the kernel and one by XLA, relative to the length of
XLA's vector, or to the median of all lengths if that is more. A vector is the last axis of a result or of a
gradient. Above `limit` the kernel and XLA compute different things, beyond the rounding of the dtype. Then, or if
a kernel does not compile, the command goes on with the other kernels and ends with exit code 3.

`kernel_seconds` and `xla_seconds` are the median time of a call after the first.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import models
from rpg_jax.models.attention import attention, chosen, decode_attention
from rpg_jax.models.kv_cache import KVCache
from rpg_jax.models.logical import platform
from rpg_jax.models.moe import grouped_product
from rpg_jax.runs import cli
from rpg_jax.storage.errors import say

LIMITS = {"float32": 1e-4, "bfloat16": 3e-2, "int8": 1e-3}
"""What rounding explains. bfloat16 has 8 bits, rounded at other places; with an int8 cache a kernel's sums have 15."""
# The same for attention with its gradients in bfloat16. The gradient of a segment's second query almost cancels, and a
# kernel takes it from the output that it has rounded: cuDNN on an H100 has 0.13. A wrong mask makes 1 and more.
GRADIENTS = 0.25
DENSE = ("Qwen2.5-0.5B", "Qwen3-8B")  # heads of size 64 and 128
EXPERTS = "Qwen3-30B-A3B"
CALLS = 10  # within one measured time: a call takes less than its start

Step = Callable[[], Any]
"""A call; it returns what is compared."""


class Case(NamedTuple):
    """A kernel in one shape.

    Attributes:
      name: what the kernel computes.
      kernel: the implementation to compare with "xla".
      model: the published size that gives the shape.
      dtype: of the inputs, or "int8" for an int8 cache.
      start: `start(implementation, dtype, **sizes)` makes inputs, equal for all implementations, and returns a call.
      sizes: the size of each axis by its letter.
      limit: the largest `difference` that passes.
    """

    name: str
    kernel: str
    model: str
    dtype: str
    start: Callable[..., Step]
    sizes: Mapping[str, int]
    limit: float


def arguments(parser: cli.Parser) -> None:
    """Adds the options of this command to its parser."""
    parser.add_argument("--repeats", type=cli.number(int, 1), default=5, help="measured times of each (default 5)")


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the measurement of each kernel of this platform, a dict of fields. Progress goes to stderr. In the end
    raises `cli.Ended` if some kernel failed or differs from XLA."""
    wrong = []
    for case in cases(platform()):
        say(f"{case.name} in {case.dtype}, {case.model}")
        found = measured(case, arguments.repeats)
        if not found["passed"]:
            wrong.append(f"{case.name} in {case.dtype} of {case.model}")
        yield found
    if wrong:
        raise cli.Ended(f"these kernels are not what plain XLA computes: {', '.join(wrong)}", cli.GAVE_UP)


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Returns one kernel's measurement, a dict: what was compared, "difference", "kernel_seconds", "xla_seconds" and
    "passed". If the kernel raises an error, "error" replaces difference and seconds, and "passed" is False."""
    found: dict[str, Any] = {"bench": "kernels", "name": case.name, "kernel": case.kernel, "model": case.model}
    found |= {"shape": " ".join(f"{letter}={size}" for letter, size in case.sizes.items()), "dtype": case.dtype}
    found |= {"device": jax.devices()[0].device_kind, "interpreted": platform() == "cpu", "limit": case.limit}
    try:
        kernel = case.start(case.kernel, case.dtype, **case.sizes)
        ours = jax.block_until_ready(kernel())
    except Exception as error:  # of a compiler: any kind
        words = " ".join(str(error).split())
        return found | {"error": f"{type(error).__name__}: {words[:500]}", "passed": False}
    plain = case.start("xla", case.dtype, **case.sizes)
    difference = max(map(float, jax.tree.leaves(jax.tree.map(_difference, ours, plain()))))
    del ours
    found |= {"difference": difference, "kernel_seconds": _seconds(kernel, repeats)}
    return found | {"xla_seconds": _seconds(plain, repeats), "passed": difference <= case.limit}


def cases(platform: str) -> Iterator[Case]:
    """Yields every kernel of `platform`, "cpu", "gpu" or "tpu", in its shapes; none for a GPU that lacks cuDNN's."""
    if platform == "gpu" and chosen(jnp.dtype("bfloat16"), 512, 64) != "cudnn":
        return
    small, dtype = platform == "cpu", "float32" if platform == "cpu" else "bfloat16"
    limit, name = LIMITS[dtype], "cudnn" if platform == "gpu" else "splash"
    rows, slots = ({"B": 1, "T": 256}, {"S": 3, "C": 256}) if small else ({"B": 2, "T": 4096}, {"S": 64, "C": 2048})
    for model in DENSE:
        config = models.size(model)
        K = 1 if small else config.num_kv_heads
        heads = {"N": config.num_heads // config.num_kv_heads * K, "K": K, "H": config.head_dim}
        yield Case(f"{name} attention", name, model, dtype, _train, rows | heads, limit if small else GRADIENTS)
        for kind in () if platform == "gpu" else (dtype, "int8"):
            yield Case("ragged attention", "ragged", model, kind, _decode, slots | heads, max(limit, LIMITS[kind]))
            yield Case("ragged append", "ragged", model, kind, _append, slots | heads, 0.0)
    config = models.size(EXPERTS)
    if platform != "gpu" and config.experts:
        sizes = {"M": 2048 * config.experts.per_token, "E": config.experts.count, "D": config.embed_dim}
        sizes = {"M": 160, "E": 4, "D": 256, "F": 128} if small else sizes | {"F": config.experts.hidden_dim}
        yield Case("products of experts", "megablox", EXPERTS, dtype, _experts, sizes, limit)


def _seconds(step: Step, repeats: int) -> float:
    calls, times = 1 if platform() == "cpu" else CALLS, []
    jax.block_until_ready(step())
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready([step() for _ in range(calls)][-1])
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


@jax.jit
def _difference(ours: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the largest relative distance of two vectors (the last axes); infinity where a vector is not finite."""
    ours, expected = ours.astype(jnp.float32), expected.astype(jnp.float32)
    lengths = jnp.linalg.norm(expected, axis=-1)
    typical = jnp.maximum(jnp.median(lengths), 1e-30)
    relative = jnp.linalg.norm(ours - expected, axis=-1) / jnp.maximum(lengths, typical)
    return jnp.max(jnp.where(jnp.isfinite(relative), relative, jnp.inf))


def _normal(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Returns arrays of random numbers in `dtype`, and for "int8" in the dtype of the queries beside such a cache."""
    dtype = dtype if dtype != "int8" else "float32" if platform() == "cpu" else "bfloat16"
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def _train(implementation: str, dtype: str, *, B: int, T: int, N: int, K: int, H: int) -> Step:
    """Returns a call of attention in packed rows of two segments and padding, with its gradients."""
    q, k, v, weight = _normal(dtype, (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    index, second = jnp.arange(T), jnp.array([[T // 3], [T // 2]])[:B]
    segments = jnp.where(index < T - T // 5, 1 + (index >= second), 0).astype(jnp.int32)
    real = (segments > 0)[..., None, None]

    def loss(q, k, v):
        out = jnp.where(real, attention(q, k, v, segments, implementation=implementation), 0)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    return functools.partial(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)), q, k, v)


def _cache(dtype: str, S: int, C: int, K: int, H: int) -> KVCache:
    """Returns a cache of two layers, whose slots are filled from nothing to almost all."""
    keys, values = _normal(dtype, (2, S, K, H, C), (2, S, K, C, H))
    cache = KVCache(keys, values, jnp.linspace(0, C - 64, S).astype(jnp.int32))
    return jax.jit(KVCache.rounded)(cache) if dtype == "int8" else cache


def _decode(implementation: str, dtype: str, *, S: int, C: int, N: int, K: int, H: int) -> Step:
    tokens = _normal(dtype, (S, N, H), (S, K, H), (S, K, H))

    @jax.jit
    def step(cache, q, k, v):
        return decode_attention(cache, ragged=implementation == "ragged")(q, k, v, jnp.int32(1))

    return functools.partial(step, _cache(dtype, S, C, K, H), *tokens)


def _append(implementation: str, dtype: str, *, S: int, C: int, N: int, K: int, H: int) -> Step:
    """Returns a call that writes one token a slot, in place, at the lengths that the call before has left."""
    cache, (k, v) = _cache(dtype, S, C, K, H), _normal(dtype, (2, S, K, H), (2, S, K, H))
    append = jax.jit(functools.partial(KVCache.append, ragged=implementation == "ragged"), donate_argnums=0)

    def step():
        nonlocal cache
        cache = append(cache, k, v)
        return cache.keys, cache.values, cache.scales

    return step


def _experts(implementation: str, dtype: str, *, M: int, E: int, D: int, F: int) -> Step:
    """Makes a call that multiplies rows by their experts' matrices, with both gradients. Experts get unequal shares."""
    rows, matrices, weight = _normal(dtype, (M, D), (E, D, F), (M, F))
    shares = np.random.default_rng(0).dirichlet(np.ones(E))
    counts = jnp.asarray(np.floor(shares * (M - 5)), jnp.int32)  # the last rows belong to no expert

    def loss(rows, matrices):
        out = grouped_product(rows, matrices, counts, megablox=implementation == "megablox")
        return jnp.sum(out.astype(jnp.float32) * weight), out

    return functools.partial(jax.jit(jax.grad(loss, (0, 1), has_aux=True)), rows, matrices)
