"""Every implementation is the same function: causal, within segments, grouped heads."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import parallel
from rpg_jax.models.attention import attention, chosen
from rpg_jax.models.logical import constrain
from rpg_jax.models.splash import needed_blocks


def random_inputs(B=2, T=128, N=4, K=2, H=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, heads, H), np.float32), dtype) for heads in (N, K, K))
    lengths = jnp.array([[T // 3, T // 2], [T // 5, 0]])
    index = jnp.arange(T)
    segment_ids = 1 + (index >= lengths[:, :1]) - 2 * (index >= T - lengths[:, 1:])  # 1, 2 and padding
    return q, k, v, jnp.maximum(segment_ids, 0)[:B]


def oracle(q, k, v, segment_ids):
    """float64, one query head at a time."""
    q, k, v, segment_ids = (np.asarray(x, np.float64) for x in (q, k, v, segment_ids))
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    mask = np.tri(T, dtype=bool) & (segment_ids[:, :, None] == segment_ids[:, None])
    for n in range(N):
        kv = n * k.shape[2] // N
        scores = np.where(mask, np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, kv]) / np.sqrt(H), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, n] = weights / weights.sum(-1, keepdims=True) @ v[:, :, kv]
    return out


def value_and_gradient(implementation, inputs):
    q, k, v, segment_ids = inputs

    def loss(q, k, v):
        out = attention(q, k, v, segment_ids, implementation=implementation)
        real = (segment_ids > 0)[..., None, None]
        return jnp.where(real, out.astype(jnp.float32) ** 2 * jnp.arange(q.shape[-1]), 0).sum(), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def assert_same(got, expected, segment_ids, **tolerance):
    real = np.asarray(segment_ids > 0)
    np.testing.assert_allclose(np.asarray(got[1])[real], np.asarray(expected[1])[real], **tolerance)
    for a, b in zip(got[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("shape", [{}, {"T": 1536, "B": 1, "N": 2, "K": 1}], ids=["whole", "in blocks of queries"])
def test_xla_attention_is_the_definition(shape):
    inputs = random_inputs(**shape)
    out = jax.jit(attention)(*inputs)
    np.testing.assert_allclose(out, oracle(*inputs), atol=1e-5)  # f32 rounding of averages of about one


@pytest.mark.slow
def test_blocks_of_queries_change_no_gradient(monkeypatch):
    inputs = random_inputs(T=48)
    whole = value_and_gradient("xla", inputs)
    monkeypatch.setattr("rpg_jax.models.attention._BLOCK", 16)
    jax.clear_caches()
    assert_same(value_and_gradient("xla", inputs), whole, inputs[3], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [pytest.param({}, marks=pytest.mark.slow), {"T": 150, "K": 4, "B": 1}], ids=["one block", "padded to two"]
)
def test_splash_interpreted_equals_xla(monkeypatch, shape):
    monkeypatch.setattr("rpg_jax.models.splash.BLOCK", 128)
    inputs = random_inputs(**shape)
    expected = value_and_gradient("xla", inputs)
    assert_same(value_and_gradient("splash", inputs), expected, inputs[3], atol=2e-4, rtol=1e-4)


def test_splash_skips_the_blocks_of_other_completions(monkeypatch):
    monkeypatch.setattr("rpg_jax.models.splash.BLOCK", 128)
    q, k, v, _ = random_inputs(B=1, T=256, N=1, K=1)
    segment_ids = 1 + (jnp.arange(256) >= 128).astype(jnp.int32)[None]
    expected = jax.jit(attention)(q, k, v, segment_ids)
    poisoned = v.at[:, :128].set(jnp.nan)  # a block that is computed multiplies it by zero, which is NaN
    got = jax.jit(lambda *inputs: attention(*inputs, implementation="splash"))(q, k, poisoned, segment_ids)
    np.testing.assert_allclose(got[:, 128:], expected[:, 128:], atol=1e-5)  # f32 rounding


@pytest.mark.parametrize(
    "lengths", [[8], [4, 4], [5, 2], [1, 1, 1, 1, 1], [3], [2, 6], []], ids=lambda lengths: "-".join(map(str, lengths))
)
@pytest.mark.parametrize("first", [0, 4], ids=["whole row", "second half of the queries"])
def test_needed_blocks_are_those_with_a_pair_of_one_completion(lengths, first):
    segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, 8 - sum(lengths)])
    positions = np.arange(first, 8)
    attended = (positions[:, None] >= np.arange(8)) & (segments[first:, None] == segments) & (segments > 0)
    padding = np.eye(8, dtype=bool)[first:] & (segments == 0)
    expected = (attended | padding).reshape(-1, 2, 4, 2).any((1, 3))
    got = needed_blocks(jnp.array(positions), jnp.array(segments[first:]), jnp.array(segments), 2)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("implementation", "mesh_shape", "overrides"),
    [
        ("xla", {"context": 4, "fsdp": 2}, {}),
        ("splash", {"context": 2, "tensor": 2, "fsdp": 2}, {}),
        ("splash", {"tensor": 4, "fsdp": 2}, {"kv_heads": ()}),
    ],
    ids=["xla context", "splash context and heads", "splash with fewer key-value heads than devices"],
)
def test_attention_over_a_sharded_row_equals_one_device(implementation, mesh_shape, overrides):
    inputs = random_inputs(T=256)
    expected = value_and_gradient("xla", inputs)
    with parallel.activate(parallel.make_mesh(mesh_shape), parallel.override(overrides)):
        got = value_and_gradient(implementation, inputs)
    assert_same(got, expected, inputs[3], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("capability", "dtype", "length", "head", "expected"),
    [
        ("9.0", "bfloat16", 12, 64, "cudnn"),
        ("8.0", "float16", 12, 128, "cudnn"),
        ("10.0", "bfloat16", 12, 64, "cudnn"),
        ("7.5", "bfloat16", 12, 64, "xla"),  # a T4
        ("gfx90a", "bfloat16", 12, 64, "xla"),
        ("9.0", "float32", 12, 64, "xla"),
        ("9.0", "bfloat16", 11, 64, "xla"),
        ("9.0", "bfloat16", 12, 20, "xla"),
        ("9.0", "bfloat16", 12, 256, "xla"),
    ],
)
def test_a_gpu_takes_cudnn_where_it_has_the_kernel(monkeypatch, capability, dtype, length, head, expected):
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr("rpg_jax.models.attention.platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert chosen(jnp.dtype(dtype), length, head) == expected


def test_unknown_implementations_and_axes_are_refused():
    inputs = random_inputs(T=8)
    with pytest.raises(ValueError, match="unknown attention implementation 'flash'; known: auto, xla"):
        attention(*inputs, implementation="flash")
    with parallel.activate(parallel.make_mesh({"fsdp": 8})):
        with pytest.raises(ValueError, match=r"no sharding rule for logical axes \['rows'\]"):
            constrain(jnp.zeros(8), "rows")
        with pytest.raises(ValueError, match="two dimensions on one mesh axis"):
            constrain(jnp.zeros((8, 8)), "embed", "batch")
        with pytest.raises(ValueError, match="1 logical axes"):
            constrain(jnp.zeros((8, 8)), "batch")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [510, 512])
def test_cudnn_equals_xla(T):
    inputs = random_inputs(T=T, H=64, dtype=jnp.bfloat16)
    expected = value_and_gradient("xla", inputs)
    # bf16 keeps 8 bits, and the kernels round scores at different points
    got = value_and_gradient("cudnn", inputs)
    real = np.asarray(inputs[3] > 0)
    np.testing.assert_allclose(
        np.asarray(got[1], np.float32)[real], np.asarray(expected[1], np.float32)[real], atol=3e-2
    )
    for a, b in zip(got[0], expected[0], strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)
