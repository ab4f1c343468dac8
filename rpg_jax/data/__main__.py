"""Prepares and inspects data sets.

python -m rpg_jax.data inspect data/aime-2024.parquet
python -m rpg_jax.data inspect --config=configs/mine.py --config.task.train=mine.jsonl      (as this config reads them)
python -m rpg_jax.data inspect --config=configs/mine.py --config.task.name=module:Class     (the problems that it makes)
python -m rpg_jax.data prepare dapo-math-17k --output=data/train.parquet --against data/aime25.parquet
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from rpg_jax.data.prompts import TEMPLATES, Problem, encode_prompt, rendered
from rpg_jax.data.rows import Report
from rpg_jax.data.sources import HUB, SHARED_WORDS, decontaminate, load, write_parquet
from rpg_jax.data.tokenizer import Tokenizer
from rpg_jax.environments.stage import Stage
from rpg_jax.report import screen
from rpg_jax.runs import cli, config_files
from rpg_jax.runs.experiment import make_stage, open_tokenizer
from rpg_jax.runs.problems import Task, listed
from rpg_jax.runs.resolve import with_method

_SHOWN_BAD = 10
_SHOWN_CHARACTERS = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default the arguments of this process. Returns the exit code."""
    return cli.run(lambda options: options.run(options, screen.console()), _parser(), argv)


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Loads problems, removes those that `decontaminate` finds in the sources `options.against`, and writes the others
    to the file `options.output`, NAME.parquet. Prints counts to `console`, and skipped rows to standard error. Raises
    ValueError without sources, for another ending of the name, if no problem is left, and as `sources.load` does."""
    if not options.sources:
        raise ValueError("what to prepare? Give files or data sets")
    if not options.output.endswith(".parquet"):
        raise ValueError(f"--output={options.output}: what is written is a parquet file: name it NAME.parquet")
    problems, report = _load(options)
    for reason in report.bad:
        print(f"skipped: {reason}", file=sys.stderr)
    console.print(f"{report.rows} rows read: {len(problems)} problems, {report.repeated} repetitions merged as samples")
    console.print(f"{len(report.bad)} bad rows skipped")
    if options.against:
        problems, removed = decontaminate(problems, load(options.against)[0])
        console.print(f"{len(removed)} removed: an evaluation problem has the same words, or {SHARED_WORDS} in a row")
    write_parquet(problems, options.output)
    console.print(f"{len(problems)} problems written to {options.output}")


def inspect(options: argparse.Namespace, console: Console) -> None:
    """Prints counts by source, columns, lengths, bad rows and the first `options.examples` problems of the sources.
    With a config file, `options.config`, the config gives the sources and the template that the command line leaves
    out, or makes the problems itself, and its environment opens the problems. The output then counts tokens too, and
    prompts and demonstrations that are too long. Raises ValueError without sources, for a wrong config or overrides
    without one, for sources beside a config that makes its problems, and as `load` does."""
    seen = None
    if options.config is not None:
        seen = _read(options.config, options.overrides)
        if seen.made and (options.sources or options.template or options.source):
            own = f"--config={options.config} makes its problems itself: leave out files, --template and --source"
            raise ValueError(f"{own}, or add --config.task.name=files")
        options.sources, options.template = options.sources or seen.sources, options.template or seen.template
    elif options.overrides:
        raise ValueError(f"{options.overrides[0]} needs --config=FILE")
    with contextlib.nullcontext() if seen is None or seen.stage is None else seen.stage as stage:
        if not options.sources and not (seen and seen.made):
            raise ValueError("what to inspect? Give files or data sets, or --config=FILE")
        problems, report = (seen.made, Report(len(seen.made))) if seen and seen.made else _load(options)
        problems = problems if stage is None else stage.opened(problems)
    console.print(_counts(problems, report))
    if report.taken:
        console.print(_columns(report))
    prompts = [len(encode_prompt(p, seen.tokenizer, thinking=seen.thinking)) for p in problems] if seen else []
    console.print(_lengths(problems, prompts))
    if report.bad:
        console.print(_bad_rows(report))
    if seen is not None:
        for line in _limits(problems, prompts, seen):
            console.print(Text(line))
    for problem in problems[: options.examples]:
        console.print(_example(problem, seen))


class _Seen(NamedTuple):
    """How a config reads rows from `sources`, files or data sets, and shows them to the policy. A task that makes its
    problems itself has no sources, and its training problems are `made`. `template` None keeps the data's own prompts.
    `max_tokens` limits a demonstration. `stage` plays the environment; None: there is none."""

    sources: list[str]
    made: list[Problem]
    template: str | None
    tokenizer: Tokenizer
    thinking: bool
    max_prompt_tokens: int
    max_tokens: int
    stage: Stage | None


def _read(file: str, overrides: Sequence[str]) -> _Seen:
    """Reads the config in `file` with the flags `overrides`, as "--config.seed=1".

    Loads the problems and the demonstrations, and starts the environment, which the caller closes. If neither
    `model.tokenizer` nor `model.path` is set, a tokenizer is trained, and its file is deleted. Raises ValueError if the
    config is wrong, or the problems or the environment could not start a run."""
    config = with_method(config_files.load(file, overrides).config)
    with config.unlocked():
        config.warm_start.enabled = True  # so that the demonstrations are read as well
    reads = config.task.name == "files"
    task = Task.from_config(config, held_out=bool(config.task.held_out_sets))
    made, stage = [] if reads else task.train, make_stage(config)
    with contextlib.ExitStack() as failing:
        if stage is not None:
            task = task.opened(failing.enter_context(stage))
        tokenizer = open_tokenizer(config, task)
        failing.pop_all()  # from here on the caller closes the stage
    t, limit = config.task, config.warm_start.max_tokens or config.rollout.max_tokens
    sources = listed(f"{t.train or ''},{config.warm_start.train or ''}") if reads else []
    return _Seen(sources, made, t.template, tokenizer, t.thinking, t.max_prompt_tokens, limit, stage)


def _load(options: argparse.Namespace):
    how = {name: getattr(options, name) for name in ("bad_rows", "template", "source", "count", "seed")}
    return load(options.sources, **how)


def _counts(problems: Sequence[Problem], report: Report) -> rich.table.Table:
    title = f"{report.rows} rows: {len(problems)} problems, {report.repeated} repetitions, {len(report.bad)} bad"
    table = _table(title, "source", "problems", "samples", "samples a problem", "distinct answers")
    for source in sorted({p.source for p in problems}):
        own = [p for p in problems if p.source == source]
        samples = [p.samples for p in own]
        span = str(min(samples)) if min(samples) == max(samples) else f"{min(samples)}-{max(samples)}"
        table.add_row(source, str(len(own)), str(sum(samples)), span, str(len({p.answer for p in own})))
    return table


def _columns(report: Report) -> rich.table.Table:
    """Returns a table of the columns that were read, with their meanings, and of the columns that were ignored."""
    table = _table("columns", "read as", "column", "rows")
    for (meaning, column), rows in sorted(report.taken.items()):
        table.add_row(meaning, Text(column), str(rows))
    for column, rows in sorted(report.ignored.items()):
        table.add_row("ignored", Text(column), str(rows))
    if ("answer", "solution") in report.taken:
        table.caption = (
            "The answer is the whole text of `solution`. If that is a worked solution, name the column "
            "`demonstration`, and give the final answer as `answer`."
        )
    return table


def _limits(problems: Sequence[Problem], prompts: Sequence[int], seen: _Seen) -> Iterator[str]:
    """Yields lines: how many of the `prompts`, lengths in tokens, are too long, and how many demonstrations of rows."""
    long = sum(n > seen.max_prompt_tokens for n in prompts)
    yield f"{long} of {len(prompts)} prompts are longer than task.max_prompt_tokens={seen.max_prompt_tokens}"
    shown = [len(seen.tokenizer.encode(text)) + 1 for p in problems for text in p.demonstrations]
    cut = sum(n > seen.max_tokens for n in shown)
    if not seen.made:
        yield f"{cut} of {len(shown)} demonstrations are cut off after {seen.max_tokens} tokens (warm_start.max_tokens)"


def _lengths(problems: Sequence[Problem], prompts: Sequence[int]) -> rich.table.Table:
    lengths = {
        "prompt, characters": [len(p.prompt) for p in problems],
        "question, characters": [len(p.question) for p in problems],
        "answer, characters": [len(p.answer) for p in problems],
    }
    if shown := [len(text) for p in problems for text in p.demonstrations]:
        lengths["demonstration, characters"] = shown
    if prompts:
        lengths["prompt, tokens"] = list(prompts)
    table = _table("lengths", "", "shortest", "median", "90 %", "99 %", "longest")
    for name, values in lengths.items():
        table.add_row(name, *(f"{np.quantile(values, q, method='nearest'):.0f}" for q in (0, 0.5, 0.9, 0.99, 1)))
    return table


def _bad_rows(report: Report) -> rich.table.Table:
    table = _table(f"bad rows: {len(report.bad)}", "where and why")
    for reason in report.bad[:_SHOWN_BAD]:
        table.add_row(Text(reason))
    if len(report.bad) > _SHOWN_BAD:
        table.add_row(f"… and {len(report.bad) - _SHOWN_BAD} more")
    return table


def _example(problem: Problem, seen: _Seen | None) -> rich.table.Table:
    table = _table(f"problem {problem.prompt_id}", "field", "value")
    fields = {name: str(getattr(problem, name)) for name in ("source", "samples", "system", "prompt", "answer")}
    fields |= dict(zip(("demonstration",), problem.demonstrations, strict=False))
    if seen is not None:
        fields["the policy reads"] = rendered(problem, seen.tokenizer, thinking=seen.thinking)
        fields["tokens"] = " ".join(map(str, encode_prompt(problem, seen.tokenizer, thinking=seen.thinking)))
    for name, value in fields.items():
        cut = f" … ({len(value)} characters)" if len(value) > _SHOWN_CHARACTERS else ""
        if value:
            table.add_row(name, Text(value[:_SHOWN_CHARACTERS] + cut))  # Text: data is never read as rich's markup
    return table


def _table(title: str, *columns: str) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == "value" else "right", overflow="fold")
    return table


def _parser() -> cli.Parser:
    parser = cli.parser("data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = cli.Parser(add_help=False)
    shared.add_argument(
        "sources",
        nargs="*",
        help=f"parquet or JSONL files or folders; {', '.join(HUB)}; hf:owner/name/config/split; reasoning_gym:task",
    )
    shared.add_argument("--template", help=f"{', '.join(TEMPLATES)}, or a text with {{question}}; default: the data's")
    shared.add_argument("--source", help="overrides data_source, which decides the verifier under reward by_source")
    shared.add_argument("--count", type=cli.number(int, 1), default=1000, help="problems of a generator (default 1000)")
    shared.add_argument("--seed", type=int, default=0, help="of a generator (default %(default)s)")

    prepare_ = commands.add_parser("prepare", parents=[shared], help="convert, deduplicate, decontaminate, write")
    prepare_.set_defaults(run=prepare)
    prepare_.add_argument("--output", required=True, help="parquet file to write")
    prepare_.add_argument("--against", nargs="*", default=[], help="evaluation sets to keep out")
    prepare_.add_argument("--bad_rows", choices=["fatal", "skip"], default="fatal", help="default %(default)s")

    inspect_ = commands.add_parser("inspect", parents=[shared], help="counts, lengths, examples, problems")
    inspect_.set_defaults(run=inspect)
    inspect_.add_argument("--config", metavar="FILE", help="read, render and count as this config, with its overrides")
    inspect_.add_argument("--examples", type=cli.number(int, 0), default=2, help="to print (default %(default)s)")
    inspect_.add_argument("--bad_rows", choices=["fatal", "skip"], default="skip", help="default %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
