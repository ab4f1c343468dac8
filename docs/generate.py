"""Writes what is made from the code: docs/configuration.md, the tables of docs/methods.md, configs/choices.json.

python -m docs.generate
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax import losses
from rpg_jax.report.tables import markdown_table as table
from rpg_jax.runs import cli, config_files
from rpg_jax.runs.config_files import Field, Section, Unset
from rpg_jax.storage import write_atomically
from rpg_jax.training.reference import RULES

_FOLDER = config_files.ROOT / "docs"
_CONFIGURATION = """# Configuration

<!-- written by python -m docs.generate from configs/base.py; change it there -->

Set a field with `--config.NAME=VALUE` on any command that takes `--config`. An experiment's file in `configs/` states
only its differences from these defaults. *method*: the row of [methods.md](methods.md) that `config.method` names sets
the field. *unset*: the field is off, or derived as its text says; the type of its values is in brackets. No flag takes
back what a file has set: a file of your own does, `c.rewards.right_above = None`, or Python, by `overrides` with None.
"""
_TABLE = re.compile(r"(?s)(<!-- table: ([a-z ]+) -->\n\n).*?(\n\n<!-- end of table -->)")

# The symbols of the hyperparameters that the column "clip" shows.
_SHOWN = {"clip": "", "clip_low": "ε₁ ", "clip_high": "ε₂ ", "clip_dual": "c "}
_SHOWN |= {"width_low": "a ", "width_high": "b ", "width_dual": "c ", "trust_region": "δ "}
_SHOWN |= {"mask_threshold": "δ ", "tau_positive": "τ₊ ", "tau_negative": "τ₋ ", "sampler_correction": "sampler: "}

_COLUMNS = ("method", "loss of a token", "advantage", "aggregate", "clip", "β", "reference", "dynamic sampling")
_MORE = ("overlong shaping", "learning rate", "source")


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("docs", __doc__)
    parser.prog = "python -m docs.generate"
    parser.add_argument("--out", type=Path, default=config_files.ROOT, help="folder to write (default: the checkout)")
    return cli.run(write, parser, argv)


def write(options: argparse.Namespace) -> None:
    """Writes every file."""
    for name, content in FILES.items():
        (options.out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / name, content())
        config_files.table_names.cache_clear()


def choices_file() -> str:
    """choices.json: the names in every table of choices, in the order of the table."""
    fields = config_files.fields().values()
    return json.dumps({f.choices: f.names for f in fields if isinstance(f.choices, str)}, indent=1) + "\n"


def methods_page() -> str:
    """methods.md with the tables of today: every row of `losses.METHODS`, and the equations of its names."""
    made = {
        "methods": table((*_COLUMNS, *_MORE), map(_row, losses.METHODS.items())),
        "references": table(("name", "policy"), ((f"`{name}`", rule.meaning) for name, rule in RULES.items())),
        "divergences": table(
            ("name", "divergence", "$d$", "$K = \\partial d / \\partial \\log w$"),
            (
                (f"`{name}`", f"${d.objective}$", f"${d.value}$", f"${d.weight}$")
                for name, d in losses.DIVERGENCES.items()
            ),
        ),
        "advantages": _equations({**losses.ADVANTAGES, **losses.LEARNED_ADVANTAGES}),
        "aggregates": _equations(losses.AGGREGATES),
        "sampler corrections": _equations(losses.SAMPLER_CORRECTIONS),
    }
    page = (_FOLDER / "methods.md").read_text(encoding="utf-8")
    if (places := [name for _, name, _ in _TABLE.findall(page)]) != [*made]:
        raise ValueError(
            f"docs/methods.md has places for the tables {places}, and there are {[*made]}: mark each place"
        )
    return _TABLE.sub(lambda old: old[1] + made[old[2]] + old[3], page)


def configuration_page() -> str:
    """configuration.md: every config field with its default, its unit and its meaning."""
    sections = config_files.declared().sections()
    return "\n\n".join([_CONFIGURATION.strip(), *(_section(name, section) for name, section in sections)]) + "\n"


FILES: Mapping[str, Callable[[], str]] = {
    "configs/choices.json": choices_file,
    "docs/methods.md": methods_page,
    "docs/configuration.md": configuration_page,
}
"""The functions that make a file, by its path in the checkout."""


def _row(named: tuple[str, losses.Method]) -> tuple[str, ...]:
    name, method = named
    loss = losses.LOSSES[method.loss].latex(**method.hyperparameters)
    kl_coef = method.hyperparameters.get("kl_coef")
    names = (f"`{name}`", f"${loss}$", f"`{method.advantage}`", f"`{method.aggregate}`", _clip(method))
    beta = "–" if kl_coef is None else f"{kl_coef:g}"
    switches = ("yes" if on else "no" for on in (method.dynamic_sampling, method.overlong_shaping))
    rate = f"{method.learning_rate:g}".replace("e-0", "e-")
    return *names, beta, f"`{method.reference}`", *switches, rate, method.source


def _clip(method: losses.Method) -> str:
    """The clip range, for example "dual, ε₁ 0.2, ε₂ 0.28, c 10"."""
    values, words = method.hyperparameters, []
    for key, symbol in _SHOWN.items():
        if key in values:
            words.append(f"{symbol}{values[key]:{'' if isinstance(values[key], str) else 'g'}}")
    return ", ".join(words)


def _equations(rows: Mapping[str, Any]) -> str:
    return table(("name", "formula"), ((f"`{name}`", f"${row.equation}$") for name, row in rows.items()))


def _section(name: str, section: Section) -> str:
    rows = [
        (f"`{name}.{key}`" if name else f"`{key}`", _default(field), field.unit, field.text)
        for key, field in section.entries.items()
        if isinstance(field, Field)
    ]
    title = f"`{name}`" if name else "The run"
    return f"## {title}\n\n{section.meaning}\n\n{table(('field', 'default', 'unit', 'meaning'), rows)}"


def _default(field: Field) -> str:
    if isinstance(field.default, Unset):
        word, _, kind = field.initial.partition(" ")
        return f"*{word}* {kind}"
    return f"`{field.initial}`"


if __name__ == "__main__":
    sys.exit(main())
