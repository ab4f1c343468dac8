"""One set of weights, several ways to run it: all agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rpg_jax import models, parallel
from rpg_jax.models import DecoderConfig, Experts, KVCache, Rope
from rpg_jax.models.moe import MoE
from rpg_jax.models.weights import Declare

QWEN3 = DecoderConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    hidden_dim=48,
    rope=Rope(10_000.0),
    tie_embeddings=False,
)
QWEN2 = dataclasses.replace(QWEN3, tie_embeddings=True, qkv_bias=True, qk_norm=False, num_kv_heads=8)
MOE = dataclasses.replace(QWEN3, experts=Experts(8, 3, 16))
PLAIN = dataclasses.replace(QWEN3, qk_norm=False)
FAMILIES = {"qwen3": QWEN3, "qwen2": QWEN2, "plain": PLAIN}

# f32: the orders of summation differ between the ways of computing the same hidden state of magnitude about 1.
ROUNDING = dict(atol=1e-5, rtol=1e-5)


def build(config, **kinds):
    """A model whose norms and biases are random as well, so that ignoring one shows."""
    graphdef, params = models.init(config, **kinds)
    rng = np.random.default_rng(7)  # NumPy, because jax.random compiles anew for each shape
    return graphdef, jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + np.float32(0.1) * rng.standard_normal(x.shape, "f4")), params
    )


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, *batch):
    return nnx.merge(graphdef, params)(*batch)


@functools.partial(jax.jit, static_argnums=0)
def prefill(graphdef, params, tokens, lengths):
    return nnx.merge(graphdef, params).prefill(tokens, lengths)[:2]


@functools.partial(jax.jit, static_argnums=0, static_argnames="attend_length")
def decode(graphdef, params, tokens, cache, attend_length=None):
    return nnx.merge(graphdef, params).decode(tokens, cache, attend_length=attend_length)[:2]


def random_tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, QWEN3.vocab_size, shape, np.int32))


def rows(tokens):
    """Positions and segment ids of unpacked, unpadded rows."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_prefill_and_decode_equal_the_full_forward(family):
    config = FAMILIES[family]
    graphdef, params = build(config)
    tokens = random_tokens((4, 12))
    full = forward(graphdef, params, tokens, *rows(tokens))
    lengths = np.array([7, 3, 1, 6])

    hidden, prefix = prefill(graphdef, params, tokens[:, :8], jnp.asarray(lengths))
    np.testing.assert_allclose(hidden, full[np.arange(4), lengths - 1], **ROUNDING)

    cache = KVCache.empty(config, slots=4, capacity=16)
    cache = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, 1e3), cache)  # garbage is never read
    for row in range(4):
        cache = cache.insert(prefix, slot=3 - row, row=row)
    for _ in range(5):
        hidden, cache = decode(graphdef, params, tokens[np.arange(4), lengths][::-1], cache)
        np.testing.assert_allclose(hidden[::-1], full[np.arange(4), lengths], **ROUNDING)
        lengths += 1
    np.testing.assert_array_equal(cache.lengths, lengths[::-1])


def test_an_int8_cache_is_not_split_into_layers():
    with pytest.raises(ValueError, match="int8 cache is not unstacked"):
        KVCache.empty(QWEN3, slots=1, capacity=8, int8=True, unstacked=True)


@functools.partial(jax.jit, static_argnums=0)
def extend(graphdef, params, *inputs):
    return nnx.merge(graphdef, params).extend(*inputs)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_tokens_appended_to_slots_equal_the_full_forward(int8):
    """Also beside the end of a cache, beyond which a padded piece would reach."""
    graphdef, params = build(QWEN3)
    tokens = random_tokens((3, 16))
    full = forward(graphdef, params, tokens, *rows(tokens))
    first, more = np.array([3, 8, 5]), np.array([4, 7, 0])
    _, prefix = prefill(graphdef, params, tokens[:, :9], jnp.asarray(first))
    cache = KVCache.empty(QWEN3, slots=5, capacity=16, int8=int8)
    cache = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, 9), cache)  # garbage is never read
    slots = np.array([4, 1, 7])  # the third row is padding: its slot is out of range
    for row in range(2):
        cache = cache.insert(prefix, slot=int(slots[row]), row=row)

    pieces = np.stack([np.pad(row[n : n + m], (0, 9 - m)) for row, n, m in zip(tokens, first, more, strict=True)])
    hidden, grown = extend(graphdef, params, jnp.asarray(pieces), more, cache, slots, first)
    close = dict(atol=0.05) if int8 else ROUNDING
    np.testing.assert_allclose(hidden[:2], full[np.arange(2), (first + more - 1)[:2]], **close)
    assert np.abs(hidden[0] - full[0, first[0]]).max() > 0.1, "the tolerance can tell one token from another"

    lengths = jnp.zeros(5, jnp.int32).at[slots[:2]].set((first + more)[:2])
    _, whole = prefill(graphdef, params, tokens, jnp.asarray(first + more))
    for row in range(2):
        n = first[row] + more[row]
        a, b = grown.keys[:, slots[row], ..., :n], whole.keys[:, row, ..., :n]
        a = a * grown.scales[0][:, slots[row], ..., :n] if int8 else a
        np.testing.assert_allclose(a, b, **close)
        np.testing.assert_array_equal(grown.keys[:, slots[row], ..., n:], cache.keys[:, slots[row], ..., n:])
        np.testing.assert_array_equal(grown.values[:, slots[row], :, n:], cache.values[:, slots[row], :, n:])
    others = np.array([0, 2, 3])
    np.testing.assert_array_equal(grown.keys[:, others], cache.keys[:, others])
    drawn = jnp.zeros(5, jnp.int32).at[slots[:2]].set(tokens[np.arange(2), (first + more)[:2]])
    hidden, _ = decode(graphdef, params, drawn, dataclasses.replace(grown, lengths=lengths))
    np.testing.assert_allclose(hidden[slots[:2]], full[np.arange(2), (first + more)[:2]], **close)


def test_a_slot_that_is_not_active_keeps_its_entries():
    graphdef, params = build(QWEN3)
    _, prefix = prefill(graphdef, params, random_tokens((2, 4)), jnp.array([4, 2]))
    cache = KVCache.empty(QWEN3, slots=2, capacity=8).insert(prefix, slot=0).insert(prefix, slot=1, row=1)
    module = nnx.merge(graphdef, params)
    _, grown, _ = jax.jit(lambda c: module.decode(jnp.array([3, 3]), c, active=jnp.array([False, True])))(cache)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 0], b[:, 0]), grown.keys, cache.keys)
    np.testing.assert_array_equal(grown.values[:, 0], cache.values[:, 0])
    assert (grown.keys[:, 1, ..., 2] != cache.keys[:, 1, ..., 2]).any()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_layers_that_are_not_scanned_decode_as_scanned_ones(family):
    """Three tokens: a slot of another length, one at the end of what is read, and one that is not active."""
    config = FAMILIES[family]
    graphdef, params = build(config)
    _, prefix = prefill(graphdef, params, random_tokens((3, 4), seed=8), jnp.array([4, 1, 2]))
    cache = KVCache.empty(config, slots=3, capacity=8)
    for slot in range(3):
        cache = cache.insert(prefix, slot=slot, row=slot)
    steps, active = random_tokens((3, 3), seed=9), jnp.array([True, True, False])

    @functools.partial(jax.jit, static_argnums=0)
    def both(unrolled, params, cache):
        module = nnx.merge(graphdef, params)
        layers = module.unstacked_layers() if unrolled else None
        held, found = cache.unstacked() if unrolled else cache, []
        for tokens in steps:
            hidden, held, _ = module.decode(tokens, held, attend_length=7, active=active, layers=layers)
            found.append(hidden[:2])
        return jnp.stack(found), held.stacked() if unrolled else held

    (expected, grown), (hidden, own) = both(False, params, cache), both(True, params, cache)
    np.testing.assert_allclose(hidden, expected, **ROUNDING)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), own, grown)
    np.testing.assert_array_equal(own.lengths, [7, 4, 5])
    assert (own.keys[:, 0] != cache.keys[:, 0]).any()
    np.testing.assert_array_equal(own.keys[:, 2], cache.keys[:, 2])
    np.testing.assert_array_equal(own.values[:, 2], cache.values[:, 2])


@pytest.mark.parametrize(("layers", "int8", "unrolled"), [(2, False, True), (9, False, False), (2, True, False)])
def test_few_layers_over_a_float_cache_are_not_scanned_on_a_cpu(layers, int8, unrolled):
    config = dataclasses.replace(QWEN3, num_layers=layers)
    module = nnx.merge(*models.abstract(config))
    assert module.decodes_unrolled(int8_kv=int8) == unrolled


def test_one_prefix_fills_several_slots():
    graphdef, params = build(QWEN3)
    _, prefix = prefill(graphdef, params, random_tokens((2, 4)), jnp.array([4, 2]))
    cache = KVCache.empty(QWEN3, slots=3, capacity=8).insert(prefix, slot=0, row=1).insert(prefix, slot=2, row=1)
    np.testing.assert_array_equal(cache.lengths, [2, 0, 2])
    np.testing.assert_array_equal(cache.keys[:, 0, ..., :4], prefix.keys[:, 1])
    np.testing.assert_array_equal(cache.values[:, 2, :, :4], prefix.values[:, 1])
    assert not cache.keys[:, 1].any()
    with pytest.raises(ValueError, match="capacity 4 does not fit a cache of capacity 2"):
        KVCache.empty(QWEN3, slots=1, capacity=2).insert(prefix, slot=0)


def test_attend_length_reads_less_and_changes_nothing():
    graphdef, params = build(QWEN3)
    tokens = random_tokens((2, 5))
    _, prefix = prefill(graphdef, params, tokens, jnp.array([5, 3]))
    cache = KVCache.empty(QWEN3, slots=2, capacity=32)
    for row in range(2):
        cache = cache.insert(prefix, slot=row, row=row)
    whole, grown = decode(graphdef, params, tokens[:, 0], cache)
    part, grown_part = decode(graphdef, params, tokens[:, 0], cache, attend_length=8)
    np.testing.assert_allclose(part, whole, **ROUNDING)
    np.testing.assert_allclose(grown_part.keys, grown.keys, **ROUNDING)
    with pytest.raises(ValueError, match=r"attend_length 33 must be in 1\.\.32"):
        decode(graphdef, params, tokens[:, 0], cache, attend_length=33)


def test_packed_segments_equal_separate_rows():
    graphdef, params = build(QWEN3)
    tokens = random_tokens((1, 11))
    segments = [slice(0, 4), slice(4, 9), slice(9, 11)]
    positions = jnp.concatenate([jnp.arange(s.stop - s.start) for s in segments])[None]
    segment_ids = jnp.concatenate([jnp.full(s.stop - s.start, i + 1) for i, s in enumerate(segments)])[None]
    packed = forward(graphdef, params, tokens, positions, segment_ids)
    for s in segments:
        np.testing.assert_allclose(
            packed[:, s], forward(graphdef, params, tokens[:, s], *rows(tokens[:, s])), **ROUNDING
        )


def test_padding_contents_never_change_a_hidden_state_or_gradient():
    graphdef, params = build(QWEN3)
    segment_ids = jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]])
    positions = jnp.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 1, 0]])

    def loss(params, tokens, positions):
        hidden = nnx.merge(graphdef, params)(tokens, positions, segment_ids)
        return jnp.where(segment_ids[..., None] > 0, hidden**2, 0).sum()

    tokens = random_tokens((2, 6))
    rubbish = jnp.where(segment_ids > 0, tokens, 63 - tokens)
    far = jnp.where(segment_ids > 0, positions, 1000)
    step = jax.jit(jax.value_and_grad(loss))
    value, gradient = step(params, tokens, positions)
    other, other_gradient = step(params, rubbish, far)
    assert value == other
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), gradient, other_gradient)


def reference(params, config, tokens, recorded=None):
    """Hidden states [T, D] of one row, and its tokens' experts [T, L, k], in float64 NumPy: a Python loop over layers,
    heads repeated, rotation as complex numbers, all experts computed. `recorded` are experts to use [T, L, k]."""
    weight = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    turns = np.exp(1j * np.arange(len(tokens))[:, None] * config.rope.theta ** (-np.arange(0, H, 2) / H))

    def norm(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w

    def rotate(x):
        turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turns[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    def swiglu(x, gate, up, down):
        gated = x @ gate
        return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down

    x, chosen = weight["embed"][tokens], []
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda w, i=i: w[i], weight["layers"])
        heads, mlp = layer["attention"], layer["mlp"]
        h = norm(x, layer["attention_norm"])
        q, k, v = (np.einsum("td,dnh->tnh", h, heads[n]) + heads.get(f"{n}_bias", 0) for n in "qkv")
        if config.qk_norm:
            q, k = norm(q, heads["q_norm"]), norm(k, heads["k_norm"])
        q, k, v = rotate(q), np.repeat(rotate(k), N // K, 1), np.repeat(v, N // K, 1)
        scores = np.exp(np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)) * np.tri(len(tokens))
        mixed = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
        x = x + np.einsum("tnh,nhd->td", mixed, heads["o"])
        h = norm(x, layer["mlp_norm"])
        matrices = [mlp[name] for name in ("gate", "up", "down")]
        if config.experts is None:
            x = x + swiglu(h, *matrices)
            continue
        shares = np.exp(h @ mlp["router"])
        own = np.argsort(-shares, -1)[:, : config.experts.per_token]
        chosen.append(own if recorded is None else recorded[:, i])
        shares = shares * (chosen[-1][..., None] == np.arange(config.experts.count)).any(1)
        outs = np.stack([swiglu(h, *(w[e] for w in matrices)) for e in range(config.experts.count)], 1)
        x = x + np.einsum("te,ted->td", shares / shares.sum(-1, keepdims=True), outs)
    return norm(x, weight["final_norm"]), np.stack(chosen, 1) if chosen else None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scanned_model_equals_a_loop_over_layers_in_float64(family):
    graphdef, params = build(FAMILIES[family])
    module = nnx.merge(graphdef, params)
    tokens = random_tokens((2, 9))
    hidden = forward(graphdef, params, tokens, *rows(tokens))
    for row in range(2):
        np.testing.assert_allclose(hidden[row], reference(params, FAMILIES[family], tokens[row])[0], **ROUNDING)
    head = params["embed"] if FAMILIES[family].tie_embeddings else params["lm_head"]
    np.testing.assert_allclose(module.logits(hidden), hidden @ head.T, **ROUNDING)


@functools.partial(jax.jit, static_argnums=0)
def replayed(graphdef, params, tokens, experts):
    """Hidden states of rows, and the gradient of a sum of their squares."""

    def loss(params):
        hidden = nnx.merge(graphdef, params)(tokens, *rows(tokens), experts=experts)
        return (hidden**2 * jnp.arange(1, hidden.shape[-1] + 1)).sum(), hidden

    (_, hidden), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return hidden, gradient


@pytest.mark.slow  # compiles, or waits, for seconds
def test_a_replay_of_the_model_s_own_experts_is_the_pass_and_its_gradient():
    graphdef, params = build(MOE)
    tokens = random_tokens((2, 7))
    own = nnx.merge(graphdef, params).routed(tokens, *rows(tokens))[1]
    (hidden, gradient), (again, other) = (replayed(graphdef, params, tokens, x) for x in (None, own))
    np.testing.assert_array_equal(hidden, again)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), gradient, other)


def changed_record(own, how, rng):
    """A record of experts that differs from `own` [B, T, L, k]."""
    match how:
        case "random":
            return np.argsort(rng.random((*own.shape[:3], 8)), -1)[..., :3].astype(np.uint8)
        case "shifted by one token":
            return np.roll(own, 1, axis=1)
        case "of another layer":
            return own[:, :, ::-1]
        case "of another row":
            return own[::-1]


@pytest.mark.parametrize("how", ["random", "shifted by one token", "of another layer", "of another row"])
def test_a_replay_follows_the_record_and_weighs_it_by_the_router(how):
    graphdef, params = build(MOE)
    tokens = random_tokens((2, 7))
    hidden, own = nnx.merge(graphdef, params).routed(tokens, *rows(tokens))
    record = changed_record(np.asarray(own), how, np.random.default_rng(0))
    found, used = nnx.merge(graphdef, params).routed(tokens, *rows(tokens), experts=record)
    np.testing.assert_array_equal(used, record)
    for row in range(2):
        np.testing.assert_allclose(found[row], reference(params, MOE, tokens[row], record[row])[0], **ROUNDING)
    assert np.abs(found - hidden).max() > 0.1, "the record is not the model's own"


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_gradient_of_a_replay_is_that_of_a_dense_mixture_with_the_recorded_experts(renormalise):
    """The router's gradient too, through the softmax over all experts and the sum of the chosen ones."""
    layer = MoE(MOE, Experts(8, 3, 16, renormalise), Declare(iter(jax.random.split(jax.random.key(0), 9)), jnp.float32))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 5, MOE.embed_dim))
    cotangent = jax.random.normal(jax.random.key(2), x.shape)
    record = changed_record(np.zeros((2, 5, 1, 3)), "random", np.random.default_rng(1))[:, :, 0]

    def sparse(params, x):
        return (nnx.merge(graphdef, params)(x, ("batch", "length"), record)[0] * cotangent).sum()

    def dense(params, x):
        router, *matrices = (params[name][...] for name in ("router", "gate", "up", "down"))
        shares = jax.nn.softmax(x @ router) * jax.nn.one_hot(record, 8).sum(2)
        shares = shares / shares.sum(-1, keepdims=True) if renormalise else shares
        gate, up = (jnp.einsum("btd,edf->btef", x, w) for w in matrices[:2])
        outs = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, matrices[2])
        return (jnp.einsum("bte,bted->btd", shares, outs) * cotangent).sum()

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(params, x) for f in (sparse, dense))
    assert np.abs(found[0]["router"][...]).max() > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), found, expected)


@pytest.mark.parametrize("layers", [2, 9], ids=["unrolled", "scanned"])
def test_the_forward_pass_and_decoding_say_which_experts_a_token_goes_to(layers):
    config = dataclasses.replace(MOE, num_layers=layers)
    graphdef, params = build(config)
    module = nnx.merge(graphdef, params)
    tokens = random_tokens((2, 7))
    expected = [reference(params, config, row) for row in tokens]
    hidden, experts = jax.jit(lambda *batch: module.routed(*batch))(tokens, *rows(tokens))
    assert experts.shape == (2, 7, layers, 3) and experts.dtype == jnp.uint8
    for row in range(2):
        np.testing.assert_allclose(hidden[row], expected[row][0], **ROUNDING)
        np.testing.assert_array_equal(experts[row], expected[row][1])

    @jax.jit
    def step(token, cache):
        unrolled = layers == 2
        split = module.unstacked_layers() if unrolled else None
        hidden, cache, experts = module.decode(token, cache.unstacked() if unrolled else cache, layers=split)
        return hidden, cache.stacked() if unrolled else cache, experts

    cache = KVCache.empty(config, 2, 8, jnp.float32)
    for t in range(7):
        _, cache, experts = step(tokens[:, t], cache)
        np.testing.assert_array_equal(experts, [chosen[t] for _, chosen in expected])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_takes_part_and_none_starts_dead(family):
    config = dataclasses.replace(FAMILIES[family], tie_embeddings=False)
    graphdef, params = models.init(config)
    tokens = random_tokens((2, 9))

    def loss(params):
        module = nnx.merge(graphdef, params)
        return jnp.square(module.logits(module(tokens, *rows(tokens))) - 1).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    for path, g in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.abs(g).max() > 1e-6, f"{jax.tree_util.keystr(path)} gets no gradient"


def test_weights_depend_on_the_seed_and_have_unit_gain():
    _, a = models.init(QWEN3, seed=1)
    _, b = models.init(QWEN3, seed=1)
    _, c = models.init(QWEN3, seed=2)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(a["layers"]["mlp"]["gate"], c["layers"]["mlp"]["gate"])
    gain = np.std(a["layers"]["mlp"]["gate"]) * np.sqrt(QWEN3.embed_dim)
    assert abs(gain - 1) < 0.05  # 2 * 32 * 48 draws: a standard error of 1.3 %


def test_logical_axes_name_every_dimension():
    _, shapes = models.abstract(QWEN2)
    axes = models.logical_axes(QWEN2)
    jax.tree.map(lambda x, names: len(x.shape) == len(names) or pytest.fail(f"{x} {names}"), shapes, axes)


@pytest.fixture(scope="module")
def gradient():
    """The gradient of a model that is made with the given options."""
    tokens = random_tokens((2, 12))

    def compute(**kinds):
        graphdef, params = models.init(QWEN3, **kinds)
        return jax.jit(jax.grad(lambda p: jnp.square(nnx.merge(graphdef, p)(tokens, *rows(tokens))).sum()))(params)

    plain = compute()
    return lambda **kinds: compute(**kinds) if kinds else plain


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.slow), "full"])
def test_remat_changes_no_gradient(gradient, remat):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), gradient(remat=remat), gradient())


def test_feed_forward_in_stretches_changes_no_gradient(gradient, monkeypatch):
    plain = gradient()
    monkeypatch.setattr("rpg_jax.models.projections._STRETCH", 5)
    stretched = gradient(remat="none")  # named, so that it is traced anew
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), stretched, plain)


def test_bf16_compute_keeps_f32_parameters_and_stays_near():
    graphdef, params = build(QWEN3)
    half, same = models.init(QWEN3, compute_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(same)} == {jnp.dtype(jnp.float32)}
    tokens = random_tokens((2, 6))
    exact = forward(graphdef, params, tokens, *rows(tokens))
    hidden = forward(half, params, tokens, *rows(tokens))
    assert hidden.dtype == jnp.bfloat16
    # bf16 keeps 8 bits: 0.4 % a rounding, through two layers
    np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.1)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown remat policy 'some'; known: none"):
        models.init(QWEN3, remat="some")
    with pytest.raises(ValueError, match="num_heads 8 must be a multiple of num_kv_heads 3"):
        dataclasses.replace(QWEN3, num_kv_heads=3)


MESHES = [
    (QWEN2, {"fsdp": 2, "context": 2, "tensor": 2}),
    *(
        pytest.param(config, mesh_shape, marks=pytest.mark.slow)
        for config, mesh_shape in [
            (QWEN3, {"fsdp": 8}),
            (QWEN3, {"tensor": 4, "fsdp": 2}),
            (QWEN3, {"replica": 8}),
            (QWEN3, {"context": 8}),
            (QWEN3, {"replica": 2, "tensor": 2, "context": 2}),
            (MOE, {"expert": 2, "fsdp": 2, "tensor": 2}),
            (MOE, {"expert": 8}),
            (MOE, {"expert": 4, "context": 2}),
            (MOE, {"fsdp": 4, "tensor": 2}),
        ]
    ),
]


def one_step(graphdef):
    """Loss, hidden states and gradient of a batch."""

    def loss(params, *batch):
        hidden = nnx.merge(graphdef, params)(*batch)
        return (hidden**2 * jnp.arange(hidden.shape[-1])).mean(), hidden

    return jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="module")
def packed_batch():
    """Eight rows of two segments each."""
    segment_ids = jnp.where(jnp.arange(8) < 5, 1, 2) * jnp.ones((8, 1), jnp.int32)
    return random_tokens((8, 8)), jnp.tile(jnp.array([0, 1, 2, 3, 4, 0, 1, 2]), (8, 1)), segment_ids


@pytest.fixture(scope="module")
def on_one_device(packed_batch):
    """The results of one device, by config."""
    results = {}

    def compute(config):
        if config not in results:
            graphdef, params = build(config)
            results[config] = graphdef, params, jax.jit(one_step(graphdef))(params, *packed_batch)
        return results[config]

    return compute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh_shape"), MESHES, ids=lambda x: "moe" if x is MOE else str(x) if isinstance(x, dict) else "dense"
)
def test_hidden_and_gradient_are_the_same_on_every_mesh(on_one_device, packed_batch, config, mesh_shape):
    graphdef, params, expected = on_one_device(config)
    mesh = parallel.make_mesh(mesh_shape)
    placed = parallel.shardings(models.logical_axes(config), params, mesh)
    row = parallel.shardings(("batch", "length"), packed_batch[0], mesh)
    with parallel.activate(mesh):
        got = jax.jit(one_step(graphdef), in_shardings=(placed, row, row, row))(params, *packed_batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), got, expected)


def test_weights_drawn_into_shardings_are_the_same_weights():
    mesh = parallel.make_mesh({"fsdp": 2, "tensor": 4})
    _, shapes = models.abstract(QWEN3)
    placed = parallel.shardings(models.logical_axes(QWEN3), shapes, mesh)
    _, params = models.init(QWEN3, shardings=placed)
    jax.tree.map(np.testing.assert_array_equal, params, models.init(QWEN3)[1])
    assert params["layers"]["mlp"]["gate"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")


def test_tokens_are_appended_alike_on_a_mesh_over_slots_and_heads():
    graphdef, params = build(QWEN3)
    tokens, lengths = random_tokens((3, 4)), jnp.array([4, 2, 3])
    _, prefix = prefill(graphdef, params, random_tokens((8, 4)), jnp.full(8, 4))
    cache = functools.reduce(lambda cache, slot: cache.insert(prefix, slot), range(8), KVCache.empty(QWEN3, 8, 16))
    inputs = tokens, lengths, cache, jnp.array([5, 0, 8]), jnp.array([4, 2, 4])
    hidden, grown = extend(graphdef, params, *inputs)
    mesh = parallel.make_mesh({"fsdp": 4, "tensor": 2})
    placed = parallel.shardings(models.logical_axes(QWEN3), params, mesh)
    caches = parallel.shardings(cache.logical_axes, cache, mesh)
    with parallel.activate(mesh):
        program = jax.jit(
            lambda params, *inputs: nnx.merge(graphdef, params).extend(*inputs),
            in_shardings=(placed, None, None, caches, None, None),
            out_shardings=(None, caches),
        )
        got, spread = program(params, *inputs)
    np.testing.assert_allclose(got[:2], hidden[:2], **ROUNDING)  # the third row is padding
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), spread, grown)
    assert not np.array_equal(grown.keys[:, 5], cache.keys[:, 5])


@pytest.mark.slow
def test_decode_runs_sharded_over_slots_and_heads():
    graphdef, params = build(QWEN3)
    tokens = random_tokens((8, 4))
    _, prefix = prefill(graphdef, params, tokens, jnp.full(8, 4))

    def step(params, tokens, cache):
        return nnx.merge(graphdef, params).decode(tokens, cache)[:2]

    mesh = parallel.make_mesh({"fsdp": 2, "tensor": 4})
    placed = parallel.shardings(models.logical_axes(QWEN3), params, mesh)
    caches = parallel.shardings(prefix.logical_axes, prefix, mesh)
    cache = functools.reduce(lambda cache, slot: cache.insert(prefix, slot), range(8), KVCache.empty(QWEN3, 8, 16))
    expected = decode(graphdef, params, tokens[:, 0], cache)
    with parallel.activate(mesh):
        got = jax.jit(step, in_shardings=(placed, None, caches), out_shardings=(None, caches))(
            params, tokens[:, 0], cache
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), got, expected)
