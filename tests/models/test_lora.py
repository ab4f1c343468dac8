"""Adapters compute W + (alpha / rank) A B: function, gradient, shards, merging, and what a rank can express."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rpg_jax import models, parallel
from rpg_jax.models.lora import Base, Lora, adapter_axes, adapter_shapes, init_adapters, merged
from rpg_jax.models.moe import grouped_product
from rpg_jax.models.weights import Adapted, quantized

DENSE = models.DecoderConfig(
    vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=24
)
MIXTURE = dataclasses.replace(DENSE, experts=models.Experts(count=4, per_token=2, hidden_dim=8))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 6)), jnp.int32)
LORA = Lora(rank=3, alpha=6.0)


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, params):
    module = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return module.logits(module(TOKENS, positions, jnp.ones_like(TOKENS)))


@functools.cache
def model_of(config):
    return models.init(config)


@functools.cache
def first_of(config):
    return init_adapters(config, LORA, seed=5)


def adapters_of(config, lora=LORA, dtype=jnp.float32):
    """Adapters whose B is not 0."""
    shapes, rng = adapter_shapes(config, lora, dtype), np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), dtype), shapes)


# The mixture adds up its experts in float32.
@pytest.mark.slow  # compiles, or waits, for seconds
@pytest.mark.parametrize("config, tolerance", [(DENSE, 1e-12), (MIXTURE, 1e-4)], ids=["dense", "mixture"])
def test_the_gradient_of_adapters_is_the_chain_rule_applied_to_the_gradient_of_the_whole_matrix(config, tolerance):
    with jax.enable_x64(True):
        graphdef, params = models.init(config, param_dtype=jnp.float64, compute_dtype=jnp.float64)
        base, adapters = Base(params, LORA.scale), adapters_of(config, dtype=jnp.float64)
        gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(logits(graphdef, params).astype(jnp.float64)))))
        own = jax.jit(
            jax.grad(lambda adapters: jnp.sum(jnp.sin(logits(graphdef, base.policy(adapters)).astype(float))))
        )
        own, full = own(adapters)["layers"], gradient(merged(base.policy(adapters)))["layers"]
        for part, names in own.items():
            for name, found in names.items():
                a, b = adapters["layers"][part][name].values()
                G = full[part][name]
                stack = a.ndim + b.ndim - 2 - G.ndim
                lead = G.shape[:stack]
                a, b = a.reshape(*lead, -1, LORA.rank), b.reshape(*lead, LORA.rank, -1)
                G = G.reshape(*lead, a.shape[-2], b.shape[-1])
                expected = LORA.scale * G @ b.swapaxes(-1, -2), LORA.scale * a.swapaxes(-1, -2) @ G
                for one, other in zip((found["a"], found["b"]), expected, strict=True):
                    assert float(jnp.abs(other).max()) > 1e-3
                    np.testing.assert_allclose(one.reshape(other.shape), other, rtol=tolerance, atol=tolerance)


def test_a_full_rank_with_scale_one_reaches_every_matrix():
    rng = np.random.default_rng(2)
    W, target = rng.standard_normal((2, 5, 7))
    adapted = Adapted(jnp.asarray(W), jnp.eye(5), jnp.asarray(target - W))  # rank 5 = the smaller side, alpha 5
    np.testing.assert_allclose(adapted.merged(), target, atol=1e-6)  # f32
    short = dataclasses.replace(adapted, base=adapted.base.astype(jnp.bfloat16))
    once = (np.asarray(short.base, np.float32) + (target - W).astype(np.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(short.merged(), once)
    x = jnp.asarray(rng.standard_normal((3, 5)), jnp.float32)
    np.testing.assert_allclose(x @ adapted, x @ target.astype(np.float32), atol=1e-5)


@pytest.mark.parametrize("config", [DENSE, pytest.param(MIXTURE, marks=pytest.mark.slow)], ids=["dense", "mixture"])
def test_merged_logits_are_those_of_base_and_adapter_apart_and_the_first_policy_is_the_base(config):
    graphdef, params = model_of(config)
    base, first = Base(params, LORA.scale), first_of(config)
    policy = base.policy(adapters_of(config))
    np.testing.assert_array_equal(logits(graphdef, base.policy(first)), logits(graphdef, params))
    apart, together = logits(graphdef, policy), logits(graphdef, merged(policy))
    assert float(jnp.abs(apart - logits(graphdef, params)).max()) > 0.1
    np.testing.assert_allclose(apart, together, atol=2e-5)  # f32, another order of summation


@pytest.mark.slow  # compilations
def test_an_int8_base_has_the_error_of_its_rounding_and_no_other():
    graphdef, params = model_of(DENSE)
    eight, adapters = quantized(params), adapters_of(DENSE)
    expanded = jax.tree.map(lambda x: x[...], eight, is_leaf=lambda x: hasattr(x, "scale"))
    of_eight, of_expanded = (logits(graphdef, Base(w, LORA.scale).policy(adapters)) for w in (eight, expanded))
    np.testing.assert_allclose(of_eight, of_expanded, atol=1e-5)


@pytest.mark.slow  # compilations
@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "expert": 2}], ids=str)
def test_function_and_gradient_are_the_same_on_a_mesh(config, sizes):
    graphdef, params = model_of(config)
    base, adapters = Base(params, LORA.scale), adapters_of(config)

    def value(base, adapters):
        return jnp.sum(jnp.sin(logits(graphdef, base.policy(adapters))))

    expected, gradient = jax.value_and_grad(value, argnums=1)(base, adapters)
    mesh = parallel.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    where = parallel.shardings(models.logical_axes(config), params, mesh)
    own = parallel.shardings(adapter_axes(config, LORA), adapters, mesh)
    with parallel.activate(mesh):
        placed = Base(jax.device_put(params, where), LORA.scale), jax.device_put(adapters, own)
        found, sharded = jax.jit(jax.value_and_grad(value, argnums=1))(*placed)
    # Sums in another order: 2e-5 of the value and 5e-6 of a gradient's largest entry, up to 66, were seen. One device
    # in float32 is as far from float64: 2e-5 and 4e-6.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(abs(y).max()))


@pytest.mark.slow  # compilations
def test_the_backward_pass_computes_no_gradient_of_frozen_matrices():
    wide = dataclasses.replace(DENSE, embed_dim=64, hidden_dim=256, head_dim=16)
    graphdef, params = models.init(wide)
    lora = Lora(1, 1.0)
    base, adapters = Base(params, lora.scale), adapters_of(wide, lora)

    def operations(gradient, *inputs):
        return jax.jit(gradient).lower(*inputs).cost_analysis()["flops"]

    own = operations(jax.grad(lambda a, b: logits(graphdef, b.policy(a)).sum()), adapters, base)
    full = operations(jax.grad(lambda p: logits(graphdef, p).sum()), params)
    assert own < 0.8 * full  # two products for every matrix in place of three, and attention


def test_an_adapted_product_keeps_one_wide_result_for_the_backward_pass():
    x, weight = jnp.ones((2, 3, 5)), Adapted(jnp.ones((5, 7)), jnp.ones((5, 2)), jnp.ones((2, 7)))
    _, backward = jax.vjp(jax.checkpoint(lambda weight: jnp.sin(x @ weight), policy=models.REMAT["dots"]), weight)
    kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert kept.count((2, 3, 7)) == 1, "x W, and not x A B too"
    assert kept.count((2, 3, 2)) == 1


def test_experts_of_a_kernel_have_adapters_too():
    rng = np.random.default_rng(3)
    rows, W, a, b = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((6, 4), (2, 4, 5), (2, 4, 2), (2, 2, 5))
    )
    found = grouped_product(rows, Adapted(W, a, b), jnp.array([4, 2]))
    np.testing.assert_allclose(found, grouped_product(rows, W + a @ b, jnp.array([4, 2])), atol=1e-5)


def test_a_is_drawn_as_peft_draws_it_from_the_number_of_its_inputs_and_b_is_zero():
    first = first_of(DENSE)["layers"]
    inputs = {("attention", "q"): 16, ("attention", "o"): 32, ("mlp", "gate"): 16, ("mlp", "down"): 24}
    for (part, name), n in inputs.items():
        a, b = first[part][name].values()
        assert 0.9 * n**-0.5 < float(abs(a).max()) <= n**-0.5 and not b.any()  # of at least 96 numbers
    assert not np.array_equal(first["attention"]["q"]["a"].ravel()[:9], first["mlp"]["gate"]["a"].ravel()[:9])


def test_targets_that_a_model_lacks_are_refused_with_those_it_has():
    with pytest.raises(ValueError, match="'experts': this model has none; choose feed-forward"):
        adapter_shapes(DENSE, Lora(1, 1.0, "experts"))
    with pytest.raises(ValueError, match="rank >= 1"):
        Lora(0, 1.0)
    assert set(adapter_shapes(DENSE, Lora(1, 1.0, "attention"))["layers"]) == {"attention"}
