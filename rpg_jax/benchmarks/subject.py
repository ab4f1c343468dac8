"""The subject of a measurement: work of a known size, or a config's training programs with random weights and rows."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from rpg_jax import models
from rpg_jax.data import RowShape
from rpg_jax.models import DecoderConfig
from rpg_jax.planning.chips import CHIPS
from rpg_jax.planning.compiling import training_flops
from rpg_jax.runs import cli, config_files
from rpg_jax.runs.layout import Layout, make_layout, row_shape
from rpg_jax.runs.learner import Learner, first_adapters, learner_programs, make_learner, new_base
from rpg_jax.runs.memory import with_micro_batch
from rpg_jax.runs.resolve import resolve
from rpg_jax.training.state import TrainState, shardings_of
from rpg_jax.training.step import Programs
from rpg_jax.types import Batch, Rows

_GPU_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "V100": 125e12, "T4": 65e12}
"""Operations per second in bf16 (V100 and T4: f16) without sparsity, from nvidia.com's data sheets of SXM boards."""
_TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
_TPU_KINDS |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e"}


class Peer(Protocol):
    """Another library, in a process of its own, that does the same work again and again. See `experiments/peers`."""

    @property
    def first(self) -> Mapping[str, Any]:
        """The measurements of the first piece of work, by field: of an update `first_step_seconds`."""

    def work(self) -> Mapping[str, Any]:
        """Works once more and returns `seconds`, with the `tokens` of a rollout or the `peak_bytes` of an update."""

    def close(self) -> None:
        """Ends the library's process."""


@dataclasses.dataclass(frozen=True)
class Work:
    """`prompts` x `group_size` completions of `new_tokens` after prompts of `prompt_tokens`, `slots` at a time.
    Activations, and the weights of a rollout, have the dtype `dtype`."""

    model: DecoderConfig
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    slots: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """The tokens of all completions together."""
        return self.prompts * self.group_size * self.new_tokens


_small = functools.partial(DecoderConfig, vocab_size=4096, num_layers=4, num_kv_heads=2, num_heads=4, head_dim=64)
PRESETS = {
    # docs/performance.md has Tunix and Hugging Face on the same work.
    "w1": Work(_small(embed_dim=256, hidden_dim=768), 4, 8, 64, 128, 32),
    "tiny": Work(_small(vocab_size=64, num_layers=3, embed_dim=128, head_dim=32, hidden_dim=320), 64, 8, 12, 5, 128),
    "qwen3-0.6b": Work(models.size("qwen3-0.6b"), 8, 8, 128, 512, 64, "bfloat16"),  # 16 GB hold both drivers
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A config's training programs on its mesh, with their inputs. `name` is that of the preset or the config file."""

    name: str
    layout: Layout
    learner: Learner
    programs: Programs

    @property
    def shape(self) -> RowShape:
        """The shape of the micro-batch, which is all that an update takes."""
        return row_shape(self.layout.config)

    @property
    def tokens(self) -> int:
        """The tokens of the micro-batch that pass through the model in an update, prompts included."""
        return self.shape.rows * self.shape.length

    @property
    def step_flops(self) -> float:
        """The model's operations in an update, on all devices. Recomputation counts for logits only, adapters never."""
        rows, length, predicted, *_ = self.shape
        sizes: dict[str, Any] = {"rows": rows, "length": length, "predicted": predicted}
        return training_flops(self.layout.model, **sizes, frozen=self.layout.lora is not None)

    def state(self) -> TrainState:
        """Returns random weights or adapters on the devices, as `learner.like`, and the optimizer's first state."""
        layout = self.layout
        return self.learner.create(_random(layout) if layout.lora is None else first_adapters(layout))

    def base(self) -> models.Base | None:
        """Returns random frozen weights, beside which adapters are trained; None if all weights are trained."""
        return None if self.layout.lora is None else new_base(self.layout, _random)

    def batch(self) -> Batch:
        """Returns a micro-batch on the devices, the same at each call: random tokens in rows without padding, each
        completion at its row's end. Log-probs of the behaviour policy and of the reference are a little apart."""
        (rows, length, completion, *_), vocabulary = self.shape, self.layout.model.vocab_size
        prompt = length - min(completion, length - 1)
        rng = np.random.default_rng(0)
        tokens: Any = rng.integers(0, vocabulary, (rows, length), dtype=np.int32)
        places: Any = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        ones, targets = np.ones_like(tokens), tokens[:, prompt:]
        near: Any = np.full_like(targets, -np.log(vocabulary), np.float32)
        advantages: Any = np.broadcast_to(rng.choice([-1, 1], (rows, 1)).astype(np.float32), near.shape)
        reference = near + rng.normal(0, 0.01, near.shape).astype(np.float32)
        mask: Any = np.ones_like(near)
        own = Rows(tokens, places, ones, places[:, prompt - 1 : -1], targets, ones[:, prompt:], mask)
        batch = Batch(own, near, behaviour_logprobs=near, ref_logprobs=reference, advantages=advantages)
        return jax.device_put(batch, self.layout.row_sharding)


def _random(layout: Layout) -> Any:
    """Draws random weights in the shapes, dtypes and shardings of a layout."""
    m = layout.config.model
    dtypes = {"param_dtype": m.param_dtype, "compute_dtype": m.compute_dtype}
    return models.init(layout.model, **dtypes, remat=m.remat, shardings=shardings_of(layout.weights))[1]


def arguments(parser: cli.Parser) -> None:
    """Adds --preset, --config and --config.FIELD to a parser, the options that `chosen` reads."""
    parser.add_argument("--preset", choices=PRESETS, help="a work unit (default w1, where no --config is given)")
    parser.add_config()


def chosen(arguments: argparse.Namespace, changes: Sequence[str]) -> Subject:
    """Returns the subject that `arguments` choose, on all devices: the config of --config, else the preset of --preset,
    w1 by default. `changes` ("--config.FIELD=VALUE") are more overrides. Raises ValueError for both options, for a
    config that names no model, and as `resolve`. Changes how this process takes memory (`cli.keep_pages`)."""
    cli.keep_pages()
    if arguments.config and arguments.preset:
        raise ValueError("--preset or --config, not both")
    preset = "" if arguments.config else arguments.preset or "w1"
    own = [f"--config.{field}={value}" for field, value in (_fields(preset) if preset else {}).items()]
    file = arguments.config or str(config_files.FOLDER / "base.py")
    config = resolve(config_files.load(file, [*own, *arguments.overrides, *changes]).config)
    if not preset and not (config.model.size or config.model.path):
        raise ValueError(f"{file} names no published model: set --config.model.size, or take a --preset")
    layout = with_micro_batch(make_layout(config, PRESETS[preset].model.vocab_size if preset else None))
    learner = make_learner(layout, supervised=True)  # without a learned baseline
    programs = learner_programs(layout, learner, base=layout.base)
    return Subject(preset or Path(file).stem, layout, learner, programs)


def _fields(preset: str) -> Mapping[str, Any]:
    """Returns the config fields of a preset's work: one update of AdamW, computed in the dtype of the work."""
    work, model = PRESETS[preset], PRESETS[preset].model
    dimensions = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_dim")
    return {
        **{f"model.{name}": getattr(model, name) for name in dimensions},
        "model.compute_dtype": work.dtype,
        "model.remat": "dots",
        "task.max_prompt_tokens": work.prompt_tokens,
        "rollout.max_tokens": work.new_tokens,
        "rewards.overlong_shaping": False,
        "rollout.prompts_per_step": work.prompts,
        "rollout.group_size": work.group_size,
        "train.updates_per_step": 1,
    }


def peak_flops() -> float | None:
    """Returns peak operations per second of all devices, in bf16 (V100, T4: f16); None if their kind is unknown."""
    device = jax.devices()[0]
    if device.platform == "tpu":
        kind = _TPU_KINDS.get(device.device_kind)
        return CHIPS[kind].flops * jax.device_count() if kind else None
    known = (flops for name, flops in _GPU_FLOPS.items() if name in device.device_kind)
    return next(known, 0.0) * jax.device_count() or None


def peak_bytes() -> int:
    """Returns the most bytes of host memory that this process has had resident so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def since_start() -> float:
    """Returns the seconds since this process began; without /proc, its seconds of CPU time."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.process_time()
    ticks = int(stat.read_bytes().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100
