"""The folder of a run: its name, its owner, its config, what it was made with, and whether it may be resumed."""

import contextlib
import datetime
import difflib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import AROUND, START_FROM, Run, flat
from rpg_jax.runs import cli, config_files, logs, run_names
from rpg_jax.runs.arguments import json_object
from rpg_jax.runs.config_files import Unset
from rpg_jax.runs.resolve import check_training
from rpg_jax.storage.checkpoints import committed_steps
from rpg_jax.storage.files import finite, read_if_there, read_object, to_json
from rpg_jax.storage.leases import Lease

LOCK = "requirements-tpu.lock"  # every package of a TPU worker with its version and its hash
PROGRAM = "rpg_jax"
"""The mark in versions.json of a folder that this program made, and may therefore replace."""
# Where things are computed: the numbers agree bit for bit only on the same mesh, step for step on any.
_PLACES = ("mesh.", "sharding", "offload", "model.remat", "train.microbatch_size", "train.packed_length")
_DECODING_PLACES = ("driver", "tensor", "expert", "devices", "slots", "threads")
_JUDGES = ("url", "parallel", "deadline_seconds")
# Fields that may differ when a run is resumed: they do not change what has been computed so far.
_MAY_CHANGE = (
    *(*AROUND, *_PLACES),
    *(f"rollout.{name}" for name in _DECODING_PLACES),
    *(f"judge.{name}" for name in _JUDGES),
    *("train.steps", "warm_start.dir", "rollout.max_sampler_gap"),
)
# An older run without one of these fields is a run in which the field has no value.
_AS_BEFORE = (
    *(START_FROM, "reference.path", "model.replay_experts", "rehearsal.path", "rehearsal.coef"),
    "rollout.partial_tokens",
)
_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "google-jetstream", "numpy"),
    *("ml-collections", "libtpu", "tensorstore"),
)


def default_name(config_file: str, config: ConfigDict, overrides: Mapping[str, Any], kind: str | None = None) -> str:
    """The name of a run: config file and variant, method, other overrides and seed, as tiny-grpo-lr3e-4-seed1. So the
    same command continues it. `overrides` are the changed fields, {name: value}. The name leaves out `train.steps`,
    `warm_start.dir` and the sections of `AROUND`, except `run.start_from`. `kind`, as "sft", replaces the method."""
    named = ("method", "seed", "train.steps", "warm_start.dir")
    other = {k: v for k, v in overrides.items() if k not in named and not k.startswith(AROUND)}
    if config.run.start_from:
        other["from"] = Path(config.run.start_from).name.replace("@", "-")
    first = [run_names.file_part(config_file), kind or config.method.lower()]
    return "-".join([*first, *run_names.values_part(other), f"seed{config.seed}"])


def named(config: ConfigDict, file: str, overrides: Mapping[str, Any], **kind: str) -> ConfigDict:
    """If `run.name` of `config` is None, sets it to what `default_name` makes of the arguments. Returns `config`
    itself. Raises ValueError for the reasons of `check_training`, for a tracker whose package is not installed, and for
    a name that no folder can have."""
    check_training(config)
    for tracker in logs.chosen(config.log.tracker):
        logs.needed(tracker)
    if config.run.name is None:
        config.run.name = default_name(file, config, overrides, **kind)
    run_names.check(config.run.name)
    return config


def of(config: ConfigDict) -> storage.Folder:
    """The folder `run.dir/run.name`, neither opened nor made. Raises ValueError if `run.dir` is empty, or is neither a
    local path nor in a bucket, or if `run.name`, which must be a text, is not the name of one folder."""
    run_names.check(config.run.name)
    if not config.run.dir:
        raise ValueError("run.dir is empty; the present folder is --config.run.dir=.")
    return storage.Folder(f"{config.run.dir.rstrip('/')}/{config.run.name}")


@contextlib.contextmanager
def held(config: ConfigDict) -> Iterator[storage.Folder]:
    """A context that opens the folder of a run by `open_run`. Until its end no other run writes there. Collective. If
    another process takes over the folder, this process ends at once. An error, of the opening or of the block, gets the
    attribute `ends_again`: why another start would end with the error too, or "" (see `cli.ends_again`).

    A new local run that fails before its first step leaves no folder, unless the folder has groups that a resume takes
    over or a record of the failure. A folder in a bucket stays. Raises ValueError if the folder cannot be this run's,
    or another run is writing there.
    """
    folder = of(config)
    is_new = hosts.is_first() and not storage.in_bucket(folder.home) and not folder.home.exists()
    stepped = False
    try:
        with contextlib.ExitStack() as closing:
            with hosts.first_alone("run folder"):
                if hosts.is_first():
                    closing.enter_context(Lease(folder.home, _stop_writing))
                closing.enter_context(folder)
                if hosts.is_first():
                    with storage.files.locked(folder.files) if folder.files.exists() else contextlib.nullcontext():
                        open_run(config, folder)
                    closing.enter_context(storage.files.locked(folder.files))
            try:
                yield folder
            except Exception:
                stepped = _stepped(folder)  # the files of a folder in a bucket go with the context
                raise
    except Exception as error:
        error.ends_again = cli.ends_again(folder.home, error, stepped=stepped)  # type: ignore[attr-defined]
        if is_new and not stepped and not any(map(_helps, folder.files.rglob("*"))):
            shutil.rmtree(folder.home, ignore_errors=True)
        raise


def _helps(path: Path) -> bool:
    """Whether a file is of use after a failure: groups of the journal, stacks of a stall, a profile of the memory."""
    helps = path.name in ("stall.txt", "memory.prof") or "journal" in path.parent.parts
    return helps and path.is_file() and path.stat().st_size > 0


def _stop_writing(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(cli.GAVE_UP)  # whatever is under way would mix with what the other process writes


@contextlib.contextmanager
def opened(address: str) -> Iterator[storage.Folder]:
    """A context with the folder of an earlier run, local, or copied here from a bucket, which gets the block's changes.
    The folder may be missing. A ValueError of the block names the folder by its `address`."""
    with storage.Folder(address) as folder:
        folder.fetch()
        try:
            yield folder
        except ValueError as error:
            raise ValueError(folder.shown(str(error))) from error


def use_compilation_cache(folder: str | None = None) -> None:
    """Keeps compiled programs between runs: in the environment's JAX_COMPILATION_CACHE_DIR, else in `folder`, a local
    path or gs:// address ("" keeps none), else, for None, in the user's cache folder. Later calls change the folder. A
    compiled program is executed as it is: never pass a folder that the config.json of a run names. A local folder also
    keeps programs that compile in less than a second, unlike JAX's default. Raises ValueError for another address."""
    chosen: str | Path = _own_cache() if folder is None else folder
    if (chosen != "" or folder == "") and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        address = str(storage.absolute(chosen)) if chosen else None  # whichever folder the process moves to
        if address != jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
            jax.config.update("jax_compilation_cache_dir", address)
            compilation_cache.reset_cache()  # JAX reads the setting once
    address = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if address and not storage.in_bucket(storage.absolute(address)):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _own_cache() -> Path | str:
    """Makes and returns the user's folder of compiled programs; "" if the user has no home, or cannot write there."""
    try:
        (folder := storage.files.cache_folder() / "compiled").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ""
    return folder if os.access(folder, os.W_OK) else ""


def open_run(config: ConfigDict, folder: storage.Folder) -> None:
    """Makes or reopens the folder of a run and writes `config.json` and `versions.json` into it. One process calls it.
    An earlier run of the name is moved to `replaced`, beside the runs, if `run.overwrite` is set, or if the earlier run
    has another config and never took a step. Other files in the folder stay. Raises ValueError if a folder to move is
    not known to be a run. Raises ValueError without `run.overwrite` if a run that took a step has another config: the
    message has the fields that differ."""
    folder.fetch()
    resolved, file = as_json(config), folder.files / "config.json"
    found = file.exists() or (folder.home / "checkpoints").exists()
    others = "" if config.run.overwrite or not file.exists() else differing(read_if_there(file), resolved)
    if found and (config.run.overwrite or (others and not _stepped(folder))):
        if read_if_there(folder.files / "versions.json").get("program") != PROGRAM:
            raise ValueError(
                f"{folder.home} does not say that it is a run of this program (versions.json), so it is not replaced: "
                "move it away yourself, or give this run another --config.run.name"
            )
        print(f"the run of this name {'' if config.run.overwrite else 'took no step; it '}is now {folder.set_aside()}")
    elif others:
        raise ValueError(
            f"{folder.home} holds a run with another config: {others}. Give this one another --config.run.name (with "
            "--config.run.start_from it goes on where that run stands), or start over with --config.run.overwrite=True"
        )
    folder.files.mkdir(parents=True, exist_ok=True)
    made, changed = versions_with_history(folder.files / "versions.json", made_with())
    if changed:
        print(f"not as at the last start of {config.run.name}: {changed}", file=sys.stderr)
    for name, value in {"versions.json": made, "config.json": resolved}.items():
        content = to_json(value, indent=2, sort_keys=True) + "\n"
        storage.write_atomically(folder.files / name, content)
    folder.push()


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A text of the fields by which two configs, as config.json has them, make different runs, with both values; "" if
    they make one run. `old` may be of an earlier version."""
    old, new = renewed(flat(finite(old))), flat(new)
    gone = {row.name: row for row in config_files.all_retired() if row.value is None}
    ignored = {name for name, row in gone.items() if row.fixed is None or row.fixed == old.get(name)}
    ignored |= {name for name in _AS_BEFORE if not (old.get(name) or new.get(name))}
    names = sorted(name for name in {*old, *new} - ignored if not _may_change(name))
    now = {name: gone[name].line if name in gone else f"now {new.get(name)!r}" for name in names}
    return "; ".join(f"{k} was {old.get(k)!r}, {now[k]}" for k in names if old.get(k) != new.get(k))


def _may_change(name: str) -> bool:
    return name.startswith(_MAY_CHANGE) and name != START_FROM


def _stepped(folder: storage.Folder) -> bool:
    """Whether the run has taken a step: it has a checkpoint, whole or not, or the metrics of a step."""
    checkpoints = folder.home / "checkpoints"
    kept = checkpoints.exists() and any(path.name[:1].isdigit() for path in checkpoints.iterdir())
    return kept or bool(Run.read(folder.files).trained)


def checkpoint_step(folder: storage.Folder, step: int | None) -> int:
    """Returns `step`, or for None the step of the last checkpoint. Raises ValueError if there is no such checkpoint."""
    if not (kept := committed_steps(storage.absolute(folder.home / "checkpoints"))):
        every = read_config(folder.files).checkpoint.every
        raise ValueError(
            f"{folder.home} has no checkpoint yet; there is one after each {every} steps and after the last"
        )
    if step not in (None, *kept):
        raise ValueError(f"{folder.home} does not have the checkpoint of step {step}; it keeps steps {kept}")
    return kept[-1] if step is None else step


def read_config(path: Path) -> ConfigDict:
    """The resolved config of the run in the local folder `path`, not locked. Retired values have become their
    successors. A field that did not exist when the run began has its default, if the default leaves a run as it was
    without the field. `run.accept_changes` is False. Raises ValueError if there is no config, or if it lacks another
    field of today, or has a value that is not allowed."""
    file = path / "config.json"
    if not file.exists():
        beside = path.parent.glob("*/versions.json") if path.parent.is_dir() else ()  # a model has none
        runs = [str(p.parent) for p in beside if p.with_name("config.json").exists()]
        near = ", ".join(difflib.get_close_matches(str(path), runs, n=5, cutoff=0)) or "none"
        raise ValueError(f"{path} is not a run folder (it has no config.json); the nearest runs beside it: {near}")
    known = renewed(flat(read_if_there(file)))
    if "model_type" in known:
        raise ValueError(f"{path} is a model and no run: evaluate takes it as --folder, sample and serve as --model")
    if other := [name for name, _ in config_files.declared().sections() if name in known]:
        raise ValueError(f"{other[0]} is a section of the config, and not {known[other[0]]!r:.60}")
    for name, field in config_files.fields().items():
        if name.startswith(AROUND) or name in _AS_BEFORE:
            known.setdefault(name, None if isinstance(field.default, Unset) else field.default)
    if missing := [name for name in config_files.fields() if name not in known]:
        raise ValueError(
            f"{file} was written by an older version, which did not have {', '.join(missing)}. Add what that version "
            "did by these names (configs/base.py has their defaults), or check out the commit in versions.json"
        )
    kept: dict[str, Any] = {}  # fields that no version has had are left out
    for name, field in config_files.fields().items():
        value = float(known[name]) if field.kind is float and known[name] in ("inf", "-inf") else known[name]
        field.check_stored(name, value, file)
        kept[name] = value
    kept["run.accept_changes"] = False  # the word of a command
    return ConfigDict(traverse_util.unflatten_dict(kept, sep="."))


def renewed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An older run's fields, {dotted name: value}, as a run of today has them: retired values have become their
    successors, and fields that moved into a JSON field stand there."""
    found = dict(fields)
    for row in config_files.all_retired():
        if row.value is not None and found.get(row.name) == row.value:
            found[row.name] = row.successor
        if row.into is not None and (value := found.pop(row.name, None)) is not None:
            known = json_object(row.into, found.get(row.into) or "{}", "{}")
            found[row.into] = json.dumps(known | {row.name.rpartition(".")[2]: value}, sort_keys=True)
    return found


def as_json(config: ConfigDict) -> dict[str, Any]:
    """The config as config.json and trackers hold it: nested dicts, in which an infinite number is a text, "inf"."""
    return finite(json.loads(config.to_json_best_effort()))


def identity(config: ConfigDict) -> dict[str, Any]:
    """The fields that decide the numbers of a run, {dotted name: value}. A run resumes only with equal fields."""
    found = {name: value for name, value in flat_fields(config).items() if not _may_change(name)}
    return {name: value for name, value in found.items() if name not in _AS_BEFORE or value}


def flat_fields(config: ConfigDict) -> dict[str, Any]:
    """Every field of a config as {dotted name: value}; an infinite number is a text."""
    return flat(as_json(config))


def made_with() -> dict[str, Any]:
    """The record of this start for versions.json, by name: program, commit, uncommitted_changes (a bool), python,
    packages ({name: version} of JAX and a few more), platform, devices ("8 x KIND") and command. Starts JAX's devices.
    """
    there, status = installed_packages(), _git("status", "--porcelain", "-uall").splitlines()
    return {
        "program": PROGRAM,
        "commit": _git("rev-parse", "HEAD") or os.environ.get("RPG_COMMIT", ""),
        "uncommitted_changes": any(line[:2] != "??" or line.rstrip('"').endswith(".py") for line in status),
        "python": platform.python_version(),
        "packages": {name: there.get(normalised(name), "") for name in _PACKAGES},
        "platform": jax.default_backend(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "command": sys.argv,
    }


@functools.cache  # every package's file is read and parsed: 0.1 s
def installed_packages() -> dict[str, str]:
    """{normalised name: version} of every package that this Python finds, the first of each name. Leaves out what an
    interrupted installation left: a package without a name or a version."""
    found = [d.metadata for d in importlib.metadata.distributions()]
    there = {normalised(m["Name"]): m["Version"] for m in reversed(found) if "Name" in m and "Version" in m}
    return dict(sorted(there.items()))


def lock_digest(there: Mapping[str, str], file: Path = config_files.ROOT / LOCK) -> str:
    """The text "NAME DIGEST" of `file`, a lockfile, if `there`, the installed packages, has its versions; else ""."""
    if not file.exists():
        return ""
    wanted = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text := file.read_text(encoding="utf-8"), re.MULTILINE)
    has_all = all(there.get(normalised(name)) == version for name, version in wanted)
    return f"{LOCK} {hashlib.sha256(text.encode()).hexdigest()[:12]}" if has_all else ""


def normalised(name: str) -> str:
    """A package's name as PEP 503 compares it: "Flax_NNX" becomes "flax-nnx"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions_with_history(file: Path, made_with: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(the new content of versions.json, the changes since the start before in words, "" without a change or a start
    before). `file` is the present versions.json, if there is one, and `made_with` describes this start. The content
    has `made_with`, `started` (the time now, UTC), `installed` packages and `lock`, and under `earlier` the earlier
    starts, oldest first, without `installed` if the next start had the same packages. Nothing is written. Raises
    ValueError if `file` is no JSON object."""
    there = installed_packages()
    now = {**made_with, "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    now |= {"installed": there, "lock": lock_digest(there)}
    if not file.exists():
        return now, ""
    before = read_object(file)
    earlier, installed = before.pop("earlier", []), before.get("installed", {})
    if not isinstance(earlier, list) or not isinstance(installed, dict):
        raise ValueError(f"{file} is damaged: `earlier` is no list, or `installed` no object. Copy it again")
    told = _version_differences(before, now)
    if installed == there:
        before.pop("installed", None)
    return {**now, "earlier": [*earlier, before]}, told


def _version_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two starts of a run, in words: commit, Python, devices, packages; "" for none."""
    named = {name: (before.get(name), now.get(name)) for name in ("commit", "python", "devices")}
    old, new = before.get("installed"), now["installed"]  # versions of earlier programs have no such list
    named |= {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})} if old else {}
    return ", ".join(f"{name} {was or 'none'} -> {has or 'none'}" for name, (was, has) in named.items() if was != has)


def _git(*arguments: str) -> str:
    if config_files.FOLDER.parent != config_files.ROOT:
        return ""  # installed from a wheel; a repository around it is another's
    try:
        done = subprocess.run(
            ["git", "-C", str(config_files.ROOT), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
