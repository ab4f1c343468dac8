"""The β of a config is the β of its gradient: real programs, every group of eight enumerated.

The model knows two tokens. Token 0 ends a completion, two tokens are the most, so there are three completions and 45
groups of eight up to their order. The expected gradient of the trainer's programs, Σ p(group) g(group), is written as
a ∇E[R] − b ∇KL(π_θ‖π_ref), both of them differentiated exactly. β acts as b/a.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from configs import tiny
from rpg_jax import data, models, parallel
from rpg_jax.runs.arguments import loss_arguments
from rpg_jax.runs.learner import policy_objective
from rpg_jax.runs.resolve import resolve, with_method
from rpg_jax.training.loop import Algorithm, add_advantages, add_logprobs
from rpg_jax.training.objective import Objective, advantages_fn
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policy_logprobs import policy_logprobs
from rpg_jax.training.state import abstract, abstract_state, create_state
from rpg_jax.training.step import make_programs
from rpg_jax.types import Completion, Count

MODEL = models.DecoderConfig(
    vocab_size=2, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, hidden_dim=16
)
COMPLETIONS, REWARDS = ((0,), (1, 0), (1, 1)), (0.0, 0.0, 1.0)
SIZE, KL_COEF = 8, 0.1
SHAPE = data.RowShape(rows=SIZE, length=4, completion_length=2)
SETTINGS = dict(learning_rate=1e-3, warmup=Count(0, "updates"), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0)
# f32: gradients of order 0.1 with errors of 1e-7, added over 45 groups.
ROUNDING = 1e-4


@functools.cache
def setting():
    """The mesh, the layout, and the parameters of the present policy, an earlier one and the reference."""
    mesh = parallel.make_mesh({}, jax.devices()[:1])
    graphdef, shapes = models.abstract(MODEL)
    where = parallel.shardings(models.logical_axes(MODEL), shapes, mesh)
    optimizer = make_optimizer("adamw", **SETTINGS, max_grad_norm=1.0)
    like = abstract_state(abstract(shapes, where), optimizer, NamedSharding(mesh, PartitionSpec()))
    rows = NamedSharding(mesh, PartitionSpec(parallel.RULES["batch"]))
    params = [models.init(MODEL, seed=seed, shardings=where)[1] for seed in (0, 1, 2)]
    return graphdef, optimizer, like, rows, params


def group_of(members, old=None):
    completions = [Completion(np.array(COMPLETIONS[i], np.int32), np.zeros(len(COMPLETIONS[i]), np.float32), "stop", 0)
                   for i in members]  # fmt: skip
    rewards = np.array([REWARDS[i] for i in members], np.float32)
    behaviour = None if old is None else [old[i] for i in members]
    return data.Group(data.Problem(0, "?", "!", ""), np.array([0]), completions, [], rewards, rewards, behaviour)


def of_tokens(params):
    """log π of the tokens of the three completions, f[3, 2]; 0 where there is none."""
    graphdef, *_ = setting()
    (batch,) = data.pack([group_of(range(3))], data.RowShape(3, 4, 2)).batches
    return jnp.where(batch.mask > 0, policy_logprobs(graphdef, params, batch.rows, temperature=1.0)[0], 0)


@functools.cache
def exact():
    """∇E[R] and ∇KL(π_θ‖π_ref) of completions at the present policy."""
    present, _, ref = setting()[-1]
    log_ref = jnp.sum(of_tokens(ref), axis=1)

    def both(params):
        log_p = jnp.sum(of_tokens(params), axis=1)
        return jnp.exp(log_p) @ jnp.array(REWARDS), jnp.exp(log_p) @ (log_p - log_ref)

    return [np.asarray(ravel_pytree(g)[0], np.float64) for g in jax.jacrev(both)(present)]


def expected_gradient(config, stale):
    """The mean over groups of the gradient that the config's programs have for one group a batch."""
    graphdef, optimizer, like, rows, (present, earlier, ref) = setting()
    (name, hyperparameters), behaviour = loss_arguments(config), earlier if stale else present
    programs = make_programs(
        graphdef, optimizer, policy_objective(config), temperature=1.0, state=like, batch_sharding=rows
    )
    algorithm = Algorithm(
        collector=SimpleNamespace(lags=False),
        pack=functools.partial(data.pack, shape=SHAPE, sharding=rows),
        advantages=advantages_fn(config.loss.advantage, name, **hyperparameters),
        programs=programs,
        reference=SimpleNamespace(
            is_behaviour=False, coincides=lambda: False, params=lambda: ref, programs=None, scores=None
        ),
        updates_per_step=1,
    )
    state = create_state(jax.tree.map(jnp.copy, present), optimizer, like)
    old = np.asarray(of_tokens(behaviour))
    stored = [x[: len(c)] for x, c in zip(old, COMPLETIONS, strict=True)] if stale else None
    probabilities = np.exp(old.sum(axis=1, dtype=np.float64))
    np.testing.assert_allclose(probabilities.sum(), 1, atol=1e-6)
    total = mass = 0
    for members in itertools.combinations_with_replacement(range(3), SIZE):
        group, counts = group_of(members, stored), np.bincount(members, minlength=3)
        if config.dynamic_sampling.enabled and not group.informative:
            continue
        orders = math.factorial(SIZE) / math.prod(map(math.factorial, counts))
        batch, _ = add_logprobs(algorithm, algorithm.pack([group]), state)
        (batch,) = add_advantages(algorithm, batch, state).batches
        sums = programs.start(state.weights, batch)
        gradient = ravel_pytree(sums.grads[0])[0] / sums.metrics["loss"][1]
        total = total + orders * np.prod(probabilities**counts) * np.asarray(gradient, np.float64)
        mass += orders * np.prod(probabilities**counts)
    return total / mass, mass


def scales(config, stale=False):
    """The reward's factor a, β as it acts b/a, and the share of the groups that are trained."""
    gradient, share = expected_gradient(config, stale)
    (a, b), residual, *_ = np.linalg.lstsq(np.stack([-exact()[0], exact()[1]], axis=1), gradient)
    assert residual < ROUNDING**2, "two directions span the gradients of a policy over three completions"
    return a, b / a, share


def config_of(**changes):
    config = tiny.get_config()
    config.update_from_flattened_dict(
        {"loss.kl_coef": KL_COEF, "reference.rule": "fixed", "rollout.max_tokens": 2, "rewards.overlong_shaping": False}
        | {name.replace("__", "."): value for name, value in changes.items()}
    )
    return config


def with_the_line_of_the_refusal(config):
    """The config with the overrides that its refusal tells to add."""
    with pytest.raises(ValueError, match=r"does not have the gradient of completions .* Add --config") as refused:
        resolve(config)
    for line in str(refused.value).partition(" Add ")[2].split():
        name, _, value = line.removeprefix("--config.").partition("=")
        config.update_from_flattened_dict({name: {"False": False}.get(value, value)})
    return resolve(config)


EXACT = {"weight": "product", "clip": "none"}
EXACT_TO_GO = {"level": "to_go", "arguments": '{"trace_cap": Infinity}'}


@pytest.mark.slow  # compiles, or waits, for seconds
@pytest.mark.parametrize(
    ("method", "loss", "stale"),
    [
        ("RPG-SEQ-RKL", {}, False),
        ("RPG-SEQ-RKL", EXACT, True),
        ("RPG-REINFORCE-URKL", {"level": "sequence"}, False),
        ("RPG-REINFORCE-URKL", {"level": "to_go"}, False),
        ("RPG-RKL", {"level": "sequence", "aggregate": "constant"}, False),
        ("RPG-RKL", EXACT | {"level": "sequence"}, True),
        ("RPG-URKL", EXACT | EXACT_TO_GO, True),
    ],
)
def test_a_level_of_completions_has_the_beta_that_is_set(method, loss, stale):
    config = config_of(method=method, **{f"loss__{name}": value for name, value in loss.items()})
    config = resolve(config) if "SEQ" in method else with_the_line_of_the_refusal(config)
    a, beta, _ = scales(config, stale)
    assert beta == pytest.approx(KL_COEF, rel=ROUNDING)
    assert a * (config.loss.constant_length or 1) == pytest.approx(1, rel=ROUNDING)


@pytest.mark.parametrize("level", ("sequence", "to_go"))
def test_what_is_refused_has_another_beta(level):
    """Group means take an eighth of the reward; the 22 % of groups that are not informative take their KL along."""
    standard = {"method": "RPG-SEQ-RKL", "loss__level": level}
    config = config_of(**standard, loss__advantage="group_mean")
    with pytest.raises(ValueError, match="with loss.advantage=group_mean: .* --config.loss.advantage=leave_one_out$"):
        resolve(config)
    assert scales(with_method(config))[1] == pytest.approx(KL_COEF * SIZE / (SIZE - 1), rel=ROUNDING)
    config = config_of(**standard, dynamic_sampling__enabled=True)
    with pytest.raises(ValueError, match="dynamic_sampling.enabled=True: .* --config.dynamic_sampling.enabled=False$"):
        resolve(config)
    _, beta, share = scales(with_method(config))
    assert 0.75 < share < 0.8 and 0.7 * KL_COEF < beta < 0.8 * KL_COEF


@pytest.mark.parametrize("weight", [7.0, 0.0], ids=["", "of a mini-batch without a trained token"])
def test_rehearsal_adds_its_share_of_the_forward_kl_whatever_the_weight_of_the_loss(weight):
    """The completions of the reference, enumerated: Σ π_ref(y) g(y) is the share times ∇KL(π_ref‖π_θ)."""
    graphdef, optimizer, like, rows, (present, _, ref) = setting()
    loss = Objective(lambda logprobs, batch: (jnp.sum(logprobs * batch.mask) * weight, jnp.float32(weight), {}))
    how = {"temperature": 1.0, "state": like, "batch_sharding": rows}
    programs = make_programs(graphdef, optimizer, loss, **how)
    weights = create_state(jax.tree.map(jnp.copy, present), optimizer, like).weights
    one = [data.pack([group_of([i])], SHAPE, sharding=rows).batches[0] for i in range(3)]

    def gradient(sums):
        divisor = max(sums.metrics["loss"][1], 1e-9)  # as `apply` has it
        return np.asarray(ravel_pytree(sums.grads[0])[0] / divisor, np.float64)

    alone, share, expected = gradient(programs.start(weights, one[2])), 0.3, 0
    of_ref = np.asarray(jnp.sum(of_tokens(ref), axis=1), np.float64)
    for log_p, batch, own in zip(of_ref, one, np.asarray(of_tokens(present)), strict=True):
        sums, measured = programs.rehearse(weights, programs.start(weights, one[2]), batch, share)
        assert measured["rehearsal_nll"] == pytest.approx((-own.sum(), np.count_nonzero(own)), rel=1e-5)
        expected = expected + np.exp(log_p) * (gradient(sums) - alone)

    def forward_kl(params):
        return jnp.exp(of_ref) @ (of_ref - jnp.sum(of_tokens(params), axis=1))

    exact = np.asarray(ravel_pytree(jax.grad(forward_kl)(present))[0], np.float64)
    np.testing.assert_allclose(expected, share * exact, rtol=0, atol=ROUNDING * np.abs(share * exact).max())
