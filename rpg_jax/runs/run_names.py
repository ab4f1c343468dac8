"""Names runs by what differs: `small-GRPO-lr3e-4-seed1` is configs/small.py, GRPO, a learning rate of 3e-4, seed 1."""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from rpg_jax.report.run_files import flat
from rpg_jax.runs import config_files, resolve

SHORT = {
    "optimizer.learning_rate": "lr",
    "optimizer.name": "optimizer",
    "loss.kl_coef": "beta",
    "reference.rule": "reference",
    "rollout.group_size": "group",
    "rollout.max_tokens": "tokens",
    "train.updates_per_step": "updates",
    "train.steps": "steps",
}
LONGEST = 120  # characters of the settings in a name; the longest file name has 255
TAKEN = ("replaced", "warm_starts", "compilation_cache", "rows")  # folders of this program beside the runs


def check(name: str) -> None:
    """Raises ValueError if `name` cannot be a run's name, which is one component of a path, local or in a bucket."""
    reasons = {
        "it is empty": not name,
        "it begins with a dot": name.startswith("."),
        "it is the folder of this program": name in TAKEN,
        "it has more than 200 bytes": len(name.encode(errors="replace")) > 200,
    }
    if strange := sorted({c for c in name if c in "/\\*?[]#" or not c.isprintable()}):
        reasons[f"it has {', '.join(map(repr, strange))}"] = True
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"run.name={name!r} cannot be the name of a folder in run.dir: {found[0]}. Give --config.run.name another"
        )


def option(field: str, value: object) -> str:
    """The argument that sets a config field, as "--config.seed=1"."""
    return f"--config.{field}={value}"


def field_of(override: str) -> str:
    """The dotted name of the field that an argument sets: "seed" for "--config.seed=1". Other texts stay."""
    match = config_files.OVERRIDE.match(override)
    return match["field"] if match else override


def short(field: str) -> str:
    """A field's short name: the name in `SHORT`, else its last part, or the whole name if fields share this part."""
    last = field.rpartition(".")[2]
    shared = _last_parts()[last] > 1 or last in SHORT.values()
    return SHORT.get(field) or (field if shared else last)


def shown(value: object) -> str:
    """The text of a value in the names of runs and rows: "3e-4", "0.02", "True", "fixed"."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        first, rest = str(digits[0]), "".join(map(str, digits[1:]))
        return f"{'-' * sign}{first}{'.' * bool(rest)}{rest}e{int(exponent) + len(rest)}"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def settings(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Every field of a run, {dotted name: value}, after the config file, the overrides ("--config.seed=1") and the
    method's row. Raises ValueError if there is no such file, field or method, or a value has another type."""
    loaded = config_files.load(config, overrides)
    return flat(json.loads(resolve.with_method(loaded.config).to_json_best_effort()))


@functools.cache
def run_name(config: str, overrides: tuple[str, ...]) -> str:
    """The name of a run: config file, method, and the overrides that change a field. The caller leaves the seed out of
    `overrides`, and adds it to the name. An override that repeats the value of the method or the file is left out. So
    two runs of one config file share a name only if they are equal. The errors are those of `settings`."""
    full, kept = settings(config, overrides), list(dict.fromkeys(overrides))
    for override in overrides:
        fewer = [other for other in kept if other != override]
        if field_of(override) != "method" and settings(config, fewer) == full:
            kept = fewer
    fields = {field_of(override) for override in kept} - {"method"}
    return "-".join([file_part(config), str(full["method"]), *values_part({field: full[field] for field in fields})])


def file_part(config: str) -> str:
    """The part of a run's name that states the config file: "x", and "x-tiny" for "configs/x.py:tiny"."""
    file, _, variant = config.partition(":")
    return f"{Path(file).stem}-{variant}".removesuffix("-")


def values_part(values: Mapping[str, object]) -> list[str]:
    """[the part of a run's name that states {dotted field: value}], as ["beta0.1-lr3e-4"]; [] without a field."""
    fields = sorted(values, key=lambda field: (field not in SHORT, field))
    return [_safe("-".join(_part(field, values[field]) for field in fields))] if fields else []


def label(values: Mapping[str, object]) -> str:
    """The text of {dotted field: value} in the name of a row, in the order given: "lr 3e-4, beta 0.1"."""
    return ", ".join(f"{short(field)} {shown(value)}" for field, value in values.items())


def _part(field: str, value: object) -> str:
    between = "" if isinstance(value, int | float) and not isinstance(value, bool) else "="
    return f"{short(field)}{between}{shown(value)}"


def _safe(text: str) -> str:
    """The text as a part of a file name. A hash is added where characters were replaced or cut off."""
    safe = re.sub(r"[^\w.+=-]", "_", text, flags=re.ASCII)[:LONGEST]
    return safe if safe == text else f"{safe}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@functools.cache
def _last_parts() -> Counter[str]:
    return Counter(field.rpartition(".")[2] for field in config_files.fields())
