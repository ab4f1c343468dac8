"""Finds the files of configs/, in a checkout and in an installed wheel; loads one with overrides; declares fields."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE.parent
FOLDER = next((f for f in (_PACKAGE / "configs", ROOT / "configs") if f.is_dir()), ROOT / "configs")
"""The folder of the shipped configs: rpg_jax/configs in a wheel, configs at the top of a checkout."""
OVERRIDE = re.compile(r"--?(?:no)?config\.(?P<field>[\w.]+)")
_OF_CONFIG_FLAGS = (flags.Error, AttributeError, ImportError, KeyError, OSError, SyntaxError, TypeError, ValueError)


class Loaded(NamedTuple):
    """A locked config, the path of its file (with :VARIANT, if that was given), its overrides {dotted name: value}."""

    config: ConfigDict
    file: str
    overrides: Mapping[str, Any]


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """The config of a file, e.g. "configs/tiny.py" or "configs/x.py:variant", with its `overrides`.

    Args:
      name: a path from the current folder, or a shipped config, with or without "configs/" and ".py".
      overrides: arguments as --config.FIELD=VALUE.

    Raises ValueError if there is no such file, variant or field, if a value has another type, or for an argument that
    is no override. Choices and ranges are not checked. The file is executed: its ImportError, KeyError, SyntaxError or
    another of `_OF_CONFIG_FLAGS` becomes a ValueError; another error, such as a NameError, is raised as it is."""
    file, colon, variant = name.partition(":")
    _make_importable()
    argv = ["", f"--config={find(file)}{colon}{variant}", *overrides]
    values = flags.FlagValues()
    sys.modules.pop("config_config", None)  # config_flags would run this file in the module of the file before
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)[1:]
        config = values.config
        config.is_locked  # noqa: B018 - a file that could not be read raises here
    except _OF_CONFIG_FLAGS as error:
        raise ValueError(_explained(error, overrides, file)) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; overrides look like --config.seed=1")
    flag = values["config"]
    return Loaded(config, config_flags.get_config_filename(flag), config_flags.get_override_values(flag))


def changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """A locked copy of `config` with `changes`, {dotted name: value}. References to changed fields change too.

    Raises ValueError if there is no such field, or a value has another type. None fits every type."""
    known, changing = fields(), copy.deepcopy(config)  # `ConfigDict(config)` would share its unset fields
    for name, value in changes.items():
        if name not in known:
            was = retired(name)
            raise ValueError(was.line if was else f"no config field {name!r}; did you mean {nearest(name)}?")
        if isinstance(value, bool) and known[name].kind in (int, float):
            raise ValueError(f"{name}={value} must be a number")
        try:
            changing.update_from_flattened_dict({name: value})
        except (TypeError, KeyError, AttributeError) as error:
            as_json = f", as {json.dumps(value, default=str)!r}" if isinstance(value, Mapping) else ""
            raise ValueError(f"{name}={value!r} must be of the type {known[name].kind.__name__}{as_json}") from error
    return changing.lock()


def find(name: str) -> Path:
    """The file of the config `name`, which is as in `load`, without a variant. Raises ValueError if there is none."""
    for path in (Path(name), FOLDER.parent / name, FOLDER / name, FOLDER / f"{name}.py"):
        if path.is_file():
            return path
    close = difflib.get_close_matches(f"configs/{Path(name).stem}.py", shipped(), n=1, cutoff=0.9)
    nearest = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(shipped())}"
    raise ValueError(f"no config file {name!r}{nearest}")


def shipped() -> list[str]:
    """The configs that come with the package, sorted, as --config takes them: "configs/tiny.py"."""
    return sorted(f"configs/{path.name}" for path in FOLDER.glob("*.py") if path.stem not in ("base", "__init__"))


def declared() -> Section:
    """The declaration of every config field: the section `FIELDS` of configs/base.py, which is imported."""
    _make_importable()
    return importlib.import_module("configs.base").FIELDS


def fields() -> dict[str, Field]:
    """Every config field by its dotted name, as {"train.steps": Field(…)}, in the order of configs/base.py."""
    return dict(declared().fields())


def retired(name: str, value: Any = None) -> Retired | None:
    """The row that retires the field `name`, or its value `value` (None: no value); None if neither is retired."""
    return next((row for row in all_retired() if row.concerns(name, value)), None)


def all_retired() -> Sequence[Retired]:
    """A row for every field and every value of earlier versions that is retired: `RETIRED` of configs/base.py."""
    declared()
    return sys.modules["configs.base"].RETIRED


def unread(config: ConfigDict, names: Iterable[str]) -> Iterator[str]:
    """A line on each field of `names` that a run of `config` does not read, as `READ_WITH` of configs/base.py declares.
    A field that is None counts as read. Call `resolve.with_method` before."""
    declared()
    for name in names:
        needed = {} if config[name] is None else sys.modules["configs.base"].READ_WITH.get(name, {})
        if needed and not any(re.search(words or "^$", str(config[one] or "")) for one, words in needed.items()):
            readers = " or ".join(f"{other}={words or None}".replace("=.", "=…") for other, words in needed.items())
            yield f"{name}={config[name]} has no effect here: only a run with {readers} reads it"


def nearest(name: str) -> str:
    """The field that a wrong name means, found by initials (`lr`), by the last part of the name, or by its letters.

    It is never "". For a name without a section it may list several, as "a.learning_rate or b.learning_rate"."""
    known, last = fields(), name.rpartition(".")[2]

    def initials(field: str) -> str:
        return "".join(word[0] for word in field.rpartition(".")[2].split("_"))

    meant = [field for field in known if last in (initials(field), field.rpartition(".")[2]) and "_" in field]
    if meant and name == last:
        return " or ".join(meant)
    return difflib.get_close_matches(name, meant or known, n=1, cutoff=0.0)[0]


def _make_importable() -> None:
    """Lets config files import each other as `configs.x`: shipped files, and files of ./configs."""
    package = types.ModuleType("configs")
    package.__path__ = [str(FOLDER), str(Path("configs").resolve())]
    sys.modules.setdefault("configs", package)


def _explained(error: Exception, overrides: Sequence[str], file: str) -> str:
    """A line that explains `error` of config_flags. For an unknown field in `overrides` it names the nearest field."""
    known = fields()
    for argument in overrides if isinstance(error, KeyError | AttributeError | flags.Error) else ():
        if (match := OVERRIDE.match(argument)) and (name := match["field"]) not in known:
            if was := retired(name):
                return was.line
            own = ", or a key of loss.arguments" if name.startswith("loss.") else ""
            return f"no config field {name!r}; did you mean {nearest(name)}{own}? --help lists all of them"
    if isinstance(error, flags.UnrecognizedFlagError):
        return f"unknown flag --{error.flagname}: only fields go here, as --config.task.train=FILE"
    section = str(error).strip("'\"") + "."  # the file sets a field of this section
    if was := next((row for row in all_retired() if row.name.startswith(section)), None):
        return was.line
    flag, inside, trace = str(error).partition(": Error whilst parsing config file:")
    if inside:
        file, _, variant = flag.removeprefix("flag --config=").partition(":")
        reason = trace.strip().splitlines()[-1].partition(": ")[2]
        none = "get_config() takes 0 positional arguments" in reason
        return f"{file}: " + (f"it has no variants, leave out ':{variant}'" if none else reason)
    text = str(error).replace("module 'config_config' has no", "it is no config file: it has no")
    text = text.replace("object has no attribute 'is_locked'", "is what get_config() returned, and no config")
    text = re.sub(r'(?s).Key "(.*?)" does not.*', lambda m: f"no field {m[1]!r}; did you mean {nearest(m[1])}?", text)
    if isinstance(error, AttributeError | ImportError | KeyError | SyntaxError):
        text = f"{file}: {'no ' * isinstance(error, KeyError)}{text}"
    text = " ".join(text.split()).replace("invalid literal for int() with base 10", "no whole number")
    return re.sub(r"\('Non-boolean argument to boolean flag', (.*)\)", r"neither True nor False: \1", text)


@dataclasses.dataclass(frozen=True)
class Unset:
    """The default of a field that has no value yet, only the type `kind`.

    `optional(kind)`: the field is off, or derived from others. `from_method(kind)` sets `by_method`: `resolve` takes
    the value from the row of `rpg_jax.losses.METHODS` that `config.method` names."""

    kind: type
    by_method: bool = False


optional = functools.partial(Unset, by_method=False)
from_method = functools.partial(Unset, by_method=True)


def _one_of(names: Sequence[str]) -> str:
    return "One of " + ", ".join(name or '""' for name in names) + "."


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of one config field.

    Attributes:
      default: the value, or an `Unset`.
      meaning: what the field does, in sentences.
      unit: the unit of the value, e.g. "seconds".
      choices: the values that the field takes, or "module:TABLE,TABLE", whose keys they are. Empty: any.
      range: the interval of the value, as "[0, 1)" or "(0, inf]". Every number field has a range, and NaN is in none.
    """

    default: Any
    meaning: str
    unit: str = ""
    choices: Sequence[str] | str = ()
    range: str = ""

    @property
    def value(self) -> Any:
        """The value in a new config: the default, or a placeholder of its type, which reads as None."""
        return placeholder(self.default.kind) if isinstance(self.default, Unset) else self.default

    @property
    def kind(self) -> type:
        """The type of the field's values, such as int, also where the default is unset."""
        return self.default.kind if isinstance(self.default, Unset) else type(self.default)

    @property
    def initial(self) -> str:
        """The default as --help shows it: the value, or "unset" or "method" with the type, as "unset (int)"."""
        if isinstance(self.default, Unset):
            return f"{'method' if self.default.by_method else 'unset'} ({self.default.kind.__name__})"
        text = json.dumps(self.default) if isinstance(self.default, str) else repr(self.default)
        return text.replace("e-0", "e-") if isinstance(self.default, float) else text

    @property
    def names(self) -> list[str]:
        """The choices; [] for a field without choices. The table of the choices is imported, and maybe JAX with it."""
        if not isinstance(self.choices, str):
            return list(self.choices)
        module, _, tables = self.choices.partition(":")
        return [name for t in tables.split(",") for name in getattr(importlib.import_module(module), t)]

    @property
    def values(self) -> str:
        """The choices, "One of a, b.", or the range, "In [0, 1)."; "" if the field takes every value of its type."""
        names = table_names().get(self.choices) if isinstance(self.choices, str) else self.choices
        names = self.names if names is None else names
        return _one_of(names) if names else f"In {self.range}." if self.range else ""

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if `value` is no choice, is outside the range, or is None though the default is a value.

        The message names the field by `name`, its dotted name. The type of `value` is not checked."""
        names = self.names
        if value is None and not isinstance(self.default, Unset):
            raise ValueError(f"{name}=None: the field is always set; its default is {self.initial}")
        if names and value not in names and value is not None:
            close = difflib.get_close_matches(str(value), names, n=1)
            nearest = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{name}={value!r}: {nearest}{_one_of(names)}")
        if self.range and value is not None:
            from rpg_jax.losses.declaration import Range  # it loads JAX: --help need not wait for it

            if not Range(self.range).holds(value):
                hint = "; for never, a number above train.steps" if name.endswith(".every") else ""
                raise ValueError(f"{name}={value!r} must be in {self.range}{hint}")

    def check_stored(self, name: str, value: Any, file: Path) -> None:
        """Raises ValueError if `value`, which a run's config `file` has for the field `name`, cannot be a value of it.

        A wrong value has another type, is outside the range, or is no choice. Choices from a table are not checked: the
        table does not have the user's own functions. None is right where the default is unset."""
        kinds = (self.kind, int) if self.kind is float else (self.kind,)
        if value is None and isinstance(self.default, Unset):
            return
        if type(value) not in kinds:
            raise ValueError(f"{file}: {name}={value!r:.60} must be of the type {self.kind.__name__}")
        if not isinstance(self.choices, str):  # a table does not have the user's own functions
            self.check(name, value)

    @property
    def text(self) -> str:
        """The meaning, and after it the values that the field takes, as --help shows both."""
        return f"{self.meaning} {self.values}".rstrip()


@functools.cache
def table_names() -> dict[str, list[str]]:
    """{"module:TABLE": names} of each table of choices, from a file, so that --help need not import JAX."""
    return json.loads((FOLDER / "choices.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Retired:
    """A field of earlier versions, or one value of a field. Its use is an error that names the replacement.

    Attributes:
      name: the dotted name of the field.
      since: the date of the change, YYYY-MM-DD.
      instead: what to write now.
      value: the only value that is retired; None for the whole field.
      successor: the value that replaces the retired value in the config of an older run.
      fixed: the field decided what a run computes, and now always has this value. An older run with another value is
        refused. Without `fixed` an older run goes on, whatever the field was.
      into: the JSON field that now holds this field's value, as {"NAME": value}, if the value is not None.
    """

    name: str
    since: str
    instead: str
    value: Any = None
    successor: Any = None
    fixed: Any = None
    into: str | None = None

    @property
    def line(self) -> str:
        """The line of an error: what is retired, since when, and what to write instead."""
        value = "" if self.value is None else f"={self.value}"
        return f"{self.name}{value} is retired since {self.since}: {self.instead}"

    def concerns(self, name: str, value: Any = None) -> bool:
        """Whether this row retires the field `name` as a whole, or its value `value`."""
        return name == self.name and self.value in (None, value)


class Section:
    """A part of a config: `entries` are its fields and sections by name. `meaning` says what they have in common."""

    def __init__(self, meaning: str = "", **entries: Field | Section):
        self.meaning, self.entries = meaning, entries

    def sections(self, name: str = "") -> Iterator[tuple[str, Section]]:
        """(dotted name, section) of this section, called `name`, and of every section inside it, outer before inner."""
        yield name, self
        for key, entry in self.entries.items():
            if isinstance(entry, Section):
                yield from entry.sections(f"{name}.{key}".lstrip("."))

    def fields(self) -> Iterator[tuple[str, Field]]:
        """(dotted name, field) of every field in this section and the sections inside it."""
        for name, section in self.sections():
            for key, entry in section.entries.items():
                if isinstance(entry, Field):
                    yield f"{name}.{key}".lstrip("."), entry

    def make_config(self) -> ConfigDict:
        """A config, not locked, with every field of the section at its default. Unset fields read as None."""
        return ConfigDict({k: e.make_config() if isinstance(e, Section) else e.value for k, e in self.entries.items()})
