"""Reads the arguments of losses, rewards and environments from a config, and names the user's own code in it."""

import json
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.rewards import verifiers
from rpg_jax.storage.files import distinct


def loss_arguments(config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """(name, {hyperparameter: value}) for `losses.policy_loss`, of a config that `with_method` has filled in."""
    others = ("advantage", "credit", "entropy_coef", "arguments")
    fields = {k: v for k, v in config.loss.to_dict().items() if v is not None and k not in others}
    return fields.pop("name"), fields | loss_object(config)


def loss_object(config: ConfigDict) -> dict[str, Any]:
    """The hyperparameters in `loss.arguments`. Raises ValueError if they are no JSON object, or if one has a config
    field, which checks read. A loss of the user's own may have a hyperparameter by the name of a field that is None."""
    given = json_object("loss.arguments", config.loss.arguments or "{}", '{"tau": 0.5}')
    own = ":" in (config.loss.name or "")
    if known := [name for name in given if name in config.loss and not (own and config.loss[name] is None)]:
        raise ValueError(f"loss.arguments sets {known[0]}, which has a field: set loss.{known[0]} alone")
    return given


def reward_arguments(config: ConfigDict) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Arguments of `Scorer`: (the weights {part: weight}, the options {part: keywords} of parts with options).
    The part that decides accuracy has weight 0 if `rewards.parts` does not have it. Overlong shaping is a part.
    Its buffer is the limit at most: evaluations may have a lower limit than their run."""
    c, limit = config.rewards, config.rollout.max_tokens
    weights = _weights(reward_parts(config))
    if c.accuracy is not None:
        weights.setdefault(c.accuracy, 0.0)
    options: dict[str, dict[str, Any]] = {"format": {"pattern": c.format}, "length": {"limit": limit}}
    options["judge"] = config.judge.to_dict()
    if c.overlong_shaping:
        weights["overlong"] = 1.0
        options["overlong"] = {"limit": limit, "buffer": c.overlong_buffer and min(c.overlong_buffer, limit)}
    return weights, {name: given for name, given in options.items() if name in weights}


def reward_parts(config: ConfigDict) -> str:
    """The rewards and their weights, as "exact:1,format:0.1": `rewards.parts`, or the environment's, or "exact"."""
    return config.rewards.parts or ("exact" if config.environment.name is None else verifiers.ENVIRONMENT)


def _weights(parts: str) -> dict[str, float]:
    """{part: weight} of a text like "exact:1,format:0.1,package.module:function". The default weight is 1."""
    weights = {}
    for part in filter(None, map(str.strip, parts.split(","))):
        name, _, weight = part.rpartition(":")
        try:
            weights[name or part] = float(weight) if name else 1.0
        except ValueError:
            weights[part] = 1.0  # the colon belongs to module:function
    return weights


def environment_options(config: ConfigDict) -> dict[str, Any]:
    """The keyword arguments of the environment. Raises ValueError if `environment.options` is no JSON object."""
    return json_object("environment.options", config.environment.options, '{"high": 50}')


def json_object(field: str, text: str, example: str) -> dict[str, Any]:
    """The object in the JSON `text` of a config field. ValueError for other text, whose fix is the `example`."""
    try:
        value = json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}={text!r:.100} is not JSON ({error}): write it as {example}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{field}={text!r} must be an object of JSON, as {example}")
    return value


def own_code(config: ConfigDict) -> dict[str, str]:
    """{"module:name": field} of the functions and classes outside this package that the fields of a config name. The
    options of the environment "tools" name tools and a verifier; other options raise ValueError. Imports nothing."""
    named = {"task.name": [config.task.name], "rewards.parts": [*reward_arguments(config)[0]]}
    named |= {f"loss.{name}": [config.loss[name] or ""] for name in ("name", "advantage")}
    named["environment.name"] = [config.environment.name or ""]
    if config.environment.name == "tools":
        options = environment_options(config)
        if not isinstance(tools := options.get("tools", {}), dict):
            raise ValueError(f'environment.options: tools={tools!r:.60} must be an object, as {{"calculator": {{}}}}')
        named["environment.options"] = [*tools, str(options.get("verifier"))]
    return {name: field for field, names in named.items() for name in names if ":" in name}


def check_trusted(config: ConfigDict, run: object, *, trust: bool, given: str = "") -> None:
    """Raises ValueError, unless `trust` is set, if the config of a run that somebody else may have written names code
    to import or a judge to ask. The message names them and `run`, the run's folder. Loss and advantage do not count:
    only training imports them. Nor does code in `given`, the `rewards.parts` that a command line put in the config."""
    why = [f"imports {n!r} ({f})" for n, f in own_code(config).items() if f[:5] != "loss." and n not in _weights(given)]
    if verifiers.JUDGE in reward_arguments(config)[0]:
        why.append(f"sends completions, and the variable JUDGE_API_KEY, to {config.judge.url!r} (judge.url)")
    if why and not trust:
        rewards_alone = all(reason.endswith(("(rewards.parts)", "(judge.url)")) for reason in why)
        fix = "add --trust if you know who wrote this folder" + ", or give --rewards=exact" * rewards_alone
        raise ValueError(f"the config of {run} {'; it '.join(why)}: {fix}")
