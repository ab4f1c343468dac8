"""Declares config fields, each once: --help, docs/configuration.md and the check of old runs read the declaration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


@dataclasses.dataclass(frozen=True)
class Unset:
    """The default of a field that has no value yet, only the type `kind`.

    `optional(kind)`: the field is off, or derived from others. `from_method(kind)`: `resolve` takes its value from the
    row of `rpg_jax.losses.METHODS` that `config.method` names.
    """

    kind: type
    by_method: bool = False


optional = functools.partial(Unset, by_method=False)
from_method = functools.partial(Unset, by_method=True)


@dataclasses.dataclass(frozen=True)
class Field:
    """One config field.

    Attributes:
      default: the value, or an `Unset`.
      meaning: what the field does, in sentences.
      unit: of the value, e.g. "seconds".
      choices: the values that the field takes, or "module:TABLE,TABLE", whose keys they are. Empty: any.
      range: the interval of the value, as "[0, 1)" or "(0, inf]"; NaN is in none. Every number has one.
    """

    default: Any
    meaning: str
    unit: str = ""
    choices: Sequence[str] | str = ()
    range: str = ""

    @property
    def value(self) -> Any:
        """What a new config holds: the default, or a placeholder of its type."""
        return placeholder(self.default.kind) if isinstance(self.default, Unset) else self.default

    @property
    def kind(self) -> type:
        """The type of the field's values."""
        return self.default.kind if isinstance(self.default, Unset) else type(self.default)

    @property
    def initial(self) -> str:
        """The default as the command line takes it, or "unset" or "method" with the type."""
        if isinstance(self.default, Unset):
            return f"{'method' if self.default.by_method else 'unset'} ({self.default.kind.__name__})"
        text = json.dumps(self.default) if isinstance(self.default, str) else repr(self.default)
        return text.replace("e-0", "e-") if isinstance(self.default, float) else text

    @property
    def names(self) -> list[str]:
        """The choices; [] where there are none."""
        if not isinstance(self.choices, str):
            return list(self.choices)
        module, _, tables = self.choices.partition(":")
        return [name for t in tables.split(",") for name in getattr(importlib.import_module(module), t)]

    @property
    def values(self) -> str:
        """The choices or the range in words; "" where the field takes every value of its type."""
        names = self.names
        return f"One of {', '.join(names)}." if names else f"In {self.range}." if self.range else ""

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if a value is none of the choices or outside the range; `name` is the field's."""
        names = self.names
        if names and value not in names and not (value is None and isinstance(self.default, Unset)):
            close = difflib.get_close_matches(str(value), names, n=1)
            nearest = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{name}={value!r}: {nearest}{self.values}")
        if self.range and value is not None:
            from rpg_jax.losses.declaration import Range  # it loads JAX: --help need not wait for it

            if not Range(self.range).holds(value):
                hint = "; for never, a number above train.steps" if name.endswith(".every") else ""
                raise ValueError(f"{name}={value!r} must be in {self.range}{hint}")

    @property
    def text(self) -> str:
        """The meaning, and what the field takes."""
        return f"{self.meaning} {self.values}".rstrip()


@dataclasses.dataclass(frozen=True)
class Retired:
    """A field of earlier versions, or one value of a field. An error of its use says what took its place.

    Attributes:
      name: the dotted name of the field.
      since: the date of the change, YYYY-MM-DD.
      instead: what to write now.
      value: the only value that is retired; None for the whole field.
      successor: in an older run this value stands for the retired one.
      decides: the field decided what a run computed. An older run that sets it is then refused, and otherwise goes on.
    """

    name: str
    since: str
    instead: str
    value: Any = None
    successor: Any = None
    decides: bool = False

    @property
    def line(self) -> str:
        """What an error says of it."""
        value = "" if self.value is None else f"={self.value}"
        return f"{self.name}{value} is retired since {self.since}: {self.instead}"

    def concerns(self, name: str, value: Any = None) -> bool:
        """Whether it is the field of that name, with that value."""
        return name == self.name and self.value in (None, value)


class Section:
    """Fields and sections of one name space, and what they have in common."""

    def __init__(self, meaning: str = "", **entries: Field | Section):
        self.meaning, self.entries = meaning, entries

    def sections(self, name: str = "") -> Iterator[tuple[str, Section]]:
        """(dotted name, section) of this section, called `name`, and of those inside it."""
        yield name, self
        for key, entry in self.entries.items():
            if isinstance(entry, Section):
                yield from entry.sections(f"{name}.{key}".lstrip("."))

    def fields(self) -> Iterator[tuple[str, Field]]:
        """(dotted name, field) of every field."""
        for name, section in self.sections():
            for key, entry in section.entries.items():
                if isinstance(entry, Field):
                    yield f"{name}.{key}".lstrip("."), entry

    def make_config(self) -> ConfigDict:
        """A config with every field at its default."""
        return ConfigDict({k: e.make_config() if isinstance(e, Section) else e.value for k, e in self.entries.items()})
