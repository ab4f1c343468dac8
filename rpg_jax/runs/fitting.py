"""Chooses the config of a run from a model, rows and a reward: the fields that nobody has set, each with a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import data, models
from rpg_jax.models.sizes import parameter_count
from rpg_jax.runs import processes
from rpg_jax.runs.resolve import with_method
from rpg_jax.runs.run_names import shown

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "task.template": "none",  # a question is the prompt, inside the chat template of the model
        "rewards.right_above": 0.5,
        "rewards.overlong_shaping": False,
        "dynamic_sampling.enabled": False,
        "train.updates_per_step": 1,  # one pass less: the update itself has the sampling policy's log-probs
        "optimizer.warmup": "3 updates",
        "optimizer.weight_decay": 0.0,
        "evaluation.problems": 64,
        "evaluation.k": 1,
    }
)
"""Fields that are the same for every model. A method that is asked for by name brings its own shaping and sampling."""
_OF_METHODS = ("rewards.overlong_shaping", "dynamic_sampling.enabled")
_SMALL: Mapping[str, Any] = {"rollout.prompts_per_step": 8, "rollout.max_tokens": 64, "train.steps": 40}
_LARGE: Mapping[str, Any] = {"rollout.prompts_per_step": 64, "rollout.max_tokens": 512, "train.steps": 100}
_ROW = 2048  # tokens of a row that completions share, unless one completion needs more
_CPU_TOKENS = 1024  # of a micro-batch on a CPU: a few GB of activations for models that a CPU trains
_COVERED = 0.99  # of the prompts are within the limit
_LARGEST_RATE = 2e-4  # good for 0.1 million weights (docs/tables/reasoning.md)
_ADAPTERS = 10  # the rate of adapters in units of the rate of all weights; docs/lora.md found 4 and 10 to be best


class Fitted(NamedTuple):
    """`fields` by dotted name that nobody has set, and `lines` that say what was chosen and which field changes it."""

    fields: dict[str, Any]
    lines: list[str]


def neutral(asked: Collection[str]) -> dict[str, Any]:
    """The fields of `NEUTRAL` that are not among the names `asked`. If "method" is among them,
    `rewards.overlong_shaping` and `dynamic_sampling.enabled` are left out too: the method sets them.
    """
    kept = _OF_METHODS if "method" in asked else ()
    return {name: value for name, value in NEUTRAL.items() if name not in asked and name not in kept}


def fitted(config: ConfigDict, asked: Collection[str], rows: Sequence[str]) -> Fitted:
    """Chooses values for the fields that the caller has not set, by the model, the rows and the device: the limits of
    prompts and completions, the sizes of a step and of a micro-batch, the numbers' dtype and the learning rate.

    Args:
      config: holds `model.path`, the values of `NEUTRAL` and what the caller has set. It stays as it is.
      asked: dotted names of the fields that the caller has set.
      rows: the files or data sets of the problems to train on; they are read.

    Raises ValueError if the model is missing or its architecture is not supported, or if a row is bad.
    """
    folder = models.local_folder(config.model.path, weights=False)
    model = models.read_config(folder)  # before anything else: an architecture that is not supported is refused
    tokenizer = data.load_tokenizer(folder)
    on_cpu, kept = processes.platform() == "cpu", dict[str, Any]()

    def choose(name: str, value: Any) -> Any:
        if name in asked:
            return config[name]
        kept[name] = value
        return value

    problems = data.load(rows, template=config.task.template, bad_rows=config.task.bad_rows)[0]
    lengths = [len(data.encode_prompt(p, tokenizer, thinking=config.task.thinking)) for p in problems]
    size, context = _SMALL if on_cpu else _LARGE, model.rope.max_position_embeddings
    wanted = config.rollout.max_tokens if "rollout.max_tokens" in asked else size["rollout.max_tokens"]
    most = max(context // 2, context - wanted)  # prompts that leave no room for a completion are not trained
    prompt = choose("task.max_prompt_tokens", min(most, int(np.quantile(lengths, _COVERED, method="higher"))))
    longest = choose("rollout.max_tokens", max(1, min(size["rollout.max_tokens"], context - prompt)))
    prompts, group = choose("rollout.prompts_per_step", size["rollout.prompts_per_step"]), config.rollout.group_size
    steps = choose("train.steps", size["train.steps"])
    every = choose("evaluation.every", min(10, max(1, steps // 4)))  # a short run has a curve too
    (dtype, why), (rate, reason) = fast_dtype(), _rate(parameter_count(model), adapters=bool(config.model.lora.rank))
    dtype, rate = choose("model.compute_dtype", dtype), choose("optimizer.learning_rate", rate)
    row = choose("train.packed_length", max(prompt + longest, min(prompt + group * longest, _ROW)))
    if on_cpu:
        choose("rollout.slots", min(prompts * group, 128))
        micro, devices = min(max(1, _CPU_TOKENS // row), prompts * group), jax.device_count()
        choose("train.microbatch_size", -(-micro // devices) * devices)
        choose("model.remat", "none")
        choose("checkpoint.every", 1)  # a step may outlast the time that a signal leaves
    final = with_method(config)
    shaped = "with" if final.rewards.overlong_shaping else "without"
    inside = "as they are" if tokenizer.chat is None else "inside the model's chat template"
    within = f"{sum(n <= prompt for n in lengths)} of {len(lengths)} rows (longest {max(lengths)})"
    why, reason = why * ("model.compute_dtype" in kept), reason * ("optimizer.learning_rate" in kept)
    lines = [
        f"model: {config.model.path}, {parameter_count(model) / 1e6:,.3g} million weights  [model.path]",
        f"numbers: {dtype}{why}  [model.compute_dtype]",
        f"prompts: {inside}; at most {prompt} tokens, {within}  [task.template, task.max_prompt_tokens]",
        f"completions: at most {longest} tokens, stop token included  [rollout.max_tokens]",
        f"reward: {final.rewards.parts.replace(':1.0', '')}, {shaped} overlong shaping  [rewards.overlong_shaping]",
        f"right, for accuracy: a score above {config.rewards.right_above}  [rewards.right_above]",
        f"method: {config.method}, KL coefficient {shown(final.loss.kl_coef or 0.0)}  [method, loss.kl_coef]",
        f"learning rate: {shown(rate)}{reason}  [optimizer.learning_rate]",
        f"a step: {prompts} prompts x {group} completions  [rollout.prompts_per_step, rollout.group_size]",
        f"length: {steps} steps, the first compiles; an evaluation every {every}  [train.steps, evaluation.every]",
    ]
    return Fitted(kept, [f"  {line}" for line in lines])


def fast_dtype() -> tuple[str, str]:
    """(the dtype that is fast on this process's devices, "float32" or "bfloat16"; the reason, to end a sentence)."""
    if processes.platform() == "cpu":
        return "float32", ", because CPUs emulate bfloat16"
    capability = getattr(jax.devices()[0], "compute_capability", None)  # only GPUs have one
    if capability is not None and float(capability) < 8:
        return "float32", f", because a GPU of compute capability {capability} has no bfloat16"
    return "bfloat16", ", which is fast here; weights and optimizer stay in float32"


def _rate(weights: int, *, adapters: bool) -> tuple[float, str]:
    """A learning rate for a pretrained model, with one digit, and the reason. At 3e-5 in place of 1e-5 SmolLM2-135M
    learned sums in six steps, and lost some of them again in six more.
    """
    rate = min(max(1e-6 * (4e9 / weights) ** (2 / 3), 1e-6), _LARGEST_RATE)
    reason = ", because 4 billion weights learn at 1e-6 (the paper), 0.135 at 1e-5; the power -2/3 of the size has both"
    if adapters:
        rate, reason = rate * _ADAPTERS, f"{reason}; {_ADAPTERS} times as much for adapters"
    return float(f"{rate:.0e}"), reason
