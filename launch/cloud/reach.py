"""Finds files that a config names and that workers would lack: workers get the files that git tracks, and no others."""

import re
from collections.abc import Iterator
from pathlib import Path

from cloud import files
from cloud.errors import LaunchError
from cloud.job import ROOT

_DATA = (".parquet", ".jsonl", ".json")


def is_sent(path: str) -> bool:
    """Whether workers get a file, or some file of a folder; a relative `path` starts at the repository's root."""
    inside = (ROOT / path).resolve()
    return inside.is_relative_to(ROOT) and any(
        file == inside.relative_to(ROOT) or inside.relative_to(ROOT) in file.parents for file in files.sent()
    )


def all_is_there(config: dict) -> None:
    """Raises LaunchError with one line for each folder, data file, reward function and environment that is not sent."""
    problems = [*_weights(config["model"]), *_data(config["task"]), *_own_code(config)]
    if problems:
        raise LaunchError("\n".join(problems))


def _stays_here(path: str) -> bool:
    """Whether workers lack a path. An absolute path that does not exist here may exist on the workers."""
    return not is_sent(path) and (not Path(path).is_absolute() or Path(path).exists())


def _weights(model: dict) -> Iterator[str]:
    for field in ("path", "tokenizer"):
        name = model[field] or ""
        elsewhere = name.startswith("gs://") or (re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not _local(name))
        if name and not elsewhere and _stays_here(name):
            yield (
                f"model.{field}={name} is a folder of this machine, which workers do not get; "
                f"give its name on the hub, owner/name, or copy it: gcloud storage cp --recursive {name} gs://BUCKET/"
            )


def _data(task: dict) -> Iterator[str]:
    named = [(f"task.train={name}", name) for name in _listed(task["train"])]
    for entry in _listed(task["held_out_sets"]):
        named.append((f"task.held_out_sets={entry}", entry.partition("=")[2]))
    for field, name in named:
        if (_local(name) or name.endswith(_DATA)) and _stays_here(name):
            yield (
                f"{field} is a file of this machine, and workers get only what git tracks; "
                "put it into the repository and git add it, or onto the hub: hf:owner/name/config/split"
            )


def _own_code(config: dict) -> Iterator[str]:
    """Checks that workers get the module of each `module:name`; a reward's weight may follow it."""
    named = {"rewards.parts": config["rewards"]["parts"], "environment.name": config["environment"]["name"]}
    for field, text in named.items():
        for module in re.findall(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*", text or ""):
            path = module.replace(".", "/")
            if not is_sent(f"{path}.py") and not is_sent(f"{path}/__init__.py"):
                yield (
                    f"{field}={text}: workers get only what git tracks, and {module} is not in git; "
                    f"make it {path}.py at the repository's root and git add {path}.py"
                )


def _local(name: str) -> bool:
    return bool(name) and (ROOT / name).exists()


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
