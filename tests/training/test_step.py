"""The update does not depend on how its batch is split or where it runs, and survives numbers that are not finite."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax import data, losses, models, parallel
from rpg_jax.training.loop import add_logprobs, anchor_of
from rpg_jax.training.objective import Objective, policy_loss_fn
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.state import TrainState, abstract, abstract_state, create_state
from rpg_jax.training.step import Frozen, Programs, _Functions, make_programs
from rpg_jax.types import Completion, Count

MODEL = models.DecoderConfig(
    vocab_size=16, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32
)
MOE = dataclasses.replace(MODEL, experts=models.Experts(4, 2, 16))
ROWS = 16


class Prompted(NamedTuple):
    prompt: np.ndarray
    completions: list[Completion]

    @property
    def counted(self):
        return [True] * len(self.completions)


def make_batches(seed=0, packed=False, rows=ROWS):
    return make_rollout_batch(seed, packed, rows).batches


def make_rollout_batch(seed=0, packed=False, rows=ROWS):
    """16 completions of 8 prompts in micro-batches of so many rows. Behaviour and reference log-probs are functions of
    the token, so that they follow it wherever packing puts it."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, 16, rng.integers(2, 6)).astype(np.int32) for _ in range(ROWS // 2)]
    completions = [
        [
            Completion(rng.integers(4, 16, n).astype(np.int32), rng.normal(-2, 0.1, n).astype(np.float32), "stop", 0)
            for n in rng.integers(1, 7, 2)
        ]
        for _ in prompts
    ]
    advantages = rng.normal(size=(len(prompts), 2))
    shape = data.RowShape(rows, 24, 24, packed=True) if packed else data.RowShape(rows, 12, 6)
    made = data.pack([Prompted(*both) for both in zip(prompts, completions, strict=True)], shape)
    targets = [batch.rows.targets for batch in made.batches]
    logprobs = [np.float32(-2.5) + np.float32(0.3) * np.sin(x, dtype=np.float32) for x in targets]
    anchors = [p - np.float32(0.1) * np.cos(x, dtype=np.float32) for p, x in zip(logprobs, targets, strict=True)]
    columns = {"behaviour_logprobs": logprobs, "ref_logprobs": anchors}
    return made.add(advantages=made.scatter(advantages), **columns)


def make_batch(seed=0):
    """All 16 completions in one micro-batch."""
    return make_batches(seed)[0]


@functools.cache  # what several tests ask for is compiled once
def build(mesh_shape, loss, devices, offload, compute_dtype, model, settings):
    mesh = parallel.make_mesh(dict(mesh_shape), jax.devices()[:devices])
    graphdef, shapes = models.abstract(model, compute_dtype=compute_dtype)
    param_shardings = parallel.shardings(models.logical_axes(model), shapes, mesh)
    settings = (
        dict(
            learning_rate=1e-2,
            warmup=Count(2, "updates"),
            b1=0.9,
            b2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            max_grad_norm=1.0,
        )
        | {"name": "adamw"}
        | dict(settings)
    )
    optimizer = make_optimizer(**settings)
    replicated = NamedSharding(mesh, PartitionSpec())
    like = abstract_state(abstract(shapes, param_shardings), optimizer, replicated, offload=offload)
    rows = NamedSharding(mesh, PartitionSpec(parallel.RULES["batch"]))
    loss = loss or policy_loss_fn("rpg", divergence="urkl", estimator="reinforce", kl_coef=0.1)
    programs = make_programs(
        graphdef,
        optimizer,
        Objective(loss),
        temperature=0.8,
        state=like,
        batch_sharding=rows,
    )
    return programs, mesh, param_shardings, optimizer, like


def make(mesh_shape=None, *, loss=None, devices=1, offload=False, compute_dtype="float32", model=MODEL, **settings):
    how = devices, offload, compute_dtype, model, tuple(settings.items())
    programs, mesh, param_shardings, *rest = build(tuple((mesh_shape or {}).items()), loss, *how)
    params = models.init(model, seed=3, shardings=param_shardings)[1]
    return programs, create_state(params, *rest), mesh


def two_updates(*, rows=ROWS, **settings):
    programs, state, mesh = make(**settings)
    with parallel.activate(mesh):
        for seed in (0, 1):
            state, metrics = programs.update(state, make_batches(seed, rows=rows))
    return jax.device_get(state), jax.device_get(metrics)


@pytest.fixture(scope="module")
def plain():
    return two_updates()


def assert_same(result, expected):
    state, metrics = result
    # f32 sums in another order; two AdamW updates move weights by up to 2e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.params, expected[0].params)
    for name, (total, weight) in expected[1].items():
        np.testing.assert_allclose(metrics[name][0], total, rtol=1e-4, atol=1e-4, err_msg=name)
        if not name.endswith("_max") and not name.startswith("grad_norm"):
            rtol = 1e-4 if name.endswith("_share") else 1e-7  # a sum of f32, and not a count
            np.testing.assert_allclose(metrics[name][1], weight, rtol=rtol, err_msg=name)


def largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.max(np.abs(x - y))), a, b)))


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 3, pytest.param(32, marks=pytest.mark.slow)])
def test_micro_batches_change_nothing(rows, plain):
    """32 rows and three do not fit 16: the rest is filled up with rows that have no tokens."""
    assert_same(two_updates(rows=rows), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        {"replica": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"tensor": 2, "fsdp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_eight_devices_change_nothing(shape, plain):
    assert_same(two_updates(mesh_shape=shape, devices=8), plain)


@pytest.mark.slow
def test_optimizer_state_in_host_memory_changes_nothing(plain):
    programs, state, mesh = make(offload=True)
    kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(part)} for part in (state.params, state.opt_state)]
    assert kinds == [{"device"}, {"device", "pinned_host"}]  # the optimizer's count stays
    with parallel.activate(mesh):
        for seed in (0, 1):
            state, _ = programs.update(state, make_batches(seed))
    slots = state.opt_state[0].mu, state.opt_state[0].nu
    assert {x.sharding.memory_kind for x in jax.tree.leaves(slots)} == {"pinned_host"}
    assert largest_difference(jax.device_get(state.params), plain[0].params) == 0
    assert largest_difference(jax.device_get(slots), (plain[0].opt_state[0].mu, plain[0].opt_state[0].nu)) == 0


@pytest.mark.slow
def test_micro_batches_on_eight_devices_change_nothing(plain):
    assert_same(two_updates(mesh_shape={"fsdp": 4, "tensor": 2}, devices=8, rows=4), plain)


def test_the_logprob_pass_is_what_the_update_sees():
    """Behaviour log-probs from the pass give w = 1 in the update."""
    programs, state, _ = make()
    batch = make_batch()
    logprobs, entropy, experts = programs.logprobs(state.params, batch.rows)
    assert experts is None
    assert logprobs.shape == entropy.shape == batch.mask.shape
    assert np.all(np.asarray(entropy)[batch.mask > 0] > 0)
    _, metrics = programs.update(state, [dataclasses.replace(batch, behaviour_logprobs=logprobs)])
    total, weight = metrics["importance_ratio"]
    np.testing.assert_allclose(total / weight, 1.0, atol=1e-5)
    assert metrics["log_ratio_max"][0] < 1e-5


def test_the_update_replays_the_experts_that_the_log_prob_pass_replays():
    programs, state, _ = make(model=MOE)
    batch = make_batch()
    record = np.argsort(np.random.default_rng(0).random((*batch.rows.tokens.shape, 2, 4)))[..., :2].astype(np.uint8)
    batch = dataclasses.replace(batch, rows=batch.rows.replace(experts=record))
    for rows, ratios_are_one in ((batch.rows, True), (batch.rows.unrouted, False)):
        logprobs = programs.logprobs(state.params, rows)[0]
        _, metrics = programs.update(make(model=MOE)[1], [dataclasses.replace(batch, behaviour_logprobs=logprobs)])
        assert (metrics["log_ratio_max"][0] < 1e-5) == ratios_are_one


@pytest.mark.parametrize("compute_dtype, precision", [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_a_float32_model_has_float32_products_where_the_default_would_round_their_factors(compute_dtype, precision):
    programs, state, _ = make(compute_dtype=compute_dtype)
    batch = make_batch()
    for program, inputs in ((programs.fused, (state, batch)), (programs.logprobs, (state.params, batch.rows))):
        text = program.lower(*inputs).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert len(products) > 5
        assert all(f"precision = [{precision}, {precision}]" in line for line in products)


def test_logprobs_are_taken_at_the_sampling_temperature():
    programs, state, _ = make()
    batch = make_batch()
    import flax.nnx as nnx

    model = nnx.merge(models.abstract(MODEL)[0], state.params)
    hidden = model(batch.rows.tokens, batch.rows.positions, batch.rows.segment_ids)
    full = jax.nn.log_softmax(model.logits(hidden) / 0.8)
    logprobs = programs.logprobs(state.params, batch.rows)[0]
    for row, column in zip(*np.nonzero(batch.mask), strict=True):
        expected = full[row, batch.rows.predictors[row, column], batch.rows.targets[row, column]]
        np.testing.assert_allclose(logprobs[row, column], expected, atol=1e-5)


def test_a_nonfinite_loss_or_gradient_is_skipped_and_counted():
    def poisoned(logprobs, batch):
        total, weight, metrics = losses.policy_loss(
            "ppo",
            logprobs=logprobs,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
        )
        return total * jnp.where(batch.rows.tokens[0, 0] == 15, jnp.nan, 1.0), weight, metrics

    programs, state, _ = make(loss=poisoned)
    before = jax.device_get(state)
    bad = make_batch()
    bad.rows.tokens[0, 0] = 15
    state, metrics = programs.update(state, [bad])
    assert metrics["nonfinite_updates"][0] == 1 and state.skipped == 1 and state.updates == 0
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.opt_state)),
        (before.params, before.opt_state),
    )
    good = make_batch()
    good.rows.tokens[0, 0] = 14
    state, metrics = programs.update(state, [good])
    assert metrics["nonfinite_updates"][0] == 0 and state.updates == 1
    assert any(
        np.any(a != b) for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before.params), strict=True)
    )


@pytest.mark.slow  # the model, the log-probs and the losses have packing tests of their own in the default run
def test_packed_rows_change_nothing(plain):
    programs, state, _ = make()
    for seed in (0, 1):
        state, metrics = programs.update(state, make_batches(seed, packed=True, rows=4))
    assert_same((jax.device_get(state), jax.device_get(metrics)), plain)


@pytest.mark.slow  # in the default run test_optimizer has its rate, and tests/storage its evaluation weights
def test_schedule_free_trains_and_evaluates_at_its_average():
    programs, state, _ = make(name="schedule_free_adamw", learning_rate=1e-3)
    optimizer = make_optimizer(
        "schedule_free_adamw",
        learning_rate=1e-3, warmup=Count(2, "updates"), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0,
    )  # fmt: skip
    for seed in range(4):
        state, _ = programs.update(state, [make_batch(seed)])
    averaged = optimizer.evaluation_params(state.opt_state, state.params)
    gap = max(
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(averaged), jax.tree.leaves(state.params), strict=True)
    )
    assert 0 < gap < 1e-2


@pytest.mark.slow
def test_schedule_free_has_ratio_one_at_the_first_update_of_a_batch():
    """The old log-probs are of the weights that are trained and that sample, y, not of the average x."""
    programs, state, _ = make(name="schedule_free_adamw", learning_rate=1e-3)
    numbers = dict(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    optimizer = make_optimizer("schedule_free_adamw", learning_rate=1e-3, warmup=Count(2, "updates"), **numbers)
    for seed in range(4):
        state, _ = programs.update(state, [make_batch(seed)])
    algorithm = SimpleNamespace(
        logprobs=programs.logprobs,
        reference=SimpleNamespace(is_behaviour=True),
        decoupled=False,
    )
    batch = dataclasses.replace(make_rollout_batch(4), groups=[])  # none was sampled by earlier weights
    [old] = add_logprobs(algorithm, batch, state)[0].batches
    averaged = programs.logprobs(optimizer.evaluation_params(state.opt_state, state.params), old.rows)[0]
    assert np.max(np.abs(averaged - old.behaviour_logprobs)[old.mask > 0]) > 1e-4
    _, metrics = programs.update(state, [old])
    total, weight = metrics["behaviour_forward_kl_k1"]
    assert abs(total / weight) < 1e-6


@pytest.mark.parametrize("coincides", [True, False])
def test_a_reference_other_than_the_policy_chooses_its_own_experts(coincides):
    """In its pass before the update, and in the hidden states that an update reads."""
    seen = []

    def program(params, rows):
        seen.append((params, rows.experts is not None))
        return (jnp.zeros(rows.targets.shape),) * 2 + (None,)

    reference = SimpleNamespace(
        is_behaviour=False, coincides=lambda: coincides, params=lambda: "reference", programs=None, scores=None
    )
    programs = make()[0]._replace(hidden=program, head=lambda params: None)
    algorithm = SimpleNamespace(logprobs=program, reference=reference, decoupled=False, programs=programs)
    batch = dataclasses.replace(make_rollout_batch(4), groups=[])
    rows = [b.rows.replace(experts=np.zeros((*b.rows.tokens.shape, 2, 1), np.uint8)) for b in batch.batches]
    batch.batches[:] = [dataclasses.replace(b, rows=own) for b, own in zip(batch.batches, rows, strict=True)]
    add_logprobs(algorithm, batch, SimpleNamespace(params="policy"))
    assert seen == ([("policy", True)] if coincides else [("policy", True), ("reference", False)])
    seen.clear()
    anchor_of(algorithm, SimpleNamespace(params=jnp.ones(2))).hidden(rows[0])
    assert [replays for _, replays in seen] == [coincides]


@pytest.mark.parametrize("name", ["reinforce_pp", pytest.param("grpo", marks=pytest.mark.slow)])
def test_an_update_that_computes_the_old_log_probs_has_them_for_a_reference_that_is_the_same_policy(name):
    programs, state, _ = make()
    objective = Objective(policy_loss_fn(name, kl_coef=0.5), on_policy=True)
    functions = _Functions(models.abstract(MODEL, compute_dtype="float32")[0], None, objective, 0.8)
    batch = dataclasses.replace(make_batch(), behaviour_logprobs=None, ref_logprobs=None)
    known = dataclasses.replace(batch, ref_logprobs=programs.logprobs(state.params, batch.rows)[0])
    gradients = jax.jit(functools.partial(functions.gradients, Frozen(None), state.weights))
    found, expected = gradients(batch), gradients(known)
    assert largest_difference(found.grads, expected.grads) < 1e-4  # f32, and the pass is another program
    assert losses.divided(found.metrics)["kl"] == 0


def test_an_update_of_several_micro_batches_beats_between_its_launches(monkeypatch):
    launched = []

    def launch(name, result=None):
        return lambda *_: (launched.append(name), result)[1]

    programs = {name: launch(name) for name in Programs._fields} | {"apply": launch("apply", (None, {}))}
    state = TrainState({}, {}, 0, 0)
    monkeypatch.setattr("rpg_jax.training.step.beat", launch("beat"))
    Programs(**programs).update(state, [None] * 3)
    assert launched == ["start", "beat", "add", "beat", "add", "beat", "apply"]
