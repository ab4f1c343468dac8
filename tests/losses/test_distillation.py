"""Where each row of distillation ends, by descent along its mean gradient, for a student that cannot be its teacher.

The teacher has a softmax at every prefix, the student one for each last action. So no student has a KL of 0, and the
objectives have different minima. Every completion is enumerated in float64.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rpg_jax.losses import METHODS
from tests.losses.test_completions import ACTIONS, logprobs, tree
from tests.losses.test_exact_kl import expected_loss

pytestmark = pytest.mark.usefixtures("x64")
ROOT = Path(__file__).parents[2]
LENGTH, STEPS = 4, 1_500
OFF_POLICY = {"weight": "product", "trace_cap": float("inf")}


@functools.cache
def last_actions():
    """The last action of every prefix; `ACTIONS` for the empty one. i[prefixes]"""
    actions, nodes, mask, prefixes = tree(LENGTH)
    last = np.full(prefixes, ACTIONS)
    last[nodes[:, 1:][mask[:, 1:] == 1]] = actions[:, :-1][mask[:, 1:] == 1]
    return last


@functools.cache
def tables():
    """The teacher f64[prefixes, ACTIONS], and the student before its first update f64[ACTIONS + 1, ACTIONS]."""
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.normal(0, 1.5, (tree(LENGTH)[3], ACTIONS))), jnp.asarray(
        rng.normal(0, 1, (ACTIONS + 1, ACTIONS))
    )


def kl(student, direction="reverse"):
    """KL of completions between a student and the teacher, nats."""
    p, q = (jnp.sum(logprobs(x, LENGTH), axis=1) for x in (student[last_actions()], tables()[0]))
    p, q = (p, q) if direction == "reverse" else (q, p)
    return jnp.exp(p) @ (p - q)


def end(gradient):
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, STEPS))

    def step(carry, _):
        student, state = carry
        updates, state = optimizer.update(gradient(student), state)
        return (optax.apply_updates(student, updates), state), None

    start = tables()[1]
    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), None, length=STEPS)[0][0])()


@functools.cache
def least(direction="reverse"):
    return float(kl(end(jax.grad(functools.partial(kl, direction=direction))), direction))


def ended(method, *, refresh=True, **changed):
    """The student at the end of a row without rewards; π_old follows the student, or stays the first one."""
    teacher, start = tables()
    options, rewards = dict(METHODS[method].hyperparameters) | changed, jnp.zeros(len(tree(LENGTH)[0]))

    def gradient(student):
        case = None, jax.lax.stop_gradient(student if refresh else start)[last_actions()], teacher, rewards
        return jax.grad(lambda x: expected_loss(x[last_actions()], case, LENGTH, **options))(student)

    return end(gradient)


def test_no_student_is_the_teacher():
    assert least() > 0.05 and least("forward") > 0.05


@pytest.mark.parametrize("method", ["OPD-TO-GO", "OPD-SEQ"])
def test_on_policy_the_rows_of_completions_end_at_the_least_kl(method):
    np.testing.assert_allclose(kl(ended(method)), least(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["OPD", "OPD-EXACT"])
def test_the_kl_of_single_tokens_ends_above_the_least_kl_of_completions(method):
    """Both rows have one mean gradient, so they end at one place."""
    assert kl(ended(method)) > least() + 0.005
    np.testing.assert_allclose(kl(ended(method)), kl(ended("OPD")), rtol=0, atol=1e-6)


def test_off_policy_the_exact_weights_alone_end_at_the_least_kl():
    for changed in ({}, {"estimator": "exact"}):
        exact = ended("OPD-TO-GO", refresh=False, **OFF_POLICY, **changed)
        np.testing.assert_allclose(kl(exact), least(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(kl(ended("OPD-SEQ", refresh=False, weight="product")), least(), rtol=0, atol=1e-5)
    assert kl(ended("OPD-TO-GO", refresh=False)) > least() + 0.001


def test_the_table_of_the_page_has_these_ends():
    def cells(method, *options):
        return " | ".join(f"{kl(ended(method, **own)):.3f}" for own in options)

    stays, page = {"refresh": False}, (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    exact = {"weight": "product"}
    supervised = kl(end(jax.grad(functools.partial(kl, direction="forward"))))
    for line in (
        f"of any student is {least():.3f}.",
        f"all {len(tree(LENGTH)[0])} completions",
        f"| `OPD`, `OPD-EXACT` | {cells('OPD-EXACT', {}, stays)} |",
        f"| `OPD-FKL` | {cells('OPD-FKL', {}, stays)} |",
        f"| `OPD-TO-GO` | {cells('OPD-TO-GO', {}, stays)} |",
        f"| `OPD-SEQ` | {cells('OPD-SEQ', {}, stays)} |",
        f"with `loss.weight=product` | {cells('OPD-SEQ', exact, exact | stays)} |",
        f"| supervised learning on the teacher's completions | {supervised:.3f} | |",
    ):
        assert line in page, line


def test_the_forward_kl_at_the_students_prefixes_is_not_that_of_the_teachers_samples():
    """Supervised learning on the teacher's completions descends KL(teacher‖student) of completions."""
    student = ended("OPD-FKL")
    assert kl(student, "forward") > least("forward") + 0.005
    assert kl(student) < kl(end(jax.grad(functools.partial(kl, direction="forward"))))
