"""The learning rate of every update, found from how far a weight moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rpg_jax.training.optimizer import NAMES, _by_layer, apply_update, make_optimizer, matrices
from rpg_jax.types import Count

RATE = 0.6


def rates(name, warmup, updates, updates_per_step=1):
    """Under a constant gradient Adam moves a weight by the learning rate; Schedule-Free moves its z so."""
    numbers = dict(b1=0.9, b2=0.99, eps=1e-12, weight_decay=0.0, max_grad_norm=1.0)
    optimizer = make_optimizer(
        name, learning_rate=RATE, warmup=Count(*warmup), updates_per_step=updates_per_step, **numbers
    )
    params, found = jnp.zeros(1), []
    state = optimizer.init(params)
    for _ in range(updates):
        change, after = optimizer.update(jnp.ones(1), state, params)
        found.append(-float(change[0]) if name == "adamw" else float((state.z - after.z)[0]))
        params, state = params + change, after
        assert np.isfinite(params)
    return found


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
@pytest.mark.parametrize("updates_per_step", [1, 4])
def test_a_warm_up_in_steps_is_a_stair_whose_first_step_has_no_learning_rate(name, updates_per_step):
    found = rates(name, (3, "steps"), 5 * updates_per_step, updates_per_step)
    expected = np.repeat([0, 1 / 3, 2 / 3, 1, 1], updates_per_step) * RATE
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)  # Adam's bias corrections round
    assert found[:updates_per_step] == [0.0] * updates_per_step


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_a_warm_up_in_updates_is_a_slope_whatever_a_steps_updates(name):
    expected = np.minimum(np.arange(1, 7) / 4, 1) * RATE
    for updates_per_step in (1, 4):
        np.testing.assert_allclose(rates(name, (4, "updates"), 6, updates_per_step), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("unit", ["steps", "updates"])
@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_without_a_warm_up_the_rate_is_constant(name, unit):
    np.testing.assert_allclose(rates(name, (0, unit), 3, 2), [RATE] * 3, rtol=1e-5)


def published_schedule_free(y, gradients, rates, b1, b2, eps, weight_decay):
    """(x, y, z) after each update, in float64, by the loop of facebookresearch/schedule_free: c = r² / Σ r² of the
    largest rate r so far, and 0 while all rates were 0."""
    x, z, squares, largest, total = y, y, 0.0, 0.0, 0.0
    for k, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
        largest = max(largest, rate)
        total += largest**2
        c = largest**2 / total if total else 0.0
        squares = b2 * squares + (1 - b2) * g**2
        z = z - rate * (g / (np.sqrt(squares / (1 - b2 ** (k + 1))) + eps) + weight_decay * y)
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
        yield x, y, z


@pytest.mark.parametrize("b1", [0.9, 0.1])
@pytest.mark.parametrize(
    ("warmup", "shares"),
    [
        (Count(0, "steps"), [1.0] * 8),
        (Count(1, "updates"), [1.0] * 8),
        (Count(5, "updates"), [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1]),
        (Count(3, "steps"), [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1]),
    ],
)
def test_schedule_free_is_the_published_algorithm_in_and_after_the_warm_up(warmup, shares, b1):
    draw = np.random.default_rng(0)
    start, gradients, rate = draw.normal(size=5), draw.normal(size=(8, 5)), 0.1
    numbers = dict(b1=b1, b2=0.99, eps=1e-8, weight_decay=0.1)
    optimizer = make_optimizer(
        "schedule_free_adamw", learning_rate=rate, warmup=warmup, updates_per_step=2, max_grad_norm=1.0, **numbers
    )
    params = jnp.asarray(start, jnp.float32)
    state = optimizer.init(params)
    published = published_schedule_free(start, gradients, [rate * share for share in shares], **numbers)
    for gradient, expected in zip(gradients, published, strict=True):
        change, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = params + change
        found = optimizer.evaluation_params(state, params), params, state.z
        # float32 rounds numbers near 1 to 6e-8, and x has 1/b1 of that in each of 8 updates.
        np.testing.assert_allclose(found, expected, rtol=0, atol=8 * 6e-8 / b1 + 5e-7)


@pytest.mark.parametrize("b1", [0.0, 0.05])
def test_schedule_free_refuses_an_interpolation_from_which_its_average_cannot_be_computed(b1):
    given = dict(learning_rate=RATE, warmup=Count(0, "updates"), **{**NUMBERS, "b1": b1})
    with pytest.raises(ValueError, match=f"optimizer.b1={b1:g} must be at least 0.1 for schedule_free_adamw"):
        make_optimizer("schedule_free_adamw", **given)
    assert make_optimizer("adamw", **given), "Adam needs no momentum"


NUMBERS = dict(b1=0.9, b2=0.99, eps=1e-12, weight_decay=0.0, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("schedule", "falls"),
    [("linear", [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]), ("cosine", [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2])],
)
@pytest.mark.parametrize("unit", ["steps", "updates"])
def test_a_schedule_falls_after_the_warm_up_to_its_share_and_stays(schedule, falls, unit):
    per_step = 2 if unit == "steps" else 1
    counts = {"warmup": Count(2 // per_step, unit), "decay_until": Count(6 // per_step, unit)}
    optimizer = make_optimizer(
        "adamw", learning_rate=RATE, schedule=schedule, final_rate=0.2, updates_per_step=per_step, **counts, **NUMBERS
    )
    found = [float(optimizer.learning_rate(u)) for u in range(2, 9)]
    np.testing.assert_allclose(found, np.array(falls) * RATE, rtol=1e-6)


CHOICES = [("name", "adamw, nadamw"), ("schedule", "constant, linear, cosine"), ("decayed", "all, matrices")]


@pytest.mark.parametrize(("field", "known"), CHOICES)
def test_a_word_that_is_not_among_the_choices_is_refused_with_the_choices(field, known):
    given = {"name": "adamw", "warmup": Count(0, "updates"), "decay_until": Count(4, "updates"), field: "cosin"}
    with pytest.raises(ValueError, match=f"unknown optimizer.{field} 'cosin'.*Known: {known}"):
        make_optimizer(learning_rate=RATE, **given, **NUMBERS)


def test_a_schedule_inside_its_warm_up_and_one_of_an_averaging_optimizer_are_refused():
    given = dict(learning_rate=RATE, schedule="cosine", decay_until=Count(4, "updates"), **NUMBERS)
    with pytest.raises(ValueError, match="update 4 is inside the warm-up of 5 updates"):
        make_optimizer("adamw", warmup=Count(5, "updates"), **given)
    with pytest.raises(ValueError, match="schedule_free_adamw takes optimizer.schedule=constant"):
        make_optimizer("schedule_free_adamw", warmup=Count(0, "updates"), **given)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda rate, wd: optax.adamw(rate, 0.9, 0.99, 1e-12, weight_decay=wd)),
        ("nadamw", lambda rate, wd: optax.nadamw(rate, 0.9, 0.99, 1e-12, weight_decay=wd)),
        ("lion", lambda rate, wd: optax.lion(rate, 0.9, 0.99, weight_decay=wd)),
        ("sgd", lambda rate, wd: optax.chain(optax.trace(0.9), optax.add_decayed_weights(wd), optax.scale(-rate))),
        ("rmsprop", lambda rate, wd: optax.chain(optax.add_decayed_weights(0.0), optax.rmsprop(rate, 0.99, 1e-12))),
    ],
)
def test_an_optimizer_is_optaxs_of_its_name(name, reference):
    decay = 0.0 if name == "rmsprop" else 0.1  # optax's has none
    numbers = {**NUMBERS, "weight_decay": decay, "learning_rate": RATE, "warmup": Count(0, "steps")}
    own, theirs = make_optimizer(name, **numbers), reference(RATE, decay)
    params = jnp.array([1.0, -2.0, 0.5])
    states = [own.init(params), theirs.init(params)]
    for step in range(3):
        gradient = jnp.array([0.3, -1.0, 2.0]) * (step - 1.2)
        moves, states = zip(
            *(o.update(gradient, s, params) for o, s in zip((own, theirs), states, strict=True)), strict=True
        )
        np.testing.assert_allclose(*moves, rtol=1e-6)
        params = params + moves[0]


def test_weight_decay_can_leave_norms_and_biases_alone():
    params = {"layers": {"mlp_norm": jnp.ones((2, 3)), "attention": {"q": jnp.ones((2, 3)), "q_bias": jnp.ones(2)}}}
    assert matrices(params) == {"layers": {"mlp_norm": False, "attention": {"q": True, "q_bias": False}}}
    numbers = {**NUMBERS, "weight_decay": 0.5, "learning_rate": RATE, "warmup": Count(0, "steps")}
    optimizer = make_optimizer("adamw", decayed="matrices", **numbers)
    zero = jax.tree.map(jnp.zeros_like, params)
    moved, _ = optimizer.update(zero, optimizer.init(params), params)
    assert float(moved["layers"]["attention"]["q"][0, 0]) == pytest.approx(-0.5 * RATE)
    assert not jnp.any(moved["layers"]["mlp_norm"]) and not jnp.any(moved["layers"]["attention"]["q_bias"])


def test_counts_are_written_with_their_unit_and_a_count_without_one_is_refused():
    texts = {"10 steps": Count(10, "steps"), "1 step": Count(1, "steps"), "16updates": Count(16, "updates")}
    assert {text: Count.parse(text) for text in texts} == texts
    assert [str(count) for count in texts.values()] == ["10 steps", "1 step", "16 updates"]
    for text in ("10", "steps", "-1 steps", "10 epochs", "1.5 steps", ""):
        with pytest.raises(ValueError, match=f"optimizer.warmup='{text}' must be a number with its unit: '10 steps'"):
            Count.parse(text, "optimizer.warmup")


RATED = {"scale": jnp.float32(0.5), "where": jnp.bool_(True)}


def drawn(seed):
    """A tree of weights or gradients with three stacked layers."""
    draw = np.random.default_rng(seed)
    stacks = {"w": draw.normal(size=(3, 8, 4)), "scale": draw.normal(size=(3, 4))}
    return jax.tree.map(jnp.float32, {"layers": stacks, "embed": draw.normal(size=(6, 4))})


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_take_turns_have_the_update_of_all_layers_together(name):
    numbers = dict(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0, warmup=Count(1, "updates"))
    update = make_optimizer(name, learning_rate=RATE, updates_per_step=1, **numbers)

    def together(grads, state, params):
        return apply_update(update.update, grads, state, params, **RATED)

    def in_turn(grads, state, params):
        def updated(grads, state, params):
            changes, after = update.update(jax.tree.map(lambda g: g * 0.5, grads), state, params)
            return optax.apply_updates(params, changes), after

        return _by_layer(updated, grads, state, params)

    found = []
    for step in map(jax.jit, (together, in_turn)):
        params = drawn(0)
        state = update.init(params)
        for number in (1, 2):
            params, state = step(drawn(number), state, params)
        found.append(jax.tree.leaves((params, state)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)  # fused otherwise; an ulp of 12 is 1e-6


def test_layers_take_turns_on_tpus_and_gpus_and_not_on_cpus():
    update, params = optax.sgd(RATE), drawn(0)
    traced = jax.jit(lambda *trees: apply_update(update.update, *trees, **RATED)).trace(
        params, update.init(params), params
    )
    loops = {name: "while" in traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu", "cuda")}
    assert loops == {"cpu": False, "tpu": True, "cuda": True}
