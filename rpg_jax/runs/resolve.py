"""Resolves a config: takes unset fields from the method's row, and checks all fields before anything is computed."""

import contextlib
import json
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import losses, models, storage
from rpg_jax.environments.environment import find as find_environment
from rpg_jax.losses.regularized_pg import TOKEN_SUMS
from rpg_jax.rewards import verifiers
from rpg_jax.rewards.callables import load
from rpg_jax.runs import config_files, logs
from rpg_jax.runs.arguments import environment_options, loss_arguments, loss_object, reward_arguments, reward_parts
from rpg_jax.types import Count

_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_BUFFER = 512
"""Tokens: the paper's overlong buffer. Without shaping the number has no effect, and is the number of older runs."""


def resolve(config: ConfigDict) -> ConfigDict:
    """A locked copy of `config` that `with_method` has filled in. Raises ValueError if the method or a reward is
    unknown, the loss or a reward does not take a field that was set, a value is outside its field's range, or two
    fields contradict each other. The message has the known names or the range. Not called: the public `check_…`."""
    resolved = with_method(config)
    _check_fields(resolved)
    _check_counts(resolved)
    _check_loss(resolved)
    _check_reference(resolved)
    _check_rehearsal(resolved)
    decided = {name: resolved.rewards[name] for name in ("accuracy", "right_above")}
    verifiers.check(*reward_arguments(resolved), **decided)
    _check_environment(resolved)
    return resolved.lock()


def with_method(config: ConfigDict) -> ConfigDict:
    """A copy in which the fields of a method that are None have the values of the row of `config.method` in
    `losses.METHODS`. The row has the fields of `loss`, and the reference's rule ("teacher" with `reference.path`),
    dynamic sampling, overlong shaping and learning rate; its hyperparameters without a field join `loss.arguments`. If
    `loss.name` is set, the row's hyperparameters that this loss does not declare are left out, but not "sampler_…".
    Other fields follow from set fields: `loss.constant_length`, `optimizer.decay_until`, `rewards.parts` and
    `rewards.overlong_buffer`. A loss or an advantage that is named module:function is imported. Raises ValueError if
    the method is unknown, an import fails, or `loss.arguments` is no JSON object or sets what has a field."""
    method = losses.get_method(config.method)
    _declare_own(config)
    own, given = config.loss.name or method.loss, loss_object(config)
    taken = method.hyperparameters
    if own != method.loss:  # another loss takes from the row what both declare
        declared = losses.LOSSES[own].hyperparameters if own in losses.LOSSES else ()
        taken = {n: v for n, v in taken.items() if n in declared or n.startswith("sampler_")}
    extra = {name: value for name, value in taken.items() if name not in config.loss} | given
    row = {
        "loss.name": method.loss,
        "loss.advantage": method.advantage,
        "loss.aggregate": method.aggregate,
        "reference.rule": "teacher" if config.reference.path else method.reference,
        "dynamic_sampling.enabled": method.dynamic_sampling,
        "rewards.overlong_shaping": method.overlong_shaping,
        "optimizer.learning_rate": method.learning_rate,
        **{f"loss.{name}": value for name, value in taken.items() if name not in extra},
    }
    resolved = config.copy_and_resolve_references()
    with resolved.unlocked():
        resolved.loss.arguments = json.dumps(extra, sort_keys=True) if extra else None
        if resolved.loss.constant_length is None:
            constant = (resolved.loss.aggregate or method.aggregate) == "constant"
            row["loss.constant_length"] = resolved.rollout.max_tokens if constant else None
        if resolved.optimizer.schedule != "constant" and resolved.optimizer.decay_until is None:
            resolved.optimizer.decay_until = f"{resolved.train.steps} steps"
        resolved.rewards.parts = reward_parts(config)
        for path, value in row.items():
            section, name = path.split(".")
            if resolved[section][name] is None:
                resolved[section][name] = value
        if resolved.rewards.overlong_buffer is None:
            quarter = max(1, resolved.rollout.max_tokens // 4) if resolved.rewards.overlong_shaping else _BUFFER
            resolved.rewards.overlong_buffer = min(_BUFFER, quarter)
    return resolved


def check_training(config: ConfigDict) -> None:
    """Refuses settings that would stop or waste a training run after minutes of computation. Raises ValueError if
    `model.size` is set without `model.path`, `model.param_dtype` is not "float32", a tracker is unknown, or the other
    fields do not fit `rollout.partial_tokens`, stale completions or servers."""
    m = config.model
    if m.param_dtype != "float32":
        rate = config.optimizer.learning_rate or losses.get_method(config.method).learning_rate
        raise ValueError(
            f"model.param_dtype={m.param_dtype!r} is for weights that are not trained: nearly every update at "
            f"optimizer.learning_rate={rate:g} would be rounded away; leave it float32, and "
            "set offload=optimizer if memory is short"
        )
    if m.size and not m.path:
        address = models.hub_address(m.size)
        raise ValueError(
            f"model.size={m.size!r} says only shapes, and training starts from weights (the config's first lines name "
            f"them): hf download {address} --local-dir {m.size}, then --config.model.path={m.size}, or at once "
            f"--config.model.path={address}"
        )
    if config.rollout.partial_tokens is not None:
        _check_parts(config)
    if lags(config):
        _check_staleness(with_method(config))
    _check_servers(config)
    logs.chosen(config.log.tracker)


def check_sampling(config: ConfigDict) -> None:
    """Raises ValueError if top-p, top-k or min-p cuts the distribution that reinforcement learning samples. Tokens that
    are never sampled have a share in the policy's gradient, which no weights of other tokens make up for."""
    for name, off in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
        if config.rollout[name] != off:
            raise ValueError(
                f"rollout.{name}={config.rollout[name]:g} cuts the distribution that is sampled, and the trainer's "
                f"log-probs are of the whole one: the gradient would be biased. Set rollout.{name}={off:g} to train; "
                "rpg_jax.evaluate, sample and serve take cuts"
            )


def lags(config: ConfigDict) -> bool:
    """Whether earlier weights may sample tokens of a step's new groups. Groups that are carried over do not count."""
    return config.rollout.max_staleness > 0 or bool(config.rollout.partial_tokens)


def _check_staleness(config: ConfigDict) -> None:
    """Raises ValueError if a loss would misread the ratios of stale completions. Call `with_method` before."""
    r, loss, kind = config.rollout, config.loss, config.loss.sampler_correction
    field = "name" if loss.name == "ctpo" else "weight"
    if loss[field] in ("ctpo", "product", "capped") and losses.carried_ratio(kind) == "token":
        raise ValueError(
            f"loss.{field}={loss[field]} weighs completions or their prefixes, and loss.sampler_correction={kind} "
            f"makes up for the staleness of single tokens (rollout.max_staleness={r.max_staleness}, "
            f"rollout.partial_tokens={r.partial_tokens}); set loss.sampler_correction=sequence, or leave it unset"
        )


def _check_servers(config: ConfigDict) -> None:
    """Raises ValueError if `servers.urls` is set without servers that sample, or if a field does not fit servers."""
    r, c = config.rollout, config.servers
    if r.driver != "servers":
        if c.urls:
            raise ValueError(
                f"servers.urls={c.urls} is read by rollout.driver=servers alone, and rollout.driver={r.driver} samples "
                "in the trainer: set the driver, or leave out servers.urls"
            )
        return
    if not c.urls:
        raise ValueError("rollout.driver=servers needs servers.urls: http://HOST:PORT, with commas between")
    if r.devices:
        raise ValueError("rollout.driver=servers needs rollout.devices=0: servers sample")
    if r.int8 or r.int8_kv:
        raise ValueError("rollout.driver=servers: rollout.int8 and int8_kv are the servers' own choice; leave them out")
    if not c.weights or storage.in_bucket(c.weights):
        raise ValueError(
            f"rollout.driver=servers needs servers.weights, a local folder that the servers see too, got {c.weights!r}"
            ": weights that never reach them are those of another policy after the first update"
        )


def _check_parts(config: ConfigDict) -> None:
    """Raises ValueError if completions cannot be drawn in parts as `rollout.partial_tokens` says."""
    name, most = f"rollout.partial_tokens={config.rollout.partial_tokens}", config.rollout.max_tokens
    if config.rollout.partial_tokens >= most:
        raise ValueError(f"{name} is not below rollout.max_tokens={most}: leave it unset, completions are whole then")
    excluded = {
        "rollout.max_staleness": (0, "sampling ahead draws whole completions"),
        "environment.name": (None, "an environment's conversations are not drawn in parts"),
        "model.replay_experts": (False, "the experts of earlier parts are not kept"),
        "dynamic_sampling.surplus": ("drop", "groups wait for their step already"),
    }
    for field, (value, reason) in excluded.items():
        if (found := config[field]) != value:
            raise ValueError(f"{name} does not go with {field}={found} ({reason}): leave one of them out")


def _check_fields(config: ConfigDict) -> None:
    """Raises ValueError if a field is retired, or does not fit its declaration, or a mesh axis has 0 devices."""
    for name, field in config_files.fields().items():
        value = config[name]
        if was := config_files.retired(name, value):
            raise ValueError(was.line)
        field.check(name, value)
    if empty := [name for name, size in config.mesh.items() if size == 0]:
        raise ValueError(f"mesh.{empty[0]}=0: an axis has 1 device or more, or -1 for all that are left")


def _check_counts(config: ConfigDict) -> None:
    for name in ("optimizer.warmup", "optimizer.decay_until", "reference.every"):
        if (count := config[name]) is not None:
            Count.parse(count, name)
    logs.chosen_steps(config.profile.steps)
    if (path := config.model.lora.path) and not config.model.lora.rank:
        raise ValueError(f"model.lora.path={path} with model.lora.rank=0: set the rank and the alpha of this adapter")
    prompts, updates = config.rollout.prompts_per_step, config.train.updates_per_step
    if prompts % updates:
        raise ValueError(f"rollout.prompts_per_step={prompts} must be a multiple of train.updates_per_step={updates}")
    buffer, limit = config.rewards.overlong_buffer, config.rollout.max_tokens
    if config.rewards.overlong_shaping and not 1 <= buffer <= limit:
        bounds = f"rewards.overlong_buffer={buffer} must be in [1, rollout.max_tokens={limit}]"
        raise ValueError(f"{bounds}, or rewards.overlong_shaping False")


# The fields that the gradient of whole completions needs beside its loss. Other advantages multiply the rewards by a
# factor, (G - 1)/G for group_mean, and not the KL. A mean over tokens weights completions by their lengths. The KL of
# a group or a completion that is dropped is dropped as well.
_OF_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "loss.advantage": ("leave_one_out",),
    "loss.aggregate": TOKEN_SUMS,
    "dynamic_sampling.enabled": (False,),
    "rewards.overlong_masking": (False,),
}


def _check_level(config: ConfigDict) -> None:
    """Raises ValueError if a field changes the KL coefficient or the direction of a gradient of whole completions."""
    level = config.loss.level
    if level in (None, "token"):
        return
    needed = {**_OF_COMPLETIONS, **({"loss.clip": ("none",)} if config.loss.weight == "product" else {})}
    wrong = {name: able[0] for name, able in needed.items() if config[name] not in able}
    if wrong:
        raise ValueError(
            f"loss.level={level} does not have the gradient of completions with "
            f"{', '.join(f'{name}={config[name]}' for name in wrong)}: beta or the completions' weights would "
            f"be others. Add {' '.join(f'--config.{name}={value}' for name, value in wrong.items())}"
        )


def _check_loss(config: ConfigDict) -> None:
    _check_level(config)
    advantage, aggregate = config.loss.advantage, config.loss.aggregate
    if config.loss.constant_length is not None and aggregate != "constant":
        raise ValueError(f"loss.constant_length is read by loss.aggregate=constant, not by {aggregate}: leave one out")
    if advantage not in losses.LEARNED_ADVANTAGES:
        with named_in_errors(f"loss.advantage={advantage}"):
            _advantages(config, np.zeros((2, 2)))
            if config.rollout.group_size == 1 and _has_baseline(config, 2) and not _has_baseline(config, 1):
                raise ValueError(
                    f"rollout.group_size=1: loss.advantage={advantage} compares the completions of a prompt, and one "
                    "alone has nothing to be compared with; set rollout.group_size=2 or more"
                )
        if config.loss.credit == "turn":
            losses.turn_advantages(advantage, [[np.zeros(1, np.float32)]])
    if config.rollout.group_size == 1 and config.dynamic_sampling.enabled:
        raise ValueError("rollout.group_size=1: dynamic sampling drops such groups; set dynamic_sampling.enabled=False")
    name, hyperparameters = loss_arguments(config)
    one: Any = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    names = ("logprobs", "behaviour_logprobs", "advantages", "mask", "ref_logprobs", "sampler_logprobs")
    given = dict.fromkeys(names, one) | {"prefix_kl": losses.PrefixKL(one, one)}
    with named_in_errors(f"loss.name={name}"):
        jax.eval_shape(lambda **arrays: losses.policy_loss(name, **arrays, **hyperparameters), **given)


def _check_reference(config: ConfigDict) -> None:
    rule, path = config.reference.rule, config.reference.path
    if (rule == "teacher") != bool(path):
        raise ValueError(
            f"reference.rule={rule} with reference.path={path}: a teacher is another model, so method={config.method} "
            "needs both: add --config.reference.path=FOLDER, the teacher's"
            if rule == "teacher"
            else f"reference.rule={rule} with reference.path={path}: a teacher never moves; leave out reference.rule, "
            "or reference.path"
        )
    loss = config.loss.name
    if path and ":" not in loss and "kl_coef" not in losses.LOSSES[loss].hyperparameters:
        raise ValueError(
            f"loss.name={loss} has no KL term, so nothing would be learned from reference.path={path}: leave the "
            "teacher out, or take a method whose loss has a KL, as OPD or RPG-REINFORCE-URKL"
        )
    if config.loss.estimator == "exact" and rule == "behaviour":
        raise ValueError(
            "loss.estimator=exact reads the weights of the reference in every update, and reference.rule=behaviour "
            "keeps none: set reference.rule=fixed, every or kl, or reference.path"
        )


def _check_rehearsal(config: ConfigDict) -> None:
    """Raises ValueError for a rehearsal with only one of its fields, with a warm start, or with an environment."""
    c, coef = config.rehearsal, f"rehearsal.coef={config.rehearsal.coef:g}: set both, or neither"
    ready = "warm_start.enabled=True: only now it makes the start policy. Run it, export it, give --config.model.path"
    played = f"environment.name={config.environment.name}: kept conversations are not rehearsed; leave one out"
    reasons = {coef: bool(c.path) != bool(c.coef), ready: config.warm_start.enabled, played: config.environment.name}
    if (c.path or c.coef) and (found := [reason for reason, holds in reasons.items() if holds]):
        raise ValueError(f"rehearsal.path={c.path} with {found[0]}")


def _advantages(config: ConfigDict, rewards: np.ndarray) -> jax.Array:
    """The advantages f[P, G] of `rewards` f[P, G]; each part of the reward that `config` has is `rewards`."""
    lengths, weights = np.ones(rewards.shape, np.int32), [*reward_arguments(config)[0].values()]
    parts = rewards[..., None].repeat(len(weights), axis=2)
    return losses.advantages(config.loss.advantage, rewards, lengths=lengths, parts=parts, part_weights=weights)


def _has_baseline(config: ConfigDict, group: int) -> bool:
    """Whether an advantage stays the same where all rewards rise by one, in groups of `group` completions."""
    paid = np.arange(2.0 * group).reshape(2, group)
    return bool(np.allclose(_advantages(config, paid), _advantages(config, paid + 1), atol=1e-3))


@contextlib.contextmanager
def named_in_errors(what: str) -> Iterator[None]:
    """Turns an error of the block into a ValueError. Its message begins with `what`, and ends with the last line of
    code of one's own that led to the error, if there is one. ValueErrors pass unchanged."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise ValueError(f"{what} raises {type(error).__name__}: {lines[0]}{place}") from error


def _declare_own(config: ConfigDict) -> None:
    """Imports and declares the loss and the advantage that are named module:function, unless they are declared."""
    loss, advantage = config.loss.name or "", config.loss.advantage or ""
    if ":" in loss and loss not in losses.LOSSES:
        losses.declare_own_loss(loss, load(loss, "loss"))
    if ":" in advantage and advantage not in losses.ADVANTAGES:
        losses.declare_own_advantage(advantage, load(advantage, "advantage"))


def _check_environment(config: ConfigDict) -> None:
    """Raises ValueError if the reward is an environment's without an environment, the environment is unknown, its
    options are no JSON object, or a turn may be longer than all turns together. Imports no environment."""
    name = config.environment.name
    if name is None:
        if verifiers.ENVIRONMENT in reward_arguments(config)[0]:
            raise ValueError("rewards.parts=environment is what an environment pays: set environment.name too")
        return
    find_environment(name)
    environment_options(config)
    turn, limit = config.environment.turn_tokens, config.rollout.max_tokens
    if turn is not None and turn > limit:
        raise ValueError(f"environment.turn_tokens={turn} is more than rollout.max_tokens={limit} of all turns")
