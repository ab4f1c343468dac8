"""An update whose KL is summed over the vocabulary: its gradient, its split, and the reference that it reads."""

import dataclasses
import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import losses, models, parallel
from rpg_jax.training.loop import anchor_of
from rpg_jax.training.objective import Objective, policy_loss_fn
from rpg_jax.training.step import Anchor, make_programs
from tests.training import test_loop, test_step

LOSS = dict(divergence="js", estimator="exact", clip="dual", level="to_go", kl_coef=0.7, weight="capped")
LOSS |= {"aggregate": "constant", "constant_length": 8}
OTHER = dataclasses.replace(test_step.MODEL, num_layers=1, embed_dim=24, tie_embeddings=False)
parts = test_loop.parts


@functools.cache
def exact_loss():
    return policy_loss_fn("rpg", **LOSS)


def teacher():
    """A reference of another width, as a model and as the anchor of an update; a new one, as JAX keeps a traced
    function's mesh."""
    module = nnx.merge(*models.init(OTHER, seed=5))

    @jax.jit
    def hidden(rows):
        return jnp.take_along_axis(
            module(rows.tokens, rows.positions, rows.segment_ids), rows.predictors[..., None], axis=1
        )

    return module, Anchor(hidden, module.head())


def by_hand(batch):
    """The gradient of the same loss, with whole logits of both policies."""
    (module, _), (graphdef, _) = teacher(), models.abstract(test_step.MODEL, compute_dtype="float32")

    def whole(model, rows):
        hidden = model(rows.tokens, rows.positions, rows.segment_ids)
        chosen = jnp.take_along_axis(hidden, rows.predictors[..., None], axis=1)
        return jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", chosen, model.head()) / 0.8)

    def loss(params):
        p, q = whole(nnx.merge(graphdef, params), batch.rows), whole(module, batch.rows)
        kl = losses.PrefixKL(*(jnp.sum(jnp.exp(of) * (of - to), -1) for of, to in ((p, q), (q, p))))
        logprobs, ref = (jnp.take_along_axis(x, batch.rows.targets[..., None], -1)[..., 0] for x in (p, q))
        own = dataclasses.replace(batch, ref_logprobs=ref, prefix_kl=kl)
        return losses.policy_loss("rpg", logprobs=logprobs, **own.loss_inputs, **LOSS)[0]

    return jax.jit(jax.grad(loss))(models.init(test_step.MODEL, seed=3)[1])


@pytest.mark.slow  # compiles, or waits, for seconds
def test_the_gradient_is_that_of_whole_logits_of_both_policies():
    programs, state, mesh = test_step.make(loss=exact_loss())
    batch, (_, anchor) = test_step.make_batch(), teacher()
    known = dataclasses.replace(batch, ref_hidden=anchor.hidden(batch.rows))
    with parallel.activate(mesh):
        sums = programs.beside(anchor).start(state.weights, known)
    for a, b in zip(jax.tree.leaves(sums.grads), jax.tree.leaves(by_hand(batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * float(jnp.max(jnp.abs(b))))  # f32, sums in another order


def two_updates(rows=test_step.ROWS, **how):
    programs, state, mesh = test_step.make(loss=exact_loss(), **how)
    with parallel.activate(mesh):
        _, anchor = teacher()
        for seed in (0, 1):
            state, metrics = programs.update(state, test_step.make_batches(seed, rows=rows), anchor)
    return jax.device_get(state), jax.device_get(metrics)


@pytest.mark.slow  # compiles, or waits, for seconds
def test_micro_batches_and_devices_change_nothing():
    plain = two_updates()
    assert plain[1]["kl_exact"][0] > 1
    test_step.assert_same(two_updates(rows=3), plain)
    shape = {"replica": 2, "fsdp": 2, "tensor": 2}
    test_step.assert_same(two_updates(mesh_shape=shape, devices=8), plain)


@pytest.mark.slow  # compiles, or waits, for seconds
def test_the_policy_is_its_own_anchor_until_an_update_changes_it(parts, tmp_path):
    """The reference of the first step is a copy of the weights before it, whose arrays the updates donate."""
    programs = make_programs(
        models.abstract(test_loop.MODEL)[0],
        parts["optimizer"],
        Objective(policy_loss_fn("rpg", estimator="exact", clip="none", divergence="rkl", kl_coef=0.1)),
        temperature=1.0,
        state=parts["like"],
        batch_sharding=parts["rows"],
    )
    loop = test_loop.make_loop(
        parts, tmp_path, dynamic=None, rule="fixed", programs=programs, exact=True, is_recorded=lambda step: False
    )
    with parallel.activate(parts["rows"].mesh):
        first, before = jax.device_get(loop.state.params), loop.state.params
        [copied] = anchor_of(loop.algorithm, loop.state).hidden.args
        assert not any(x is y for x, y in zip(*map(jax.tree.leaves, (before, copied)), strict=True))
        steps = [loop.run_step() for _ in range(3)]
        kl = [[u["kl_exact"] for u in step.updates] for step in steps]
        assert kl[0][0] == pytest.approx(0, abs=1e-6) and kl[0][1] > 1e-4 and min(map(min, kl[1:])) > 1e-4
        anchor = anchor_of(loop.algorithm, loop.state)
    np.testing.assert_array_equal(anchor.head, first["embed"])
    assert not any("kl_gradient_share" in u for step in steps for u in step.updates)
