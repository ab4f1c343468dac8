"""Chunked log-probabilities: the plain version's numbers and gradients, without its memory."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.losses import Cut, token_divergences, token_logprobs

V, D = 37, 8


def inputs(shape=(2, 7), dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(0, 1, (*shape, D)), dtype)
    head = jnp.asarray(rng.normal(0, 1, (V, D)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, V, shape), jnp.int32)


def plain(hidden, head, targets, temperature):
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=accumulate) / temperature
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def scalar(function, targets, with_entropy, **options):
    """A loss that weighs every output differently, with its outputs beside it."""

    def loss(hidden, head):
        outputs = function(hidden, head, targets, **options)
        weights = jnp.cos(jnp.arange(targets.size, dtype=outputs[0].dtype)).reshape(targets.shape)
        total = jnp.sum(weights * outputs[0]) + (jnp.sum(weights**2 * outputs[1]) if with_entropy else 0)
        return total, outputs[0]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@functools.cache
def expected_in_f64(entropy):
    hidden, head, targets = inputs(dtype=jnp.float64)
    return scalar(plain, targets, entropy, temperature=0.7)(hidden, head)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "default"])  # the program of CPUs, and that of accelerators
def test_values_and_gradients_are_those_of_the_plain_version(chunk_size, entropy, platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, **programs: programs[platform](*arrays))
    hidden, head, targets = inputs(dtype=jnp.float64)
    step = scalar(token_logprobs, targets, entropy, temperature=0.7, chunk_size=chunk_size, entropy=entropy)
    found, expected = step(hidden, head), expected_in_f64(entropy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, expected)


def test_f32_is_exact_to_rounding():
    hidden, head, targets = inputs()
    found = scalar(token_logprobs, targets, True, temperature=1.0, chunk_size=3, entropy=True)(hidden, head)
    expected = scalar(plain, targets, True, temperature=1.0)(hidden, head)
    # log-probabilities of order ten, gradients that are sums of fourteen terms
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6), found, expected)


def test_bf16_inputs_are_accumulated_in_f32():
    hidden, head, targets = inputs(dtype=jnp.bfloat16)
    logprobs, entropies = token_logprobs(hidden, head, targets, chunk_size=3, entropy=True)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    expected = plain(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, 1.0)
    # products of bf16 numbers are exact in f32, so only the order of summation differs
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropies, expected[1], atol=1e-5)

    _, gradients = scalar(token_logprobs, targets, False, chunk_size=1)(hidden, head)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]
    _, exact = scalar(plain, targets, False, temperature=1.0)(hidden.astype(jnp.float32), head.astype(jnp.float32))
    for found, reference in zip(gradients, exact, strict=True):
        # one rounding to bf16 at the end; adding the seven chunks in bf16 would lose several times that
        np.testing.assert_allclose(found.astype(jnp.float32), reference, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 1, 4)])
def test_any_leading_axes_will_do(shape):
    hidden, head, targets = inputs(shape)
    logprobs, entropies = token_logprobs(hidden, head, targets, chunk_size=2)
    assert entropies is None
    np.testing.assert_allclose(logprobs, plain(hidden, head, targets, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_no_array_of_the_program_holds_the_logits_of_more_than_a_chunk():
    hidden, head, targets = inputs((4, 64))

    def loss(hidden, head):
        logprobs, entropies = token_logprobs(hidden, head, targets, chunk_size=2, entropy=True)
        return logprobs.sum() + entropies.sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).as_text()
    shapes = {tuple(map(int, dims[:-1].split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+)", text)}
    assert (4, 2, V) in shapes
    assert max(math.prod(shape) for shape in shapes) == hidden.size < 4 * 64 * V


@pytest.mark.parametrize("spec", [PartitionSpec("x", None), PartitionSpec(None, "x")], ids=["rows", "vocabulary"])
def test_sharded_inputs_give_the_same_numbers(spec):
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    rng = np.random.default_rng(1)
    hidden, head = (jnp.asarray(rng.normal(0, 1, s), jnp.float32) for s in ((8, 5, D), (40, D)))
    targets = jnp.asarray(rng.integers(0, 40, (8, 5)), jnp.int32)
    rows, vocabulary = spec
    step = scalar(token_logprobs, targets, True, chunk_size=2, entropy=True)
    found = step(
        jax.device_put(hidden, NamedSharding(mesh, PartitionSpec(rows))),
        jax.device_put(head, NamedSharding(mesh, PartitionSpec(vocabulary))),
    )
    # f32 sums in another order: up to 9e-6 apart under jax 0.12
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, step(hidden, head))


def both_inputs(dtype=jnp.float32, words=V, rows=2):
    """`inputs` of a policy, and hidden states and a head of another width of a reference."""
    rng = np.random.default_rng(3)
    shapes = (rows, 6, D), (words, D), (rows, 6, 2 * D), (words, 2 * D)
    hidden, head, ref_hidden, ref_head = (jnp.asarray(rng.normal(0, 0.7, s), dtype) for s in shapes)
    return hidden, head, jnp.asarray(rng.integers(0, words, (rows, 6)), jnp.int32), ref_hidden, ref_head


def plain_divergences(hidden, head, targets, ref_hidden, ref_head, temperature):
    def whole(hidden, head):
        return jax.nn.log_softmax(jnp.einsum("...d,vd->...v", hidden, head) / temperature)

    p, q = whole(hidden, head), whole(ref_hidden, ref_head)
    logprobs, entropy = plain(hidden, head, targets, temperature)
    kl = [jnp.sum(jnp.exp(of) * (of - to), -1) for of, to in ((p, q), (q, p))]
    return logprobs, entropy, jnp.take_along_axis(q, targets[..., None], axis=-1)[..., 0], kl


def divergences(function, targets, **options):
    """The gradient of a loss that weighs the log-probs, the entropy and both KLs of every token differently."""

    def loss(hidden, head, ref_hidden, ref_head):
        logprobs, entropy, ref_logprobs, kl = function(hidden, head, targets, ref_hidden, ref_head, **options)
        weights = jnp.cos(jnp.arange(targets.size)).reshape(targets.shape)
        parts = zip((logprobs, entropy, *kl), (1, weights, weights**2, 1 - weights), strict=True)
        return sum(jnp.sum(weights * w * x) for x, w in parts), (logprobs, entropy, ref_logprobs, *kl)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_the_kl_over_the_vocabulary_and_its_gradient_are_those_of_whole_logits(chunk_size):
    hidden, head, targets, *reference = both_inputs(jnp.float64)
    options = dict(temperature=0.7, chunk_size=chunk_size, entropy=True)
    found = divergences(token_divergences, targets, **options)(hidden, head, *reference)
    expected = divergences(plain_divergences, targets, temperature=0.7)(hidden, head, *reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, expected)
    (_, (*_, reverse, forward)), _ = found
    assert np.min(reverse) > 0.1 and np.min(forward) > 0.1 and np.max(np.abs(reverse - forward)) > 0.1


def test_the_kl_to_the_policy_itself_is_zero_with_a_gradient_of_zero():
    hidden, head, targets, *_ = both_inputs()

    def total(hidden, head):
        kl = token_divergences(hidden, head, targets, *map(jax.lax.stop_gradient, (hidden, head)), chunk_size=4).kl
        return jnp.sum(kl.reverse) + jnp.sum(kl.forward)

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(hidden, head)
    assert abs(value) < 1e-5  # f32: twelve sums of 37 terms
    assert max(float(jnp.max(jnp.abs(x))) for x in gradients) < 1e-5


def test_the_reference_gets_no_gradient_and_no_array_holds_the_logits_of_more_than_a_chunk():
    hidden, head, targets, *reference = both_inputs(rows=4)

    def loss(hidden, head, *reference):
        found = token_divergences(hidden, head, targets, *reference, chunk_size=2, entropy=True)
        return sum(jnp.sum(x) for x in jax.tree.leaves(found))

    gradients = jax.grad(loss, argnums=(2, 3))(hidden, head, *reference)
    assert not any(np.any(x) for x in gradients)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, *reference).as_text()
    shapes = {tuple(map(int, dims[:-1].split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+)", text)}
    assert (4, 2, V) in shapes and not {x for x in shapes if V in x and math.prod(x) > max(4 * 2 * V, 2 * D * V)}


CUTS = {
    "rows hold a part of the width": dict(rows=("x", "y"), width=("x", "y")),
    "a copy of the head on some rows": dict(rows=("x", "y"), width=("y",)),
    "vocabulary and width": dict(rows=("x",), width=("x",), vocab=("y",)),
    "positions": dict(rows=("x",), width=("x",), positions=("y",)),
    "vocabulary alone": dict(rows=("x",), vocab=("y",)),
}
IN_EVERY_RUN = ("a copy of the head on some rows", "vocabulary and width", "positions")  # each branch of the cut once


def cut_inputs(dtype=jnp.float32):
    rng = np.random.default_rng(2)
    hidden, head = (jnp.asarray(rng.normal(0, 1, s), dtype) for s in ((8, 6, D), (38, D)))
    return hidden, head, jnp.asarray(rng.integers(0, 38, (8, 6)), jnp.int32)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "axes",
    [pytest.param(CUTS[name], id=name) for name in IN_EVERY_RUN]
    + [pytest.param(axes, id=name, marks=pytest.mark.slow) for name, axes in CUTS.items() if name not in IN_EVERY_RUN],
)
def test_a_cut_gives_the_numbers_of_one_device(axes):
    cut = Cut(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y")), **axes)
    hidden, head, targets = cut_inputs(jnp.float64)  # 38 words: four devices hold 10, 10, 10 and 8
    options = dict(temperature=0.7, chunk_size=2, entropy=True)
    found = scalar(token_logprobs, targets, True, cut=cut, **options)(hidden, head)
    expected = scalar(token_logprobs, targets, True, **options)(hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_a_cut_gives_the_divergences_of_one_device(name):
    cut = Cut(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y")), **CUTS[name])
    hidden, head, targets, *reference = both_inputs(jnp.float64, words=38, rows=8)
    options = dict(temperature=0.7, chunk_size=2, entropy=True)
    found = divergences(token_divergences, targets, cut=cut, **options)(hidden, head, *reference)
    expected = divergences(token_divergences, targets, **options)(hidden, head, *reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("used", [0, 1, 3, 6])
@pytest.mark.parametrize("axes", [None, CUTS["vocabulary and width"], CUTS["positions"]], ids=["one", "cut", "split"])
def test_positions_that_nobody_uses_are_skipped_and_change_no_other_number(axes, used):
    cut = axes and Cut(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y")), **axes)
    hidden, head, targets = cut_inputs(jnp.float64)
    wanted = jnp.arange(6) < used

    def step(used):
        def loss(hidden, head):
            options = dict(temperature=0.7, chunk_size=2, entropy=True, cut=cut, used=used)
            outputs = token_logprobs(hidden, head, targets, **options)
            return sum(jnp.sum(jnp.where(wanted, x, 0) * jnp.cos(jnp.arange(6))) for x in outputs), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)

    ((total, outputs), gradients), ((whole, all_outputs), expected) = step(jnp.int32(used)), step(None)
    np.testing.assert_allclose(total, whole, rtol=0, atol=1e-12)
    cut_off = [tuple(x[:, :used] for x in own) for own in (outputs, all_outputs)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
        [gradients, cut_off[0]],
        [expected, cut_off[1]],
    )
    if cut is None:
        assert not np.any(outputs[0][:, -(-used // 2) * 2 :]) and np.all(outputs[0][:, :used])


def test_a_cut_never_gathers_the_head_nor_exchanges_its_gradient_twice():
    cut = Cut(Mesh(np.array(jax.devices()[:8]), ("x",)), rows=("x",), width=("x",))
    hidden, head, targets = cut_inputs()
    placed = NamedSharding(cut.mesh, PartitionSpec("x")), NamedSharding(cut.mesh, PartitionSpec(None, "x"))
    step = scalar(token_logprobs, targets, False, cut=cut, chunk_size=2)
    text = step.lower(jax.device_put(hidden, placed[0]), jax.device_put(head, placed[1])).compile().as_text()
    largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"= f32\[([\d,]+)\]", text))
    assert largest <= 8 * 2 * D  # a chunk of everyone's hidden states; the head has 38 D, a device's eighth 5 D
    assert len(re.findall(r" all-to-all\(", text)) <= 3  # the head forward, the head backward, its gradient


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(temperature=0.0), "temperature must be > 0"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(head=jnp.ones((V, D + 1))), "do not match"),
        (dict(targets=jnp.zeros((2, 6), jnp.int32)), "do not match"),
        (dict(cut=Cut(Mesh(np.array(jax.devices()[:1]), ("x",)), width=("x",))), "among its rows"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    hidden, head, targets = inputs()
    arguments = dict(hidden=hidden, head=head, targets=targets) | change
    reference = dict(ref_hidden=hidden, ref_head=head)
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)
    with pytest.raises(ValueError, match=message):
        token_divergences(**arguments, **reference)


@pytest.mark.parametrize("change", [dict(ref_head=jnp.ones((V + 1, D))), dict(ref_hidden=jnp.ones((2, 6, D)))])
def test_a_reference_of_another_vocabulary_or_of_other_tokens_is_refused(change):
    hidden, head, targets = inputs()
    with pytest.raises(ValueError, match="ref_hidden .* do not match"):
        token_divergences(hidden, head, targets, **dict(ref_hidden=hidden, ref_head=head) | change)
