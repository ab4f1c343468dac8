"""versions.json of a run: what each start was made with, compared with the start before it."""

import datetime
import hashlib
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpg_jax.runs import config_files
from rpg_jax.storage.json_files import read_object

LOCK = "requirements-tpu.lock"  # every package of a TPU worker with its version and its hash


def installed() -> dict[str, str]:
    """The version of every package of this Python, by its normalised name."""
    found = ((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
    return {normalised(name): version for name, version in sorted(found) if name}


def lock(there: Mapping[str, str], file: Path = config_files.ROOT / LOCK) -> str:
    """The digest of the lockfile, where this Python has every package as it is locked; "" elsewhere."""
    if not file.exists():
        return ""
    wanted = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text := file.read_text(), re.MULTILINE)
    has_all = all(there.get(normalised(name)) == version for name, version in wanted)
    return f"{LOCK} {hashlib.sha256(text.encode()).hexdigest()[:12]}" if has_all else ""


def normalised(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_history(file: Path, made_with: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The new content of versions.json, and in words what has changed since the start before; "" for a first start.

    The content is this start's, with the earlier ones under `earlier`, oldest first. An earlier start that had the same
    packages as the one after it is kept without its list.
    """
    there = installed()
    now = {**made_with, "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    now |= {"installed": there, "lock": lock(there)}
    if not file.exists():
        return now, ""
    before = read_object(file)
    earlier = before.pop("earlier", [])
    told = difference(before, now)
    if before.get("installed") == there:
        before.pop("installed", None)
    return {**now, "earlier": [*earlier, before]}, told


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two starts of a run: commit, Python, devices, packages; "" if nothing does."""
    named = {name: (before.get(name), now.get(name)) for name in ("commit", "python", "devices")}
    old, new = (each.get("installed") or each.get("packages") or {} for each in (before, now))
    named |= {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})} if before.get("installed") else {}
    changed = [f"{name} {was or 'none'} -> {has or 'none'}" for name, (was, has) in named.items() if was != has]
    return ", ".join(changed)
