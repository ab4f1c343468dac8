"""The digests of a run's inputs: problems, tokenizer, model and the user's own code.

A run keeps them in inputs.json. A resume that finds an input changed stops, unless `run.accept_changes` is set.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ml_collections import ConfigDict

from rpg_jax import data, models, storage
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import INPUTS, PARENT, START
from rpg_jax.rewards import callables
from rpg_jax.rewards.callables import NOTHING, Handed
from rpg_jax.runs import checkpointing
from rpg_jax.runs.arguments import own_code
from rpg_jax.runs.experiment import Experiment
from rpg_jax.runs.layout import teacher_folder
from rpg_jax.storage import write_atomically
from rpg_jax.storage.files import read_if_there


def check_inputs(experiment: Experiment, folder: Path, *, begins: bool) -> dict[str, str]:
    """Compares the run's inputs with `folder`/inputs.json; returns {name: SHA-256} of the present inputs. Collective.

    Inputs that are not loaded are not compared. The user's code is compared if there are problems or demonstrations to
    train on; a teacher's weights and a rehearsal, if there are problems. If the run `begins`, the file is written, and
    the inputs of the first process are those to compare with.

    Raises ValueError, which names the inputs, if an input has changed or differs from that of the first process. With
    `run.accept_changes` a line names the inputs instead, and the file gets the new digests."""
    found, task = input_digests(experiment), experiment.task
    if task.train or task.demonstrated:
        found |= code_digests(experiment.config, experiment.handed)
    if task.train and (path := teacher_folder(experiment.config)):
        found["reference.path (weights)"] = files_digest(models.local_folder(path))
    if task.train and (path := experiment.config.rehearsal.path):
        found["rehearsal.path"] = files_digest(storage.local(path), "completions.jsonl")
    known = read_if_there(folder / INPUTS) if hosts.is_first() and not begins else {}
    known = json.loads(hosts.all_gather_bytes(json.dumps(known or found).encode())[0])
    if changed := [name for name, digest in found.items() if known.get(name, digest) != digest]:
        said = f"{', '.join(changed)} has changed since this run began"
        if not experiment.config.run.accept_changes:
            raise ValueError(
                f"{said}: put the old content back, give this run another --config.run.name, or go on with the new "
                "content by --config.run.accept_changes=True"
            )
        print(f"{said}, and the run goes on")
    if (begins or changed) and hosts.is_first():
        kept = found if begins else known | found
        write_atomically(folder / INPUTS, json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return found


def input_digests(experiment: Experiment) -> dict[str, str]:
    """{name: SHA-256} of tokenizer, the model's dimensions, loaded problems and demonstrations. A name is the config
    field, for a held-out set "FIELD: SET"; without files the fields are "task" and "task, held out". If adapters of
    `model.path` train without a warm start, "model.path (weights)" has the digest of the files of weights."""
    task, name = experiment.task, experiment.config.task.name
    train, held_out = ("task.train", "task.held_out_sets") if name == "files" else ("task", "task, held out")
    found = {"model.tokenizer": experiment.tokenizer.digest(), "model.path": model_digest(experiment.layout.model)}
    m, warm = experiment.config.model, experiment.config.warm_start.enabled
    if m.path and m.lora.rank and not warm:  # every process reads the weights anew: checkpoints have only adapters
        found["model.path (weights)"] = files_digest(models.local_folder(m.path))
    if task.train:
        found[train] = problems_digest(task.train)
    if task.demonstrated:
        found["warm_start.train"] = problems_digest(task.demonstrated)
    return found | {f"{held_out}: {name}": problems_digest(problems) for name, problems in task.held_out.items()}


def model_digest(model: models.DecoderConfig) -> str:
    """The SHA-256 of a model's dimensions, without its weights. The spelling never changes, so that old runs resume."""
    families = {"qkv_bias=False, qk_norm=True": "family='qwen3'", "qkv_bias=True, qk_norm=False": "family='qwen2'"}
    text = repr(model).replace("DecoderConfig(", "QwenConfig(", 1)
    for fields, family in families.items():
        text = text.replace(fields, family, 1)
    return _digest([text])


def code_digests(config: ConfigDict, handed: Handed = NOTHING) -> dict[str, str]:
    """{"FIELD (module:name)": SHA-256} of the user's code files that the config names. A module that a file imports is
    "FIELD (module:name imports OTHER)". An object in `handed` has its source text's digest, if any. Imports nothing."""
    return {
        f"{field} ({name})": digest
        for path, field in own_code(config).items()
        for name, digest in callables.source_digests(path, handed.get(path)).items()
    }


def problems_digest(problems: Iterable[data.Problem]) -> str:
    """The SHA-256 of all fields of the problems, in their order."""
    return _digest(repr(tuple(vars(problem).values())) for problem in problems)  # a tenth of the time of `astuple`


def files_digest(folder: Path, pattern: str = "*.safetensors") -> str:
    """The SHA-256 of the names and bytes of the files in `folder` that match the glob `pattern`, sorted by name."""
    found = []
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            found += [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
    return _digest(found)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def note_start(folder: Path, checksum: int, parent: checkpointing.Parent | None = None) -> None:
    """Adds to `folder`/inputs.json the `checksum` of the first weights: of the frozen weights if there are adapters, of
    the trained arrays in a branch. Runs are compared only if they begin with equal weights; a warm start gives other
    weights on another machine. A branch also notes its `parent` as "/home/me/runs/A@100". The first process writes."""
    if hosts.is_first():
        known = read_if_there(folder / INPUTS) | {START: f"{checksum:016x}"}
        known |= {} if parent is None else {PARENT: parent.name}
        write_atomically(folder / INPUTS, json.dumps(known, indent=2, sort_keys=True) + "\n")
