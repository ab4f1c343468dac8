"""Finds the files of configs/, in a checkout and in an installed wheel, and loads one with overrides."""

import difflib
import importlib
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from rpg_jax.runs.fields import Field, Retired, Section

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE.parent
FOLDER = next((f for f in (_PACKAGE / "configs", ROOT / "configs") if f.is_dir()), ROOT / "configs")
"""The folder of the shipped configs: rpg_jax/configs in a wheel, configs at the top of a checkout."""
OVERRIDE = re.compile(r"--?(?:no)?config\.(?P<field>[\w.]+)")
_ERRORS = (flags.Error, KeyError, AttributeError, OSError, TypeError, ValueError)  # what config_flags raises


class Loaded(NamedTuple):
    """A locked config, its file, and its overrides by dotted field."""

    config: ConfigDict
    file: str
    overrides: Mapping[str, Any]


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """The config of a file, e.g. "configs/tiny.py" or "configs/x.py:variant".

    Args:
      name: a path from the current folder, or a shipped config, with or without "configs/" and ".py".
      overrides: arguments as --config.FIELD=VALUE.

    Raises:
      ValueError: there is no such file, variant or field, or a value has another type.
    """
    file, colon, variant = name.partition(":")
    _make_importable()
    argv = ["", f"--config={find(file)}{colon}{variant}", *overrides]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)[1:]
        config = values.config
        config.is_locked  # noqa: B018 - a file that could not be read raises here
    except _ERRORS as error:
        raise ValueError(_explained(error, overrides)) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; overrides look like --config.seed=1")
    flag = values["config"]
    return Loaded(config, config_flags.get_config_filename(flag), config_flags.get_override_values(flag))


def changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """A locked copy with other values of some fields, by dotted name. References to changed fields follow.

    Raises:
      ValueError: there is no such field, or a value has another type.
    """
    known, copy = fields(), ConfigDict(config)
    for name, value in changes.items():
        if name not in known:
            was = retired(name)
            raise ValueError(was.line if was else f"no config field {name!r}; did you mean {nearest(name)}?")
        try:
            copy.update_from_flattened_dict({name: value})
        except (TypeError, KeyError, AttributeError) as error:
            kind = known[name].kind.__name__
            raise ValueError(f"{name}={value!r} must be of the type {kind}: {' '.join(str(error).split())}") from error
    return copy.lock()


def find(name: str) -> Path:
    """The file of a config by its path, or by the name of a shipped config. Raises ValueError if there is none."""
    for path in (Path(name), FOLDER.parent / name, FOLDER / name, FOLDER / f"{name}.py"):
        if path.is_file():
            return path
    raise ValueError(f"no config file {name!r}; there are {', '.join(shipped())}")


def shipped() -> list[str]:
    """The experiments that come with the package, as --config takes them."""
    return sorted(f"configs/{path.name}" for path in FOLDER.glob("*.py") if path.stem not in ("base", "__init__"))


def declared() -> Section:
    """The declaration of every config field."""
    _make_importable()
    return importlib.import_module("configs.base").FIELDS


def fields() -> dict[str, Field]:
    """Every config field by its dotted name."""
    return dict(declared().fields())


def retired(name: str, value: Any = None) -> Retired | None:
    """What earlier versions had by this name, or None."""
    return next((row for row in all_retired() if row.concerns(name, value)), None)


def all_retired() -> Sequence[Retired]:
    """Every field and value of earlier versions."""
    declared()
    return sys.modules["configs.base"].RETIRED


def nearest(name: str) -> str:
    """The field that somebody means by a name that no field has, by its initials (`lr`), its last part or its letters.

    Of a name without a section it may be several.
    """
    known, last = fields(), name.rpartition(".")[2]

    def initials(field: str) -> str:
        return "".join(word[0] for word in field.rpartition(".")[2].split("_"))

    meant = [field for field in known if last in (initials(field), field.rpartition(".")[2]) and "_" in field]
    if meant and name == last:
        return " or ".join(meant)
    return difflib.get_close_matches(name, meant or known, n=1, cutoff=0.0)[0]


def _make_importable() -> None:
    """Lets config files import each other as `configs.x`: the shipped ones, and those in configs/ of this folder."""
    package = types.ModuleType("configs")
    package.__path__ = [str(FOLDER), str(Path("configs").resolve())]
    sys.modules.setdefault("configs", package)


def _explained(error: Exception, overrides: Sequence[str]) -> str:
    """One line for an error of config_flags; it names the nearest field where there is none of that name."""
    known = fields()
    for argument in overrides:
        match = OVERRIDE.match(argument)
        if match and match["field"] not in known and isinstance(error, KeyError | AttributeError | flags.Error):
            name = match["field"]
            if was := retired(name):
                return was.line
            return f"no config field {name!r}; did you mean {nearest(name)}? --help lists all of them"
    section = str(error).strip("'\"") + "."  # of a file that sets a field of it
    if was := next((row for row in all_retired() if row.name.startswith(section)), None):
        return was.line
    flag, inside, trace = str(error).partition(": Error whilst parsing config file:")
    if inside:
        file, _, variant = flag.removeprefix("flag --config=").partition(":")
        reason = trace.strip().splitlines()[-1].partition(": ")[2]
        none = "get_config() takes 0 positional arguments" in reason
        return f"{file}: " + (f"it has no variants, leave out ':{variant}'" if none else reason)
    return " ".join(str(error).split())
