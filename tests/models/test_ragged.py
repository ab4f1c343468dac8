"""The TPU decode kernels, interpreted, are the plain attention over a cache and the plain write into it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import parallel
from rpg_jax.models.attention import decode_attention
from rpg_jax.models.kv_cache import KVCache
from rpg_jax.models.ragged import _block, _halves, _joined, _walk

LAYERS, HEAD = 2, 16


def normal(seed, shape, dtype=jnp.float32):
    """NumPy's numbers, because jax.random compiles anew for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def random_cache(lengths, kv_heads=2, capacity=96, dtype=jnp.float32):
    """A cache that holds NaN past each slot's length."""
    lead, lengths = (LAYERS, len(lengths), kv_heads), jnp.array(lengths, jnp.int32)
    keys = normal(1, (*lead, HEAD, capacity), dtype)
    values = normal(2, (*lead, capacity, HEAD), dtype)
    past = (jnp.arange(capacity) >= lengths[:, None])[None, :, None, None]
    return KVCache(jnp.where(past, jnp.nan, keys), jnp.where(past.swapaxes(-1, -2), jnp.nan, values), lengths)


def in_eight_bits(cache):
    """The cache in int8, with the largest entry and a scale of NaN past each slot's length."""
    past = jnp.arange(cache.capacity) >= cache.lengths[:, None]
    past = past[None, :, None, None]
    filled = jax.tree.map(jnp.nan_to_num, cache).rounded()
    return filled.replace(
        keys=jnp.where(past, jnp.int8(127), filled.keys),
        values=jnp.where(past.swapaxes(-1, -2), jnp.int8(127), filled.values),
        scales=tuple(jnp.where(past, jnp.nan, x) for x in filled.scales),
    )


def expanded(cache):
    keys, values = cache.keys * cache.scales[0], cache.values * cache.scales[1].swapaxes(-1, -2)
    return KVCache(keys, values, cache.lengths)


def random_token(slots, heads, kv_heads, dtype=jnp.float32):
    return tuple(normal(seed, (slots, n, HEAD), dtype) for seed, n in enumerate((heads, kv_heads, kv_heads)))


def oracle(token, cache, layer):
    """float64, one slot and query head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in token)
    keys, values = (np.asarray(x[layer], np.float64) for x in (cache.keys, cache.values))
    out = np.zeros_like(q)
    for s, length in enumerate(cache.lengths.tolist()):
        for n in range(q.shape[1]):
            kv = n * k.shape[1] // q.shape[1]
            scores = np.append(q[s, n] @ keys[s, kv, :, :length], q[s, n] @ k[s, kv]) / np.sqrt(HEAD)
            weights = np.exp(scores - scores.max())
            out[s, n] = weights / weights.sum() @ np.concatenate([values[s, kv, :length], v[s, kv][None]])
    return out


def attend(implementation, token, cache):
    def both(token, cache):
        function = decode_attention(cache, ragged=implementation == "ragged")
        return jnp.stack([function(*token, jnp.int32(layer)) for layer in range(LAYERS)])

    return jax.jit(both)(token, cache)


@pytest.fixture
def blocks_of_32(monkeypatch):
    """Few of them are on their way at a time, so that buffers are used again."""
    monkeypatch.setattr("rpg_jax.models.ragged._block", lambda numbers, width, capacity: 32)
    monkeypatch.setattr("rpg_jax.models.ragged._FLIGHT_BYTES", 20_000)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "capacity", "cores"),
    [pytest.param(6, 2, 96, 1, marks=pytest.mark.slow), (3, 1, 64, 2)],
    ids=["one core", "two cores"],
)
def test_the_kernel_reads_what_each_slot_has_filled_and_nothing_else(
    blocks_of_32, monkeypatch, heads, kv_heads, capacity, cores
):
    monkeypatch.setattr("rpg_jax.models.ragged.tensor_cores", lambda: cores)
    cache = random_cache([0, 1, 31, 32, 33, 63, capacity], kv_heads, capacity)
    token = random_token(7, heads, kv_heads)
    expected = np.stack([oracle(token, cache, layer) for layer in range(LAYERS)])
    np.testing.assert_allclose(attend("ragged", token, cache), expected, atol=2e-6)  # f32 rounding of values of order 1


@pytest.mark.parametrize(
    "lengths",
    [[0, 0], [96, 1], [1, 96], [5, 64, 33, 96, 0, 7, 96], [96] * 8],
    ids=str,
)
def test_two_cores_share_the_blocks_and_each_has_whole_slots(lengths):
    bounds, slots, blocks, _ = (x.tolist() for x in _walk(jnp.array(lengths, jnp.int32), 96, 32, 2))
    first, cut, end = bounds
    per_slot = [max(1, -(-n // 32)) for n in lengths]
    walked = list(zip(slots, blocks, strict=True))[:end]
    assert first == 0 and walked == [(slot, block) for slot, count in enumerate(per_slot) for block in range(count)]
    assert 0 < cut < end and blocks[cut] == 0  # a slot that both had would have half of its sum in each
    assert abs(cut - end / 2) <= max(per_slot) / 2 or cut in (per_slot[0], end - per_slot[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "int8"), [("xla", True), ("ragged", True), ("ragged", False)])
def test_a_cache_in_eight_bits_is_read_as_what_its_entries_stand_for(blocks_of_32, monkeypatch, implementation, int8):
    monkeypatch.setattr("rpg_jax.models.ragged.multiplies_int8", lambda: int8)
    cache, token = in_eight_bits(random_cache([0, 1, 33, 96])), random_token(4, 6, 2)
    cache = cache if implementation == "ragged" else jax.tree.map(jnp.nan_to_num, cache)
    expected = np.stack([oracle(token, expanded(cache), layer) for layer in range(LAYERS)])
    # f32 rounding; the kernel's queries and weights have 15 bits
    atol = {"xla": 2e-6, "ragged": 1e-4}[implementation]
    np.testing.assert_allclose(attend(implementation, token, cache), expected, atol=atol)


def test_two_halves_in_eight_bits_have_fifteen():
    x = normal(3, (2, 3, 257)) * jnp.exp(4 * normal(4, (2, 3, 1)))
    halves, unit = _halves(x.at[0, 0].set(0), jnp.int8)
    assert halves.dtype == jnp.int8 and halves.shape == (2, 6, 257)
    error = jnp.abs(_joined(halves.astype(jnp.int32), unit) - x.at[0, 0].set(0))
    assert float((error / jnp.abs(x).max(-1, keepdims=True)).max()) < 1 / 64_000


def test_rounding_to_eight_bits_moves_no_entry_by_more_than_half_a_step():
    cache = random_cache([96, 96])
    rounded = expanded(cache.rounded())
    for exact, near, axis in ((cache.keys, rounded.keys, -2), (cache.values, rounded.values, -1)):
        step = jnp.abs(exact).max(axis, keepdims=True) / 127
        assert float((jnp.abs(near - exact) / step).max()) <= 0.5 + 1e-4  # f32 division


@pytest.mark.slow
def test_bfloat16_rounds_the_weights_as_the_plain_path_does(blocks_of_32):
    cache = random_cache([5, 90], dtype=jnp.bfloat16)
    filled = jax.tree.map(lambda x: jnp.nan_to_num(x) if x.ndim > 1 else x, cache)
    token = random_token(2, 4, 2, jnp.bfloat16)
    got, expected = attend("ragged", token, cache), attend("xla", token, filled)
    assert got.dtype == jnp.bfloat16
    # 8 bits of the weights and of the result; the running softmax rounds weights at another peak
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=2e-2)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_appending_by_the_kernel_writes_the_same_bits(dtype):
    lengths = [0, 15, 16, 127, 128, 207, 208]
    cache = random_cache(lengths, capacity=208, dtype=dtype)
    k, v = (normal(i, (LAYERS, len(lengths), 2, HEAD), dtype) for i in (4, 5))
    plain, kernel = (
        jax.jit(KVCache.append, static_argnames="ragged")(cache, k, v, ragged=ragged) for ragged in (False, True)
    )
    for got, expected in zip(jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize(
    ("numbers", "width", "capacity", "positions"),
    [(256, 2, 4096, 256), (1024, 2, 4096, 256), (128, 2, 4096, 512), (256, 1, 4096, 1024), (1024, 1, 4096, 512)]
    + [
        (256, 4, 4096, 128),
        (65_536, 4, 4096, 128),
        (256, 2, 96, 96),
        (96, 2, 4096, 512),
        (256, 1, 1152, 384),
        (256, 1, 1408, 128),
        (256, 1, 640, 640),
    ],
)
def test_a_block_has_an_eighth_of_a_mebibyte_of_keys_twice_that_in_int8_or_a_few_hundred_positions(
    numbers, width, capacity, positions
):
    assert _block(numbers, width, capacity) == positions


def test_the_tile_of_one_layer_may_exceed_a_block():
    """A tile has 128 positions. Here they hold 1 MiB of bfloat16 keys, as with 32 heads of size 128."""
    cache = jax.eval_shape(lambda: random_cache([0, 1], kv_heads=256, capacity=256, dtype=jnp.bfloat16))
    token = jax.ShapeDtypeStruct((LAYERS, 2, 256, HEAD), jnp.bfloat16)
    grown = jax.eval_shape(lambda c, k, v: c.append(k, v, ragged=True), cache, token, token)
    assert jax.tree.leaves(grown) == jax.tree.leaves(cache)


@pytest.mark.slow
def test_tokens_appended_in_eight_bits_are_those_of_a_cache_rounded_at_once():
    cache = random_cache([0, 15, 127, 207], capacity=208)
    k, v = (normal(i, (LAYERS, 4, 2, HEAD)) for i in (4, 5))
    dense = jax.tree.map(jnp.nan_to_num, cache.append(k, v)).rounded()
    for ragged in (False, True):
        grown = jax.jit(lambda c, ragged=ragged: c.append(k, v, ragged=ragged))(in_eight_bits(cache))
        assert grown.keys.dtype == grown.values.dtype == jnp.int8
        for slot, n in enumerate(dense.lengths.tolist()):
            for got, expected in zip((grown.keys, *grown.scales), (dense.keys, *dense.scales), strict=True):
                np.testing.assert_array_equal(got[:, slot, ..., :n], expected[:, slot, ..., :n])
            np.testing.assert_array_equal(grown.values[:, slot, :, :n], dense.values[:, slot, :, :n])


@pytest.mark.slow  # interpreted on eight devices
@pytest.mark.parametrize(
    ("mesh_shape", "overrides"),
    [({"fsdp": 4, "tensor": 2}, {}), ({"replica": 2, "tensor": 4}, {"kv_heads": ()})],
    ids=["slots and heads", "fewer key-value heads than devices"],
)
def test_the_kernels_spread_over_a_mesh_give_the_same(blocks_of_32, mesh_shape, overrides):
    cache, token = random_cache([0, 96, 40, 31, 32, 33, 7, 64]), random_token(8, 4, 2)
    expected = attend("ragged", token, cache)
    rules = parallel.override(overrides)
    with parallel.activate(mesh := parallel.make_mesh(mesh_shape), rules):
        where = parallel.shardings(cache.logical_axes, cache, mesh, rules)
        spread = jax.device_put(cache, where)
        np.testing.assert_allclose(attend("ragged", token, spread), expected, atol=1e-6)  # the same sums, compiled anew
        k, v = (jnp.stack([x, x + 1]) for x in token[1:])
        grown = jax.jit(lambda cache: cache.append(k, v, ragged=True))(spread)
    jax.tree.map(np.testing.assert_array_equal, grown, cache.append(k, v))


@pytest.mark.slow  # interpreted on two devices
def test_a_kernel_without_the_key_value_heads_of_its_queries_would_give_other_numbers(blocks_of_32, monkeypatch):
    """`parallel.rules.check` refuses such rules."""
    cache, token = random_cache([0, 96, 40, 31]), random_token(4, 4, 2)
    monkeypatch.setattr("rpg_jax.parallel.rules.check", lambda rules, sizes: None)
    rules = parallel.override({"heads": ()})
    with parallel.activate(mesh := parallel.make_mesh({"tensor": 2}, jax.devices()[:2]), rules):
        spread = jax.device_put(cache, parallel.shardings(cache.logical_axes, cache, mesh, rules))
        got = attend("ragged", token, spread)
    assert float(jnp.abs(got - attend("ragged", token, cache)).max()) > 0.1
