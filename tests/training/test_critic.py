"""The learned baseline in the update: whose weights it touches, that it learns, and that splits change nothing."""

import dataclasses
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax import data, losses, models, parallel
from rpg_jax.training.critic import Critic
from rpg_jax.training.objective import Objective, policy_loss_fn
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.state import abstract, abstract_state, create_state
from rpg_jax.training.step import make_programs
from rpg_jax.types import Completion, Count

MODEL = models.DecoderConfig(
    vocab_size=23, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, hidden_dim=32,
    tie_embeddings=False,
)  # fmt: skip
ADAM = dict(warmup=Count(0, "updates"), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def mean(values, batch):
    return losses.aggregate(values, batch, "token_mean")


def make(*, critic=True, entropy_coef=0.0, learning_rate=1e-2, loss=None, devices=1):
    """Programs and state of a critic whose head is not zero, so that values depend on the trunk."""
    mesh = parallel.make_mesh({"fsdp": devices}, jax.devices()[:devices])
    graphdef, shapes = models.abstract(MODEL)
    where = parallel.shardings(models.logical_axes(MODEL), shapes, mesh)
    optimizer = make_optimizer("adamw", learning_rate=learning_rate, **ADAM)
    own = models.abstract(dataclasses.replace(MODEL, tie_embeddings=True))[0]
    made = Critic(own, optimizer, gae_lambda=0.9, clip=None) if critic else None
    like = abstract_state(abstract(shapes, where), optimizer, NamedSharding(mesh, PartitionSpec()), made)
    programs = make_programs(
        graphdef,
        optimizer,
        Objective(loss or policy_loss_fn("ppo"), mean, entropy_coef, made),
        temperature=1.0,
        state=like,
        batch_sharding=NamedSharding(mesh, PartitionSpec(parallel.RULES["batch"])),
    )
    params = models.init(MODEL, seed=3, shardings=where)[1]
    state = create_state(params, optimizer, like, made)
    if critic:
        weight = jnp.sin(jnp.arange(16.0))
        own_params = {**state.critic.params, "value": {"weight": weight, "bias": jnp.float32(0.1)}}
        state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=own_params))
    return programs, state


class Prompted(NamedTuple):
    prompt: np.ndarray
    completions: list[Completion]

    @property
    def counted(self):
        return [True] * len(self.completions)


def with_rewards(prompts, completions, rewards, shape):
    """Micro-batches of that shape, paid at the last tokens; their advantages and behaviour log-probs are 0."""
    made = data.pack([Prompted(*both) for both in zip(prompts, completions, strict=True)], shape)
    rewards = made.scatter(
        [
            [np.append(np.zeros(len(c.tokens) - 1), reward) for c, reward in zip(*both, strict=True)]
            for both in zip(completions, rewards, strict=True)
        ]
    )
    zeros = [0 * x for x in rewards]
    return made.add(rewards=rewards, advantages=zeros, behaviour_logprobs=zeros).batches


def make_batches(packed=False, rows=8):
    """Eight completions of four prompts."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, 23, rng.integers(2, 5)).astype(np.int32) for _ in range(4)]
    completions = [
        [Completion(rng.integers(4, 23, n).astype(np.int32), np.full(n, -2, np.float32), "stop", 0) for n in pair]
        for pair in rng.integers(1, 6, (4, 2))
    ]
    shape = data.RowShape(rows, 20, 20, packed=True) if packed else data.RowShape(rows, 10, 5)
    return with_rewards(prompts, completions, rng.normal(size=(4, 2)), shape)


def make_batch():
    """All completions in one micro-batch."""
    return make_batches()[0]


def with_baseline(programs, state, batch):
    logprobs = programs.logprobs(state.params, batch.rows)[0]
    advantages, returns, values = programs.baseline(state.weights, batch)
    new = dict(behaviour_logprobs=logprobs, ref_logprobs=logprobs, advantages=advantages)
    return dataclasses.replace(batch, **new, returns=returns, values=values)


def moved(before, after):
    return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)))


@pytest.mark.slow  # compiles, or waits, for seconds
def test_the_value_loss_does_not_touch_the_policy():
    """The policy's own loss is switched off."""

    def nothing(logprobs, batch):
        weight = jnp.sum(batch.mask)
        return 0.0 * jnp.sum(logprobs), weight, {}

    programs, state = make(loss=nothing)
    before, batch = jax.device_get(state), make_batch()
    batch = with_baseline(programs, state, batch)
    state, metrics = programs.update(state, [batch])
    assert not moved(before.params, state.params)
    assert moved(before.critic.params, state.critic.params) and metrics["nonfinite_updates"][0] == 0
    assert "layers" in state.critic.params and "lm_head" not in state.critic.params


@pytest.mark.slow  # compilations
def test_micro_batches_packing_and_devices_change_nothing():
    results = []
    for packed, rows, devices in ((False, 8, 1), (False, 3, 1), (True, 2, 1), (False, 8, 8)):
        programs, state = make(devices=devices)
        batches = [with_baseline(programs, state, b) for b in make_batches(packed, rows)]
        state, metrics = programs.update(state, batches)
        results.append((jax.device_get(state.weights), jax.device_get(metrics)))
    for weights, metrics in results[1:]:
        # f32 sums in another order; Adam's first step turns tiny gradients into steps of 1e-2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), weights, results[0][0])
        for name in ("value_loss", "return", "value_error_squared", "loss"):
            np.testing.assert_allclose(metrics[name][0], results[0][1][name][0], rtol=1e-4, err_msg=name)


def test_values_belong_to_the_state_before_each_token():
    programs, state = make()
    batch = make_batch()
    _, returns, values = programs.baseline(state.weights, batch)
    trunk = {name: weights for name, weights in state.critic.params.items() if name != "value"}
    model = nnx.merge(models.abstract(dataclasses.replace(MODEL, tie_embeddings=True))[0], trunk)
    hidden = model(batch.rows.tokens, batch.rows.positions, batch.rows.segment_ids)
    head = state.critic.params["value"]
    for row, column in zip(*np.nonzero(batch.mask), strict=True):
        expected = hidden[row, batch.rows.predictors[row, column]] @ head["weight"] + head["bias"]
        np.testing.assert_allclose(values[row, column], expected, rtol=1e-5)
    assert returns.shape == values.shape == batch.mask.shape


@pytest.mark.parametrize("aggregate", [("token_mean", None), ("constant", 100.0), ("sequence_mean_token_sum", None)])
def test_clipped_values_are_counted_as_a_fraction_of_the_tokens_whatever_the_aggregate(aggregate):
    batch = make_batch()
    old, trained = jnp.zeros_like(batch.mask), batch.mask != 0
    batch = dataclasses.replace(batch, values=old, returns=old + 100)
    new = jnp.where(trained, jnp.arange(8.0)[:, None], jnp.nan)  # in all rows but the first beyond the clip
    critic = Critic(None, None, clip=0.5)
    _, metrics = critic.loss(new, batch, lambda x, b: losses.aggregate(x, b, *aggregate))
    assert metrics["value_clip_fraction"] == (trained[1:].sum(), trained.sum())


@pytest.mark.slow  # compilations
def test_a_critic_learns_the_value_function_of_a_task_whose_tokens_decide_the_reward():
    """Every sequence of two tokens of {4, 5} once; the reward is (first − 4) + 2·(second − 4)."""
    pairs = [(a, b) for a in (4, 5) for b in (4, 5)]
    prompts = [np.array([7, 8], np.int32)] * 4
    completions = [[Completion(np.array(p, np.int32), np.zeros(2, np.float32), "length", 0)] for p in pairs]
    rewards = np.array([[(a - 4) + 2.0 * (b - 4)] for a, b in pairs])
    batch = with_rewards(prompts, completions, rewards, data.RowShape(4, 4, 2))[0]
    programs, state = make(learning_rate=3e-3)
    for _ in range(300):
        state, _ = programs.update(state, [with_baseline(programs, state, batch)])
    values = np.asarray(programs.baseline(state.weights, batch)[2])
    # V before any token is the mean of all rewards, 1.5; before the second it is (first − 4) + 1.
    expected = np.array([[1.5, (a - 4) + 1.0] for a, _ in pairs])
    np.testing.assert_allclose(values, expected, atol=0.05)  # bootstrapped with λ = 0.9, 300 steps of Adam


def test_no_array_of_the_baseline_has_the_size_of_the_vocabulary():
    programs, state = make()
    text = str(jax.make_jaxpr(programs.baseline)(state.weights, make_batch()))
    assert "f32[8,10,16]" in text and "f32[8,10,23]" not in text and "f32[8,5,23]" not in text


@pytest.mark.slow  # compilations
def test_the_entropy_bonus_has_the_gradient_of_plain_autodiff():
    coef, batch = 0.3, make_batch()
    programs, state = make(critic=False, entropy_coef=coef)
    plain, _ = make(critic=False)
    batch = dataclasses.replace(batch, behaviour_logprobs=programs.logprobs(state.params, batch.rows)[0])

    def bonus(params):
        model = nnx.merge(models.abstract(MODEL)[0], params)
        hidden = model(batch.rows.tokens, batch.rows.positions, batch.rows.segment_ids)
        logits = model.logits(jnp.take_along_axis(hidden, batch.rows.predictors[..., None], axis=1))
        log_p = jax.nn.log_softmax(logits)
        return jnp.sum(-jnp.sum(jnp.exp(log_p) * log_p, -1) * batch.mask)

    with_bonus, without = (p.start(state.weights, batch).grads[0] for p in (programs, plain))
    expected = jax.tree.map(lambda g, h: g - coef * h, without, jax.grad(bonus)(state.params))
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected))
    # f32: the chunked gradient sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), with_bonus, expected)


@pytest.mark.slow
def test_no_entropy_is_computed_for_a_bonus_of_zero():
    operations = []
    for coef in (0.0, 0.1):
        programs, state = make(critic=False, entropy_coef=coef)
        operations.append(programs.start.lower(state.weights, make_batch()).cost_analysis()["flops"])
    plain, state = make(critic=False)
    assert operations[0] == plain.start.lower(state.weights, make_batch()).cost_analysis()["flops"] < operations[1]


def test_what_is_added_to_a_loss_needs_to_know_how_it_is_aggregated():
    with pytest.raises(ValueError, match="entropy_coef=0.1.*give mean"):
        Objective(policy_loss_fn("ppo"), entropy_coef=0.1)


def test_the_critic_of_a_mixture_chooses_its_own_experts():
    """Its routers are not the policy's, whose experts the rows may have."""
    config = dataclasses.replace(MODEL, tie_embeddings=True, experts=models.Experts(4, 2, 16))
    graphdef, policy = models.init(config, seed=3)
    critic = Critic(graphdef, optimizer=None)
    params = critic.init(policy) | {"value": {"weight": jnp.sin(jnp.arange(16.0)), "bias": jnp.float32(0.1)}}
    rows = make_batch().rows
    record = np.argsort(np.random.default_rng(0).random((*rows.tokens.shape, 1, 4)))[..., :2].astype(np.uint8)
    own = critic.values(params, rows)
    assert np.abs(own).max() > 0.1
    np.testing.assert_array_equal(own, critic.values(params, rows.replace(experts=record)))
