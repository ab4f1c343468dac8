"""The public face: what never changes a loss, what is refused, and what is reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.losses import AGGREGATES, LOSSES, SAMPLER_CORRECTIONS, merge, policy_loss

NAMES = tuple(LOSSES)
# Sums of f32 in another order: a few units of rounding of numbers of order one.
ROUNDING = dict(rtol=2e-6, atol=2e-7)


def value_and_gradient(name, batch, **hyperparameters):
    """loss_sum with (weight, metrics) beside it, and its gradient in logprobs."""

    def loss(logprobs):
        total, weight, metrics = policy_loss(name, **batch | {"logprobs": logprobs}, **hyperparameters)
        return total, (weight, metrics)

    return jax.value_and_grad(loss, has_aux=True)(batch["logprobs"])


def run(name, batch, *, evaluate=value_and_gradient, **hyperparameters):
    """loss_sum, weight, metrics, gradient. Not jitted: on a handful of numbers compiling costs more than it saves."""
    (total, (weight, metrics)), gradient = evaluate(name, batch, **hyperparameters)
    return total, weight, metrics, gradient


def assert_same(first, second, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), first, second)


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_never_change_anything(batch, name):
    options = dict(sampler_correction="truncate")
    options["evaluate"] = jax.jit(value_and_gradient, static_argnames=("name", "sampler_correction"))
    clean = run(name, batch, **options)
    kept = batch["mask"]
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        dirty = {key: jnp.where(kept, x, junk) if key != "mask" else x for key, x in batch.items()}
        assert_same(run(name, dirty, **options), clean, rtol=0)
    assert np.all(clean[3][~np.asarray(kept)] == 0)


@jax.jit
def every_aggregate(batch):
    """(loss_sum, weight, metrics, gradient) of RPG with each aggregate, and of GSPO."""
    cases = [*(("rpg", kind) for kind in AGGREGATES), ("gspo", "sequence_mean_token_mean")]
    return [run(name, batch, aggregate=kind, constant_length=10.0) for name, kind in cases]


def with_gradients(results, change):
    return [(*scalars, change(gradient)) for *scalars, gradient in results]


def test_padding_leaves_loss_and_gradient_unchanged(batch):
    padded = {key: jnp.pad(x, ((0, 3), (0, 5))) for key, x in batch.items()}
    found = with_gradients(every_aggregate(padded), lambda gradient: gradient[:4, :6])
    assert_same(found, with_gradients(every_aggregate(batch), lambda gradient: gradient), **ROUNDING)


def test_micro_batches_leave_loss_and_gradient_unchanged(batch):
    halves = [every_aggregate({key: x[rows] for key, x in batch.items()}) for rows in (slice(0, 1), slice(1, 4))]
    for whole, *parts in zip(every_aggregate(batch), *halves, strict=True):
        sums, weights, metrics, gradients = zip(*parts, strict=True)
        assert_same((sum(sums), sum(weights), merge(metrics), jnp.concatenate(gradients)), whole, **ROUNDING)


def test_packing_leaves_loss_and_gradient_unchanged(batch):
    """Rows 0 and 1 share one row of 12, rows 2 and 3 another; the ragged ends lie inside the row."""
    packed = {key: x.reshape(2, 12) for key, x in batch.items()}
    packed["completion_ids"] = jnp.where(batch["mask"], jnp.array([1, 2, 1, 2])[:, None], 0).reshape(2, 12)
    found = with_gradients(every_aggregate(packed), lambda gradient: gradient.reshape(4, 6))
    assert_same(found, with_gradients(every_aggregate(batch), lambda gradient: gradient), **ROUNDING)


OF_COMPLETIONS = dict(weight="product", clip="none", aggregate="sequence_mean_token_sum")
EVERY = [
    *((name, {}) for name in NAMES),
    *(("rpg", dict(level=level, **OF_COMPLETIONS)) for level in ("sequence", "to_go")),
    *(("rpg", dict(sampler_correction=kind)) for kind in SAMPLER_CORRECTIONS),
    *(("ppo", dict(aggregate=kind, constant_length=10.0)) for kind in AGGREGATES),
]


@pytest.mark.slow
def test_a_conversation_has_the_loss_of_its_turns_without_what_was_said_between_them(batch, x64):
    """Rows of six tokens, of which every row has two or three, against rows where the others are behind the end."""
    kept = np.array([[1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]) > 0
    order = np.argsort(~kept, axis=1, kind="stable")
    whole = {key: jnp.asarray(x, float) for key, x in batch.items()} | {"mask": jnp.asarray(kept)}
    whole["sampler_logprobs"] = whole["behaviour_logprobs"] + 0.0003 * whole["ref_logprobs"]  # within all bounds
    cut = {key: jnp.take_along_axis(x, jnp.asarray(order), 1) for key, x in whole.items()}

    @jax.jit
    def every_case(batch):
        return [run(name, batch, **options) for name, options in EVERY]

    for case, long, short in zip(EVERY, every_case(whole), every_case(cut), strict=True):
        at_kept = np.take_along_axis(np.asarray(long[3]), order, 1)
        assert_same((*long[:3], at_kept), short, rtol=1e-12, atol=1e-14), case  # float64, sums in other orders
        assert np.any(at_kept), case


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rpg", dict(level="sequence", **OF_COMPLETIONS)),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("rpg", "gspo")),
        pytest.param("rpg", dict(level="to_go", **OF_COMPLETIONS), marks=pytest.mark.slow),
    ],
)
def test_the_number_of_devices_leaves_loss_and_gradient_unchanged(batch, name, options):
    """Rows over four devices, tokens over two."""
    batch["completion_ids"] = jnp.where(jnp.arange(6) < 2, 1, 2) * jnp.ones((4, 1), jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("rows", "tokens"))
    evaluate = jax.jit(value_and_gradient, static_argnames=("name", *options))
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("rows", "tokens")))
    sharded = run(name, placed, evaluate=evaluate, **options)
    assert len(sharded[3].sharding.device_set) == 8
    assert_same(sharded, run(name, batch, **options), **ROUNDING)


@pytest.mark.parametrize("estimator", ["differentiable", "reinforce"])
@pytest.mark.parametrize("form", ["paper", pytest.param("verl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", ["none", "dual", "truncate", "reward"])
def test_log_ratios_of_sixty_have_finite_values_and_gradients_in_f32(form, estimator, clip):
    for divergence in ("fkl", "ufkl", "rkl", "urkl"):
        options = dict(divergence=divergence, estimator=estimator, clip=clip, form=form)
        assert_finite_at_sixty("rpg", **options)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rpg"])
def test_log_ratios_of_sixty_are_finite_for_every_baseline_in_f32(name):
    assert_finite_at_sixty(name)


def assert_finite_at_sixty(name, **options):
    signs = np.array(np.meshgrid([-60.0, 0.0, 60.0], [-60.0, 0.0, 60.0], [-1.0, 1.0], [-60.0, 60.0])).reshape(4, -1)
    w, rho, advantage, sampler = jnp.asarray(signs, jnp.float32)[:, :, None]
    old = jnp.full_like(w, -61.0)
    batch = dict(
        logprobs=old + w,
        behaviour_logprobs=old,
        ref_logprobs=old + rho,
        sampler_logprobs=old + sampler,
        advantages=advantage,
        mask=jnp.ones_like(w),
    )
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), run(name, batch, **options)))


def test_no_reference_means_the_behaviour_policy(batch):
    same = batch | {"ref_logprobs": batch["behaviour_logprobs"]}
    for clip in ("none", "dual", "truncate", "reward"):
        options = dict(divergence="ufkl", clip=clip, kl_coef=0.3)
        assert_same(run("rpg", batch | {"ref_logprobs": None}, **options), run("rpg", same, **options), **ROUNDING)


def test_behaviour_mass_scales_loss_and_gradient(batch):
    single, double = run("rpg", batch), run("rpg", batch, behaviour_mass=2.0)
    assert_same((double[0], double[3]), (2 * single[0], 2 * single[3]), rtol=1e-6)


def test_advantages_of_completions_are_repeated_over_their_tokens(batch):
    assert_same(run("rpg", batch | {"advantages": batch["advantages"][:, 0]}), run("rpg", batch), rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_only_logprobs_carry_a_gradient(batch, name):
    others = {k: x for k, x in batch.items() if k not in ("logprobs", "mask")}
    gradients = jax.grad(lambda x: policy_loss(name, logprobs=batch["logprobs"], mask=batch["mask"], **x)[0])(others)
    assert all(np.all(g == 0) for g in gradients.values())


def test_metrics_carry_no_gradient(batch):
    def metrics(logprobs):
        return sum(total for total, _ in policy_loss("ppo", **batch | {"logprobs": logprobs})[2].values())

    assert not np.any(jax.grad(metrics)(batch["logprobs"]))


@pytest.mark.parametrize("name", ["logprobs", "behaviour_logprobs", "ref_logprobs", "sampler_logprobs"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logprobs_of_sixteen_bits_are_refused(batch, name, dtype):
    with pytest.raises(ValueError, match=rf"^{name} are {jnp.dtype(dtype)}, .* float32"):
        run("rpg", batch | {name: batch[name].astype(dtype)})


def test_bf16_advantages_are_computed_in_f32(batch):
    half = batch | {"advantages": batch["advantages"].astype(jnp.bfloat16)}
    total, weight, metrics, _ = run("rpg", half)
    assert {x.dtype for x in jax.tree.leaves((total, weight, metrics))} == {jnp.dtype("float32")}
    exact = run("rpg", batch | {"advantages": half["advantages"].astype(jnp.float32)})
    assert_same((total, weight, metrics), exact[:3], rtol=0)


FAR = (
    *(("rpg", dict(clip=clip, divergence=d)) for clip in ("none", "reward", "dual") for d in ("ufkl", "urkl")),
    ("rpg", dict(clip="none", divergence="ufkl", estimator="differentiable")),
    ("rpg", dict(clip="none", divergence="urkl", estimator="differentiable")),
    *(("rpg", dict(level=level, divergence="js", **OF_COMPLETIONS)) for level in ("sequence", "to_go")),
    ("grpo", {}),
    ("grpo", dict(kl_weighting="importance")),
)


@pytest.mark.parametrize(("name", "options"), FAR)
def test_a_log_ratio_of_a_hundred_nats_leaves_every_gradient_finite(batch, name, options):
    """With an advantage of 0 there, as 0 · ∞ would be."""
    batch |= {"advantages": batch["advantages"].at[0].set(0)}
    for which, gap, bounded in (("logprobs", 100, 1), ("logprobs", -100, 0), ("ref_logprobs", 100, 0)):
        far = batch | {which: batch[which].at[0, 1].add(gap)}
        total, _, metrics, gradient = run(name, far, kl_coef=0.1, **options)
        assert np.isfinite(total) and np.all(np.isfinite(gradient)), (which, gap)
        assert np.all(np.isfinite(jax.tree.leaves(metrics)))
        assert metrics["ratio_bounded_fraction"][0] == bounded


def test_metrics_report_ratios_and_kl(batch):
    metrics = run("rpg", batch)[2]
    mean = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    kept = np.asarray(batch["mask"])
    x = {k: np.asarray(v, np.float64)[kept] for k, v in batch.items()}
    log_w, log_y = x["logprobs"] - x["behaviour_logprobs"], x["ref_logprobs"] - x["logprobs"]
    gap = x["behaviour_logprobs"] - x["sampler_logprobs"]
    expected = {
        "importance_ratio": np.exp(log_w).mean(),
        "log_ratio_max": np.abs(log_w).max(),
        "kl": (np.exp(log_w) * (np.exp(log_y) - 1 - log_y)).mean(),
        "kl_k1": -log_y.mean(),
        "kl_k2": (log_y**2 / 2).mean(),
        "kl_k3": (np.exp(log_y) - 1 - log_y).mean(),
        "behaviour_forward_kl_k1": -log_w.mean(),
        "behaviour_forward_kl_k3": (np.exp(log_w) - 1 - log_w).mean(),
        "sampler_ratio": np.exp(gap).mean(),
        "sampler_ratio_squared": np.exp(2 * gap).mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(mean[name], value, rtol=1e-4, err_msg=name)
    assert mean["clip_fraction"] == pytest.approx(
        mean["clip_high_fraction"] + mean["clip_low_fraction"] + mean["clip_dual_fraction"]
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fixed", [True, False], ids=["another_reference", "the_behaviour_policy"])
def test_the_reported_kl_is_that_of_the_policy_to_the_reference_off_policy_too(fixed):
    """E_{π_old} is enumerated: the metrics of each of eight tokens, weighted by the token's probability."""
    policy, old, other = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(3).normal(0, 1, (3, 8))))
    ref = other if fixed else old

    def of_each_action(logprob, old, ref):
        one = dict(logprobs=logprob, behaviour_logprobs=old, ref_logprobs=ref if fixed else None)
        one = {name: None if x is None else x[None, None] for name, x in one.items()}
        metrics = policy_loss("ppo", **one, advantages=jnp.zeros(1), mask=jnp.ones((1, 1)))[2]
        return {name: total for name, (total, _) in metrics.items()}

    expected = {k: jnp.exp(old) @ x for k, x in jax.vmap(of_each_action)(policy, old, ref).items()}
    exact = jnp.exp(policy) @ (policy - ref)
    np.testing.assert_allclose(expected["kl"], exact, rtol=1e-12)
    assert all(abs(expected[name] / exact - 1) > 0.1 for name in ("kl_k1", "kl_k2", "kl_k3"))
    forward = jnp.exp(old) @ (old - policy)
    for name in ("behaviour_forward_kl_k1", "behaviour_forward_kl_k3"):
        np.testing.assert_allclose(expected[name], forward, rtol=1e-12)


def test_a_batch_without_tokens_has_weight_zero_and_no_nan(batch):
    empty = batch | {"mask": jnp.zeros_like(batch["mask"])}
    for kind in AGGREGATES:
        total, weight, _, gradient = run("gspo", empty, aggregate=kind, constant_length=3.0)
        assert total == 0 and weight == 0 and np.all(gradient == 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rgp", {}, "Did you mean 'rpg'.*Known: .*ppo.*rpg"),
        ("rpg", {"kl_coeff": 1.0}, "Did you mean 'kl_coef'"),
        ("ppo", {"kl_coef": 1.0}, "Known: clip_low, clip_high"),
        ("rpg", {"divergence": "kl"}, "Known: fkl, ufkl"),
        ("rpg", {"estimator": "reinforced"}, "Did you mean 'reinforce'"),
        ("rpg", {"clip": None}, "Known: none, dual"),
        ("rpg", {"form": "verl "}, "Known: paper, verl"),
        ("rpg", {"aggregate": "mean"}, "token_mean"),
        ("rpg", {"aggregate": "constant"}, "constant_length"),
        ("grpo", {"kl_weighting": "k3"}, "Known: none, importance"),
        ("rpg", {"kl_coef": -1e-4}, r"kl_coef .*\[0, inf\).*-0.0001"),
        ("rpg", {"kl_coef": float("nan")}, "kl_coef"),
        ("rpg", {"clip_low": 1.0}, "clip_low"),
        ("rpg", {"clip_high": "0.28"}, "clip_high"),
        ("rpg", {"clip_dual": 1.0}, r"clip_dual .*\(1, inf\], or None.*1.0"),
        ("rpg", {"behaviour_mass": 0.0}, "behaviour_mass"),
        ("rpg", {"sampler_correction": "tis"}, "Known: truncate, mask"),
        ("rpg", {"sampler_high": 2.0}, "sampler_high bounds a sampler_correction"),
        ("rpg", {"sampler_correction": "truncate", "sampler_low": 0.5}, "'truncate' has no sampler_low"),
        ("rpg", {"sampler_correction": "mask", "sampler_low": 5.0}, "sampler_low must be below .* 5.0 and 5.0"),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused(batch, name, options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **batch, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": jnp.ones((4, 5))}, r"mask must be \[B, T\].*\(4, 6\).*\(4, 5\)"),
        ({"advantages": jnp.ones(6)}, r"advantages must be \[B, T\] or \[B\]"),
        ({"ref_logprobs": jnp.ones((1, 6))}, "ref_logprobs"),
        ({"completion_ids": jnp.ones(4, jnp.int32)}, "completion_ids"),
        ({"logprobs": jnp.ones(6)}, "logprobs must be"),
    ],
)
def test_shapes_that_do_not_match_are_refused(batch, change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss("rpg", **batch | change)


@pytest.mark.parametrize("kind", SAMPLER_CORRECTIONS)
def test_a_sampler_correction_needs_the_samplers_logprobs(batch, kind):
    with pytest.raises(ValueError, match="sampler_logprobs"):
        policy_loss("rpg", **batch | {"sampler_logprobs": None}, sampler_correction=kind)


def test_a_mean_of_micro_batch_means_would_depend_on_the_split(batch):
    """Token means of parts, weighted by their number of rows, are another loss than the token mean of the whole."""
    parts = [{key: x[rows] for key, x in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    (total, weight), *sums = [every_aggregate(part)[0][:2] for part in (batch, *parts)]
    means = [part_sum / part_weight for part_sum, part_weight in sums]
    assert abs((means[0] + 3 * means[1]) / 4 - total / weight) > 1e-3
    np.testing.assert_allclose(sum(x[0] for x in sums) / sum(x[1] for x in sums), total / weight, rtol=1e-5)
