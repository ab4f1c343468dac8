"""Runs of three steps against `second_steps`, with what stands beside the loss: conversations, teachers, mixtures of
experts, adapters, a critic, other optimizers, skipped updates, and completions and groups that are left out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import losses, models
from rpg_jax.environments import Turn
from rpg_jax.models import lora
from rpg_jax.runs.experiment import open_tokenizer
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro
from tests.training import second_steps
from tests.training.second_models import Model, flat
from tests.training.test_second_steps import (
    CHOICES,
    SUMS,
    TO_GO,
    covering,
    differences,
    odd,
    right,
    trained,
)


def number(text, *others):
    return sum(map(ord, text)) * 7 + 13 * len(text) + sum(others)


def rare(completion, answer):
    """Completions of two in five groups of four all get 0."""
    return float(number(completion) % 5 == 0)


def failing(completion, answer):
    if number(completion) % 9 == 0:
        raise ConnectionError("no answer")
    return right(completion, answer)


def failing_rare(completion, answer):
    failing(completion, answer)
    return rare(completion, answer)


class Talk:
    """Pays every turn, and answers two in three with a text of one to four tokens."""

    def reset(self, problem):
        return problem.messages

    def step(self, problem, messages, completion):
        n = number(completion, len(messages), len(problem.prompt))
        if n % 11 == 0:
            raise KeyError("its text is to blame")
        return Turn("1+2="[: 1 + n % 4], reward=n % 5 / 4 - 0.25, done=n % 3 == 0)


class Failing(Talk):
    def step(self, problem, messages, completion):
        if number(completion, len(messages)) % 7 == 0:
            raise ConnectionError("no answer")
        return super().step(problem, messages, completion)


def sometimes_nan(rewards):
    """`group_mean`, with NaN for a fifth of the groups."""
    group = rewards.sum(1, keepdims=True)
    return (rewards - group / rewards.shape[1]) * np.nan ** (np.round(4 * group) % 5 == 0)


GAE = {"method": "PPO", "critic.learning_rate": 0.02, "critic.gamma": 0.9, "critic.gae_lambda": 0.7}
SPEAKING = {"handed.environment": Talk, "environment.max_turns": 3, "environment.turn_tokens": 4}
DYNAMIC = {"dynamic_sampling.enabled": True}
PARTS = {
    "kind": {
        "GRPO": {"method": "GRPO"},
        "PPO": {"method": "PPO", "critic.learning_rate": 2e-3},
        "PPO with λ": GAE,
        "RPG with a critic": GAE | {"method": "RPG-REINFORCE-URKL", "loss.advantage": "gae"},
        **{name: {"method": name} for name in ("RPG-SEQ-RKL", "REINFORCE++-Baseline", "GDPO", "MaxRL", "GSPO")},
        "to_go": TO_GO,
        "token sums": SUMS | {"method": "RPG-RKL"},
        "skips": {"method": "RPG-REINFORCE-FKL", "handed.advantage": sometimes_nan},
        **{name: {"method": name} for name, method in losses.METHODS.items() if method.reference == "teacher"},
    },
    "model": {
        "dense": {},
        "mixture": {},
        "replayed": {"model.replay_experts": True},
        "adapters": {"model.lora.rank": 2, "model.lora.alpha": 6.0},
        "mixture with adapters": {"model.lora.rank": 3, "model.lora.alpha": 1.5, "model.lora.merged": True},
    },
    "turns": {
        "one": {},
        "several": SPEAKING,
        "several, credited": SPEAKING | {"loss.credit": "turn"},
        "failing": SPEAKING | {"handed.environment": Failing, "loss.credit": "turn", "rewards.max_failures": 0.9},
    },
    "verdicts": {"all": {}, "not all": {"rewards.max_failures": 0.9}},
    "groups": {
        "all": {},
        "informative": DYNAMIC | {"dynamic_sampling.max_batches": 1},
        "a surplus dropped": DYNAMIC | {"dynamic_sampling.oversample": 3},
        "carried": DYNAMIC | {"dynamic_sampling.oversample": 3, "dynamic_sampling.surplus": "carry"},
    },
    "optimizer": {
        "adamw": CHOICES["optimizer"]["adamw"] | {"optimizer.max_grad_norm": 0.02},
        "nadamw": {
            "optimizer.name": "nadamw", "optimizer.learning_rate": 5e-4, "optimizer.eps": 1e-4,
            "optimizer.weight_decay": 0.3, "optimizer.schedule": "linear", "optimizer.decay_until": "2 steps",
            "optimizer.final_rate": 0.2, "optimizer.b1": 0.8,
        },
        "lion": {
            "optimizer.name": "lion", "optimizer.learning_rate": 3e-4, "optimizer.b2": 0.7,
            "optimizer.warmup": "2 updates", "optimizer.weight_decay": 1.0,
        },
        "rmsprop": {
            "optimizer.name": "rmsprop", "optimizer.learning_rate": 2e-4, "optimizer.b2": 0.8, "optimizer.eps": 1e-4,
            "optimizer.schedule": "cosine", "optimizer.decay_until": "5 updates", "optimizer.decayed": "matrices",
        },
        "schedule free": {
            "optimizer.name": "schedule_free_adamw", "optimizer.learning_rate": 1e-3, "optimizer.eps": 1e-4,
            "optimizer.b2": 0.95, "optimizer.weight_decay": 0.5, "optimizer.warmup": "3 updates",
        },
        "bounded sgd": {
            "optimizer.name": "sgd", "optimizer.learning_rate": 0.5, "optimizer.max_grad_norm": 0.05,
            "optimizer.warmup": "2 steps",
        },
    },
    "rows": CHOICES["rows"] | {"tightly packed": {"train.packed_length": 21, "train.microbatch_size": 8}},
    **{name: CHOICES[name] for name in ("updates", "temperature", "entropy", "cut completions")},
    "aggregate": {k: CHOICES["aggregate"][k] for k in ("own", "sequence_mean_token_mean", "constant")},
    "correction": {k: CHOICES["correction"][k] for k in ("own", "truncate", "sequence", "off_policy")},
    "staleness": {k: CHOICES["staleness"][k] for k in ("none", "ahead", "parts")},
    "reference": {k: CHOICES["reference"][k] for k in ("own", "fixed", "3 updates", "kl")},
}  # fmt: skip
"""{dimension: {choice: its config fields, and what a Python program hands over}}."""


def fields_of(combination):
    fields = {}
    for dimension, choice in combination.items():
        fields |= PARTS[dimension][choice]
    return fields


def is_allowed(combination):
    """Whether a run takes the combination, as docs/methods.md, running.md, lora.md and environments.md say."""
    fields = fields_of(combination)
    method = losses.METHODS[fields["method"]]
    hyperparameters = method.hyperparameters | {k.removeprefix("loss."): v for k, v in fields.items()}
    advantage, own = hyperparameters.get("advantage", method.advantage), combination
    speaks, parts, skips = own["turns"] != "one", own["staleness"] == "parts", "handed.advantage" in fields
    refused = [
        advantage == "gae" and "adapters" in own["model"],
        own["model"] == "replayed" and (speaks or parts),
        parts and (speaks or own["groups"] == "carried"),
        fields.get("loss.credit") == "turn" and (advantage in ("gdpo", "whitened_group_mean") or skips),
        skips and (own["verdicts"] != "all" or own["turns"] == "failing" or own["reference"] == "kl"),
        method.reference == "teacher" and own["reference"] != "own",
        own["optimizer"] == "lion" and own["updates"] != "1",
    ]
    if hyperparameters.get("level", "token") != "token":
        refused += [own["aggregate"] not in ("own", "constant"), own["cut completions"] == "masked"]
        refused += [own["groups"] != "all"]
    return not any(refused)


def rewards_of(combination):
    """{function or part: its weight}"""
    of_groups = (right, failing) if combination["groups"] == "all" else (rare, failing_rare)
    parts = {of_groups[combination["verdicts"] != "all"]: 1.0, odd: 0.5 if combination["groups"] == "all" else 0.0}
    return parts if combination["turns"] == "one" else parts | {"environment": 0.7}


DENSE = models.DecoderConfig(
    vocab_size=1, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, hidden_dim=48,
    rope=models.Rope(10_000.0), tie_embeddings=False,
)  # fmt: skip
MIXTURE = dataclasses.replace(DENSE, tie_embeddings=True, experts=models.Experts(4, 2, 24))
TEACHER = models.DecoderConfig(
    vocab_size=1, num_layers=1, embed_dim=48, num_heads=4, num_kv_heads=2, head_dim=12, hidden_dim=40, qkv_bias=True,
    qk_norm=False, tie_embeddings=False,
)  # fmt: skip


def random_weights(config, seed, stop):
    """A tree of weights, of a policy that often stops: the token `stop` has more of what every state has."""
    dice = np.random.default_rng(seed)

    def drawn(path, leaf):
        name = path[-1].key
        spread = 0.7 if name == "router" else 0.1 if "bias" in name or "norm" in name else leaf.shape[-2] ** -0.5
        return (dice.normal(size=leaf.shape) * spread + ("norm" in name)).astype(np.float32)

    weights = jax.tree_util.tree_map_with_path(drawn, models.abstract(config)[1])
    weights["embed"][:, 0] += 0.5
    weights["lm_head" if "lm_head" in weights else "embed"][stop, 0] += 1.5
    return weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: (its folder, its config, its weights)} of the policies and of a teacher with a larger vocabulary."""
    config, home, found = resolve(micro.get_config()), tmp_path_factory.mktemp("models"), {}
    tokenizer = open_tokenizer(config, Task.from_config(config), home / "tokenizer")
    entries = {"dense": (DENSE, 0), "mixture": (MIXTURE, 0), "teacher": (TEACHER, 8)}
    for seed, (name, (shape, more)) in enumerate(entries.items()):
        shape = dataclasses.replace(shape, vocab_size=tokenizer.vocab_size + more)
        weights = random_weights(shape, seed, tokenizer.eos_id)
        models.save(home / name, shape, jax.tree.map(jnp.asarray, weights))
        tokenizer.save(home / name)
        found[name] = home / name, shape, flat(weights)
    return found


def prepared(combination, folders, tmp_path):
    """(the fields of a run, its first weights, its decoder, and that of a teacher with weights)."""
    fields = fields_of(combination)
    folder, shape, start = folders["mixture" if combination["model"] in MIXTURES else "dense"]
    fields |= {"model.path": str(folder), "rollout.max_tokens": 10 if combination["turns"] == "one" else 14}
    temperature, teacher = fields.get("rollout.temperature", 1.0), None
    model = Model(temperature, per_token=shape.experts.per_token if shape.experts else 0)
    if rank := fields.get("model.lora.rank"):
        chosen = lora.Lora(rank, fields["model.lora.alpha"])
        model.base, model.scale = start, fields["model.lora.alpha"] / rank
        dice = np.random.default_rng(rank)
        adapters = jax.tree.map(
            lambda x: jnp.asarray(0.1 * dice.normal(size=x.shape), jnp.float32), lora.adapter_shapes(shape, chosen)
        )
        if combination["turns"] == "one":  # else they are drawn
            lora.save_adapters(tmp_path / f"adapters{rank}", shape, chosen, adapters, base=None)
            fields["model.lora.path"] = str(tmp_path / f"adapters{rank}")
        else:
            adapters = jax.device_get(lora.init_adapters(shape, chosen, seed=0))
        start = flat(adapters)
    if losses.METHODS[fields["method"]].reference == "teacher":
        folder, shape, weights = folders["teacher"]
        fields["reference.path"] = str(folder)
        words = len(folders["dense"][2]["/embed"])
        weights = weights | {path: weights[path][:words] for path in ("/embed", "/lm_head")}
        teacher = Model(temperature, theta=shape.rope.theta), weights
    return fields, start, model, teacher


MIXTURES = ("mixture", "replayed", "mixture with adapters")


def compared(combination, folders, tmp_path):
    """(the differences, the number of steps in which rounding decides, the metrics of all updates)."""
    fields, start, model, teacher = prepared(combination, folders, tmp_path)
    handed = {k.removeprefix("handed."): v for k, v in fields.items() if k.startswith("handed.")}
    fields = {k: v for k, v in fields.items() if not k.startswith("handed.")}
    rewards = rewards_of(combination)
    config, steps = trained(tmp_path, fields, rewards, **handed)
    critic = None
    if config["loss"]["advantage"] == "gae":
        critic = dataclasses.replace(model, critic=True)
    second = second_steps.Second(config, start, model, critic, teacher)
    found, ambiguous = differences(config, steps, second, tmp_path)
    for step, *_ in steps:
        compare_rewards(found, config, rewards, step)
    return found, ambiguous, [update for step, *_ in steps for update in step.updates]


def compare_rewards(found, config, rewards, step):
    """Compares rewards with what functions and environment pay, and with DAPO's shaping by the policy's tokens."""
    for p, group in enumerate(step.groups):
        for i, completion in enumerate(group.completions):
            text, paid, kinds = group.texts[i].rpartition("</observation>\n")[2], 0.0, []
            for part, weight in rewards.items():
                try:
                    paid += weight * (environment_pays(completion) if part == "environment" else part(text, ""))
                except ConnectionError:
                    kinds.append("unreachable")
            if completion.turns is not None and completion.turns.error == "unreachable":
                kinds.append("unreachable")
            if config["rewards"]["overlong_shaping"]:
                buffer, most = config["rewards"]["overlong_buffer"], config["rollout"]["max_tokens"]
                paid += min(0.0, -(completion.sampled.sum() - (most - buffer)) / buffer)
            said = f"step {step.number}, reward {p}/{i}"
            failed = (group.failed or [None] * len(group.completions))[i]
            if bool(kinds) != (failed is not None):
                found.append((said, failed, kinds))
            if not kinds:
                found.compare(said, group.rewards[i], paid)


def environment_pays(completion):
    paid = completion.turns.rewards.astype(float).sum()
    return paid if completion.turns.error is None else min(paid, 0.0)


LAST = 115
SHARES = [
    pytest.param(0, 1, id="one"),
    pytest.param(1, 4, id="three more", marks=pytest.mark.slow),
    *(pytest.param(n, n + 37, id=f"from {n}", marks=pytest.mark.soak) for n in range(4, LAST, 37)),
]
FIRST = {
    "kind": "PPO with λ", "model": "dense", "turns": "several, credited", "verdicts": "not all", "groups": "all",
    "optimizer": "bounded sgd", "rows": "whole", "updates": "2", "temperature": "0.7", "entropy": "none",
    "cut completions": "trained", "aggregate": "own", "correction": "own", "staleness": "none", "reference": "own",
}  # fmt: skip


@pytest.mark.parametrize(("first", "last"), SHARES)
def test_a_run_does_what_a_second_computation_of_its_steps_says(first, last, folders, tmp_path):
    combinations, undecided = [FIRST, *covering(PARTS, is_allowed)], 0
    assert len(combinations) <= LAST + 1
    for number, combination in enumerate(combinations[first:last], start=first):
        found, own, updates = compared(combination, folders, tmp_path)
        assert not found, (number, combination, found)
        undecided += own
        if combination["optimizer"] == "bounded sgd":
            assert any(update["grad_norm"] > 0.05 for update in updates)
        if combination["kind"] == "skips":
            assert any(update["nonfinite_updates"] for update in updates)
        if number % 12 == 11:
            jax.clear_caches()  # the programs of a run take 40 MB
    assert undecided <= 0.1 * 3 * (last - first), "nearly all steps must agree"
