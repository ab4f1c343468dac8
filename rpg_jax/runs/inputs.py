"""The inputs of a run: problems, tokenizer, model, own losses. A resume finds every input unchanged, or stops."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rpg_jax import data, losses, models
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import INPUTS, START
from rpg_jax.rewards.callables import load
from rpg_jax.runs.experiment import Experiment
from rpg_jax.storage import json_files, write_atomically


def digests(experiment: Experiment) -> dict[str, str]:
    """The digest of each input, by the config field that names it. Contents count, not places."""
    task, name = experiment.task, experiment.config.task.name
    train, held_out = ("task.train", "task.held_out_sets") if name == "files" else ("task", "task, held out")
    found = {"model.tokenizer": experiment.tokenizer.digest(), "model.path": of_model(experiment.layout.model)}
    if path := weights_beside_adapters(experiment.config):
        found["model.path (weights)"] = of_weights(models.local_folder(path))
    found |= {f"loss.{name}": digest for name, digest in of_own_functions(experiment.config).items()}
    if ":" in name:
        with contextlib.suppress(OSError):  # no source text, as of a class typed into an interpreter
            found["task.name"] = _digest([inspect.getsource(load(name, "task"))])
    if task.train:
        found[train] = of_problems(task.train)
    if task.demonstrated:
        found["warm_start.train"] = of_problems(task.demonstrated)
    return found | {f"{held_out}: {name}": of_problems(problems) for name, problems in task.held_out.items()}


def of_model(model: models.DecoderConfig) -> str:
    """The digest of a model's fields, in the words of the version that wrote the first runs: theirs go on."""
    families = {"qkv_bias=False, qk_norm=True": "family='qwen3'", "qkv_bias=True, qk_norm=False": "family='qwen2'"}
    text = repr(model).replace("DecoderConfig(", "QwenConfig(", 1)
    for fields, family in families.items():
        text = text.replace(fields, family, 1)
    return _digest([text])


def of_own_functions(config: ConfigDict) -> dict[str, str]:
    """The digests of the sources of a run's own loss and advantage, by "name" and "advantage".

    The text of the function alone counts. A function without source text has no digest, as a function that was typed
    into an interpreter.
    """
    functions: dict[str, Callable[..., Any]] = {}
    if ":" in (loss := config.loss.name) and loss in losses.LOSSES:
        functions["name"] = losses.LOSSES[loss].function
    if ":" in (advantage := config.loss.advantage) and advantage in losses.ADVANTAGES:
        functions["advantage"] = losses.ADVANTAGES[advantage].function
    found = {}
    for field, function in functions.items():
        with contextlib.suppress(OSError):
            found[field] = _digest([inspect.getsource(function)])
    return found


def weights_beside_adapters(config: ConfigDict) -> str | None:
    """The address of weights that every process of a run reads anew, because only adapters are in its checkpoints."""
    return config.model.path if config.model.lora.rank and not config.warm_start.enabled else None


def of_problems(problems: Iterable[data.Problem]) -> str:
    """The digest of problems, in their order."""
    return _digest(repr(tuple(vars(problem).values())) for problem in problems)  # a tenth of the time of `astuple`


def of_weights(folder: Path) -> str:
    """The digest of the safetensors in a folder: their names and all their bytes."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found += [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
    return _digest(found)


def check(experiment: Experiment, folder: Path, *, begins: bool) -> None:
    """Compares the inputs with those of the run's beginning, which `folder` keeps. Collective.

    Args:
      begins: the run has no step yet, and its inputs are kept for later.

    Raises:
      ValueError: an input has changed, or the hosts read different ones; the message names it. Inputs that are not
        loaded are not compared.
    """
    found = digests(experiment)
    known = json_files.read_if_there(folder / INPUTS) if hosts.is_first() and not begins else {}
    known = json.loads(hosts.all_gather_bytes(json.dumps(known or found).encode())[0])
    if changed := [name for name, digest in found.items() if known.get(name, digest) != digest]:
        raise ValueError(
            f"{', '.join(changed)} has changed since this run began: put the old content back, or give this run "
            "another --config.run.name"
        )
    if begins and hosts.is_first():
        write_atomically(folder / INPUTS, json.dumps(found, indent=2, sort_keys=True) + "\n")


def note_start(folder: Path, checksum: int) -> None:
    """Adds the checksum of the first weights to `INPUTS`; with adapters, the checksum of the frozen weights.

    Equal recipes of a warm start give other weights on another machine, and runs are compared only from equal weights.
    """
    if hosts.is_first():
        known = json_files.read_if_there(folder / INPUTS) | {START: f"{checksum:016x}"}
        write_atomically(folder / INPUTS, json.dumps(known, indent=2, sort_keys=True) + "\n")


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
