"""Runs of three steps against `second_steps`: the weights, the optimizer's slots, the metrics and the columns of every
step, over combinations of a loss with all that surrounds it in a run. And one identity of a step."""

from __future__ import annotations

import itertools
import json
import random

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax import losses, models
from tests.training import second_steps
from tests.training.second_models import flat

SUMS = {"loss.advantage": "leave_one_out", "loss.aggregate": "sequence_mean_token_sum"}
TO_GO = SUMS | {"method": "RPG-REINFORCE-RKL", "loss.level": "to_go", "reference.rule": "fixed"}
ENDLESS = {"loss.arguments": '{"trace_cap": Infinity}'}
KINDS = {
    **{
        name: {"method": name}
        for name, method in losses.METHODS.items()
        if method.reference != "teacher" and method.advantage not in losses.LEARNED_ADVANTAGES
    },
    "grpo/importance": {"method": "GRPO", "loss.kl_weighting": "importance"},
    "opmd/token": {"method": "OPMD", "loss.arguments": '{"penalty_level": "token"}'},
    "rpg/none": {"method": "RPG-RKL", "loss.clip": "none"},
    "rpg/dual": {"method": "RPG-URKL", "loss.clip": "dual"},
    "rpg/dual_through": {"method": "RPG-URKL", "loss.clip": "dual_through"},
    "rpg/truncate": {"method": "RPG-REINFORCE-FKL", "loss.clip": "truncate"},
    "rpg/reward": {"method": "RPG-REINFORCE-UFKL", "loss.clip": "reward"},
    "rpg/js": {"method": "RPG-REINFORCE-URKL", "loss.divergence": "js"},
    "rpg/verl": {"method": "RPG-REINFORCE-UFKL", "loss.form": "verl"},
    "rpg/batch mean": {"method": "RPG-REINFORCE-URKL", "loss.advantage": "batch_mean"},
    "rpg/exact": {"method": "RPG-REINFORCE-RKL", "loss.estimator": "exact"},
    "rpg/exact forward": {"method": "RPG-REINFORCE-FKL", "loss.estimator": "exact"},
    "sequence/product": {"method": "RPG-SEQ-RKL", "loss.weight": "product", "loss.clip": "none"},
    "sequence/differentiable": {
        "method": "RPG-SEQ-RKL", "loss.weight": "product", "loss.clip": "none", "loss.estimator": "differentiable",
    },
    "sequence/capped": {"method": "RPG-SEQ-RKL", "loss.weight": "capped"},
    "to_go/token": TO_GO | {"loss.weight": "token"},
    "to_go/none": TO_GO | {"loss.weight": "none", "loss.trace_decay": 0.5},
    "to_go/capped": TO_GO | {"loss.weight": "capped"},
    "to_go/product": TO_GO | ENDLESS | {"loss.weight": "product", "loss.clip": "none"},
    "to_go/forward": TO_GO | {"loss.divergence": "fkl"},
    "to_go/exact": TO_GO | {"loss.estimator": "exact"},
}  # fmt: skip
CHOICES = {
    "kind": KINDS,
    "aggregate": {
        "own": {},
        **{k: {"loss.aggregate": k} for k in ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean")},
        "constant": {"loss.aggregate": "constant", "loss.constant_length": 7},
    },
    "correction": {
        "own": {},
        "truncate": {"loss.sampler_correction": "truncate", "loss.sampler_high": 1.05},
        "mask": {"loss.sampler_correction": "mask", "loss.sampler_low": 0.8, "loss.sampler_high": 1.2},
        "sequence": {"loss.sampler_correction": "sequence", "loss.sampler_low": 0.5, "loss.sampler_high": 1.5},
        "geometric": {"loss.sampler_correction": "geometric", "loss.sampler_low": 0.9, "loss.sampler_high": 1.1},
        "off_policy": {"loss.sampler_correction": "off_policy", "loss.sampler_low": 0.95},
        "anchor": {"loss.sampler_correction": "anchor"},
    },
    "staleness": {
        "none": {},
        "ahead": {"rollout.max_staleness": 1, "rollout.devices": 7},  # with four, programs waited for each other once
        "far ahead": {"rollout.max_staleness": 2, "rollout.devices": 7},
        "parts": {"rollout.partial_tokens": 4},
        "carried": {
            "dynamic_sampling.enabled": True, "dynamic_sampling.surplus": "carry", "dynamic_sampling.oversample": 2,
        },
    },
    "sampler": {"exact": {}, "int8": {"rollout.int8": True, "rollout.max_sampler_gap": 1.0}},
    "updates": {
        "2": {"train.updates_per_step": 2},
        "1": {"train.updates_per_step": 1},
        "4": {"train.updates_per_step": 4},
        "2, twice": {"train.updates_per_step": 2, "train.epochs": 2},
        "1, twice": {"train.updates_per_step": 1, "train.epochs": 2},
    },
    "rows": {
        "whole": {},
        "micro-batches": {"train.microbatch_size": 8},
        "packed": {"train.packed_length": 42, "train.microbatch_size": 8},
        "tightly packed": {"train.packed_length": 17, "train.microbatch_size": 8},
    },
    "reference": {
        "own": {},
        "fixed": {"reference.rule": "fixed"},
        "behaviour": {"reference.rule": "behaviour"},
        "step": {"reference.rule": "every", "reference.every": "1 step"},
        "2 steps": {"reference.rule": "every", "reference.every": "2 steps"},
        "3 updates": {"reference.rule": "every", "reference.every": "3 updates"},
        "kl": {"reference.rule": "kl", "reference.kl_threshold": 0.03},
    },
    "optimizer": {
        "sgd": {"optimizer.name": "sgd", "optimizer.b1": 0.0, "optimizer.learning_rate": 0.05},
        "adamw": {
            "optimizer.name": "adamw", "optimizer.learning_rate": 5e-4, "optimizer.eps": 1e-4,
            "optimizer.weight_decay": 0.5, "optimizer.decayed": "matrices", "optimizer.max_grad_norm": 0.5,
        },
        "momentum": {
            "optimizer.name": "sgd", "optimizer.b1": 0.5, "optimizer.learning_rate": 0.03,
            "optimizer.weight_decay": 0.1, "optimizer.schedule": "linear", "optimizer.warmup": "2 updates",
            "optimizer.max_grad_norm": 10.0,
        },
        "falling adamw": {
            "optimizer.name": "adamw", "optimizer.learning_rate": 1e-3, "optimizer.eps": 1e-4, "optimizer.b2": 0.9,
            "optimizer.schedule": "cosine", "optimizer.warmup": "1 step", "optimizer.final_rate": 0.1,
        },
    },
    "temperature": {"1": {}, "0.7": {"rollout.temperature": 0.7}},
    "entropy": {"none": {}, "bonus": {"loss.entropy_coef": 0.05}},
    "cut completions": {"trained": {}, "masked": {"rewards.overlong_masking": True}},
    "records": {"none": {}, "every step": {"log.rollouts_every": 1}},
}  # fmt: skip
"""{dimension: {choice: its config fields}}."""


def fields_of(combination):
    fields = {}
    for dimension, choice in combination.items():
        fields |= CHOICES[dimension][choice]
    return fields


def is_allowed(combination):
    """Whether a run takes the combination, as docs/methods.md and docs/running.md say."""
    fields, own = fields_of(combination), losses.METHODS[KINDS[combination["kind"]]["method"]]
    hyperparameters = own.hyperparameters | {k.removeprefix("loss."): v for k, v in fields.items()}
    carried = fields.get("loss.sampler_correction") in ("truncate", "mask")
    lags = "rollout.max_staleness" in fields or "rollout.partial_tokens" in fields
    if hyperparameters.get("level", "token") != "token":
        if combination["aggregate"] not in ("own", "sequence_mean_token_sum", "constant"):
            return False
        if combination["cut completions"] == "masked" or combination["staleness"] == "carried":
            return False
    if lags and carried and (own.loss == "ctpo" or hyperparameters.get("weight") in ("product", "capped")):
        return False
    rule = fields.get("reference.rule", own.reference)
    return not (hyperparameters.get("estimator") == "exact" and rule == "behaviour")


def covering(every=CHOICES, is_allowed=is_allowed, seed=0, tries=60):
    """Combinations that together have every pair of choices that a run takes. The next combination is always
    the one of `tries` draws that has the most new pairs, so the first few combinations have little in common."""
    dice, names = random.Random(seed), list(every)

    def pairs(combination):
        return set(itertools.combinations(combination.items(), 2))

    def drawn(**fixed):
        while True:
            made = {name: fixed.get(name) or dice.choice(list(every[name])) for name in names}
            if is_allowed(made):
                return made

    missing = set()
    for (a, of_a), (b, of_b) in itertools.combinations(every.items(), 2):
        missing |= {((a, x), (b, y)) for x in of_a for y in of_b}
    plain, found = {name: next(iter(choices)) for name, choices in every.items()} | {"kind": "GRPO"}, []
    missing = {pair for pair in missing if is_allowed(plain | dict(pair))}
    while missing:
        first = dice.choice(sorted(missing))
        best = max((drawn(**dict(first)) for _ in range(tries)), key=lambda made: len(pairs(made) & missing))
        found.append(best)
        missing -= pairs(best)
    return found


def right(completion, answer):
    """A reward of five values: the completions of a policy with random weights get all of them."""
    return (sum(map(ord, completion)) * 7 % 5) / 2 - 1


def odd(completion, answer):
    return float(len(completion) % 2)


PARTS = {right: 1.0, odd: 0.5}
RUN = {
    "run.name": "r", "run.overwrite": True, "warm_start.enabled": False, "dynamic_sampling.enabled": False,
    "rewards.right_above": 0.4, "optimizer.warmup": "0 updates", "train.steps": 3, "evaluation.problems": 1,
    "evaluation.k": 1, "evaluation.every": 100, "checkpoint.every": 100, "log.rollouts_every": 0,
    "rollout.max_tokens": 10,  # of which a policy with random weights needs all in two of three completions
}  # fmt: skip
RTOL, ATOL = 2e-4, 3e-6
"""A run computes in f32: its weights after a step are off by 1e-5 of the step and 1e-6. Up to four large updates, with
ratios up to e^4, enlarge what the first of them rounds."""


def trained(folder, fields, rewards=PARTS, **handed):
    """(the resolved config, and of each step its record, and (weights, the optimizer's slots) of the policy and of the
    critic or None) of a run with these fields."""
    steps, own = [], losses.LOSSES[losses.METHODS[fields["method"]].loss].hyperparameters
    fields = RUN | ({"loss.kl_coef": 0.1} if "kl_coef" in own else {}) | fields | {"run.dir": str(folder)}

    def kept(state):
        return flat(jax.device_get(state.params)), slots(state.opt_state)

    def keep(step):  # the next step donates the arrays
        steps.append((step, kept(step.state), step.state.critic and kept(step.state.critic)))

    rpg_jax.train("tests/end_to_end/micro.py", reward=rewards, overrides=fields, on_step=keep, **handed)
    config = json.loads((folder / "r/config.json").read_text(encoding="utf-8"))
    config |= {"part_weights": [*rewards.values()], "environment_weight": rewards.get("environment", 0.0)}
    return config, steps


def drawn(config, steps):
    """{path: f64}, the weights of a run that began with random ones."""
    sizes = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_dim")
    dimensions = {name: config["model"][name] for name in sizes} | {"vocab_size": len(steps[0][1][0]["/embed"])}
    return flat(jax.device_get(models.init(models.DecoderConfig(**dimensions), seed=config["warm_start"]["seed"])[1]))


def slots(opt_state):
    """The trees of an optimizer's state: the momentum, or AdamW's two means."""
    leaves = jax.tree.leaves(jax.device_get(opt_state), is_leaf=lambda x: isinstance(x, dict))
    return [flat(leaf) for leaf in leaves if isinstance(leaf, dict)]


def norm(tree):
    return np.sqrt(sum((x**2).sum() for x in tree.values()))


def minus(a, b):
    return {path: a[path] - b[path] for path in b}


class Differences(list):
    """What is not equal: a name, the number of the run and that of the second computation."""

    def compare(self, name, found, expected, *, rtol=RTOL, atol=ATOL):
        distance, size = np.max(np.abs(np.subtract(found, expected))), np.max(np.abs(expected))
        both_are_nan = np.isnan(found).all() and np.isnan(expected).all()
        if not both_are_nan and not distance <= rtol * size + atol:
            self.append((name, found, expected) if np.size(expected) == 1 else (name, distance, size))

    def compare_trees(self, name, found, expected):
        self.compare(name, norm(minus(found, expected)), 0.0, atol=RTOL * norm(expected) + ATOL)


def differences(config, steps, second, folder):
    """(what a run and its second computation do not have in common, the number of its steps that differ where rounding
    decides about a token)."""
    found, undecided = Differences(), 0
    for step, policy, critic in steps:
        second.step(step.groups)
        own = Differences()
        compare_step(own, second, step, policy, critic)
        if config["log"]["rollouts_every"]:
            compare_file(own, second, folder / f"r/rollouts/{step.number:06d}.npz")
        if second.found["is_ambiguous"]:
            undecided += bool(own)
        else:
            found += own
        second.after(policy[0], critic and critic[0])
    return found, undecided


def compare_step(found, second, step, policy, critic=None):
    own, said = second.found, f"step {step.number}"
    for number, (update, expected) in enumerate(zip(step.updates, own["updates"], strict=True)):
        for name, value in expected.items():
            atol = ATOL + (own["rounding"][number] if name == "loss" else 0)
            found.compare(f"{said}, update {number}: {name}", update[name], value, atol=atol)
    for name, value in (own["metrics"] | {"learning_rate": own["learning_rate"]}).items():
        atol = ATOL + (max(own["rounding"]) if name == "loss" else 0)
        found.compare(f"{said}: {name}", step.metrics[name], value, atol=atol)
    undecided = second.optimizer.undecided
    weights = {k: np.where(undecided.get(k, False), own["weights"][k], x) for k, x in policy[0].items()}
    compare_state(found, said, (weights, policy[1]), second.start, own["weights"], second.optimizer)
    if critic is not None:
        compare_state(found, f"{said}, critic", critic, second.critic_start, own["critic"], second.critic_optimizer)
    batch = own["batch"]
    if not second.config["rollout"]["int8"]:
        drawn = batch.sampler[batch.sampled], own["columns"]["sampled_by"][batch.sampled]
        found.compare(f"{said}: sampler", *drawn, atol=2e-5)


def compare_state(found, said, state, start, expected, optimizer):
    found.compare_trees(f"{said}: weights", minus(state[0], start), minus(expected, start))
    for number, (slot, own) in enumerate(zip(state[1], optimizer.slots, strict=True)):
        found.compare_trees(f"{said}: slot {number}", slot, own)


def compare_file(found, second, file):
    """Compares the columns of a rollout file. Its groups are those of the first mini-batch first."""
    own, size = second.found, second.config["rollout"]["group_size"]
    with np.load(file) as arrays:
        names = json.loads(arrays["text"].tobytes())["columns"]
        columns = dict(zip(names, arrays["tokens"].astype(float).T, strict=True))
    count, batch = len(own["batch"].groups), own["batch"]
    minibatches = min(second.config["train"]["updates_per_step"], count)
    order = [p for u in range(minibatches) for p in range(u, count, minibatches)]
    rows = [p * size + g for p in order for g in range(size)]
    expected = own["columns"] | {"logprobs": second.logprobs(own["weights"], batch)}
    for name in ("advantages", "behaviour_logprobs", "ref_logprobs", "sampler_logprobs", "logprobs"):
        ours = np.concatenate([expected[name][i, : batch.lengths[i]] for i in rows])
        found.compare(f"{file.stem}: {name}", columns[name], ours, atol=2e-5)


LAST = 382
SHARES = [
    pytest.param(0, 2, id="two"),
    pytest.param(2, 22, id="twenty more", marks=pytest.mark.slow),
    *(pytest.param(n, n + 40, id=f"from {n}", marks=pytest.mark.soak) for n in range(22, LAST, 40)),
]


@pytest.mark.parametrize(("first", "last"), SHARES)
def test_a_run_does_what_a_second_computation_of_its_steps_says(first, last, tmp_path):
    combinations, ambiguous = covering(), 0
    assert len(combinations) <= LAST
    for number, combination in enumerate(combinations[first:last], start=first):
        config, steps = trained(tmp_path, fields_of(combination))
        second = second_steps.Second(config, drawn(config, steps))
        found, undecided = differences(config, steps, second, tmp_path)
        assert not found, (number, combination, found)
        ambiguous += undecided
        if number % 12 == 11:
            jax.clear_caches()  # the programs of a run take 40 MB
    assert ambiguous <= 0.05 * 3 * (last - first), "nearly all steps must agree"


def test_a_small_step_of_gradient_descent_lowers_the_loss_by_its_rate_times_the_square_of_the_gradient(tmp_path):
    """Σ_t g_t Δlog π_t = −lr ‖∇L‖² to first order, with a bonus for entropy. Δlog π comes from the run's weights before
    and after, g from NumPy and ‖∇L‖ is the run's metric: JAX differentiates nothing here but the run itself."""
    rate = 1e-4
    fields = {
        "method": "RPG-REINFORCE-URKL", "loss.entropy_coef": 0.05, "optimizer.name": "sgd", "optimizer.b1": 0.0,
        "optimizer.weight_decay": 0.0, "optimizer.learning_rate": rate, "optimizer.max_grad_norm": 1e9,
        "train.updates_per_step": 1, "train.packed_length": 42, "train.microbatch_size": 8,
        "rollout.temperature": 0.7, "reference.rule": "every", "reference.every": "2 steps",
    }  # fmt: skip
    config, steps = trained(tmp_path, fields)
    second, found = second_steps.Second(config, drawn(config, steps)), Differences()
    for step, policy, _ in steps:
        second.step(step.groups)
        batch, [update] = second.found["batch"], step.updates
        before, after = (second.distributions(w, batch) for w in (second.start, policy[0]))
        lowered = (second.found["of_tokens"] * (after - before)).sum()
        assert lowered == pytest.approx(-rate * update["grad_norm"] ** 2, rel=2e-3)  # the second order, and f32
        compare_step(found, second, step, policy)
        second.after(policy[0])
    assert not found
