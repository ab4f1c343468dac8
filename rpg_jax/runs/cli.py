"""Runs a command: its flags, its config, one line for an error of the user, and the exit code of every error."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import difflib
import faulthandler
import gc
import json
import logging
import math
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import absl.flags
import absl.logging

from rpg_jax.report import screen
from rpg_jax.runs import config_files

if TYPE_CHECKING:
    from etils import epath

FAILED = 1
"""Exit code of every other error: of storage, of a lost peer, or a bug. A supervisor may start the command again."""
USAGE_ERROR = 2
"""Exit code of a user error. It tells a supervisor that another start would end in the same error."""
GAVE_UP = 3
"""Exit code of a run that is lost: another start would compute the same and end the same; see `ends_again`."""
FAILURES = "failures.json"
_STARTS = 3
TRUST = "import the code, and ask the judge, that the config of the run names: you know who wrote its folder"
_EXTRAS = dict.fromkeys(("aiohttp", "grpc", "prometheus_client"), "rpg_jax[serve]")
"""The extra of rpg_jax that installs an optional package, by the package's module."""


class Ended(RuntimeError):
    """Ends a command: `run` prints the message and returns the exit code `code`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def run_is_open() -> Iterator[None]:
    """Marks the part of a command in which the run is open: the config was accepted, so no error is the user's.

    A ValueError or an OSError of the block becomes `Ended`: the command ends with one line and the exit code `FAILED`,
    and the same command continues the run. Where another start cannot mend the run, raise `Ended` with `GAVE_UP`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Ended(in_words(error), FAILED) from error


class Parser(argparse.ArgumentParser):
    """The flags of a command. An error is one line. In a command with a config, --help lists the config fields."""

    def add_config(self, default: str | None = None) -> None:
        """Adds --config=FILE, by default `default` (None: no config), and --config.FIELD=VALUE, which change fields."""
        shipped = ", ".join(config_files.shipped())
        self.add_argument("--config", metavar="FILE", default=default, help=f"the experiment: {shipped}")
        self.add_argument("--config.FIELD", metavar="VALUE", help="a changed field, as --config.seed=1")

    def add_switch(self, name: str, *, help: str) -> None:
        """Adds --NAME, --NAME=BOOL, and --noNAME; the option is False by default. `help` is its line in --help."""
        self.add_argument(f"--{name}", nargs="?", const=True, default=False, type=_boolean, metavar="BOOL", help=help)
        self.add_argument(f"--no{name}", dest=name, action="store_false", help=argparse.SUPPRESS)

    def add_beside(self, help: str) -> None:
        """Adds --beside=FIELD=VALUE,FIELD=VALUE, any number of times. The option is a list of texts, for `settings`."""
        self.add_argument("--beside", metavar="FIELD=VALUE", action="append", default=[], help=help)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options in `argv`, which lacks the program's name. The option `overrides` is a list of the arguments that
        change the config, as "--config.seed=1"; [] if the command takes no config. --help prints the help and exits.

        Raises ValueError for an argument that the command does not take (the message has the nearest flag), for a wrong
        value, and for an argument that is no UTF-8."""
        if broken := [argument for argument in argv if any("\ud800" <= c <= "\udfff" for c in argument)]:
            raise ValueError(f"{broken[0]!r} is no text in UTF-8")
        if tilde := [argument for argument in argv if argument.partition("=")[2].startswith("~/")]:
            raise ValueError(f"{tilde[0]}: no shell replaces this ~, write {tilde[0].replace('=~', '=$HOME', 1)}")
        options, rest = self.parse_known_args(argv)
        if empty := [name for name, value in vars(options).items() if value == "" and name != "config"]:
            raise ValueError(f"--{empty[0]} is empty: give it a value, or leave it out")
        for place, argument in enumerate(rest):
            if "config" in options and config_files.OVERRIDE.match(argument):
                continue
            if argument.startswith("--"):
                name = argument.partition("=")[0]
                close = difflib.get_close_matches(name, self._option_string_actions, n=1)
                nearest = f"did you mean {close[0]}? " if close else ""
                raise ValueError(f"unknown flag {name}; {nearest}--help lists all flags")
            if place == 0:  # further on it may be the value of an override
                hint = "overrides look like --config.seed=1" if "config" in options else "--help lists all flags"
                raise ValueError(f"unexpected argument {argument!r}; {hint}")
        options.overrides = rest
        return options

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with `message`, where argparse would exit: `run` prints the message as one line."""
        raise ValueError(message)

    def format_help(self) -> str:
        """The help of all flags, and in a command with a config a line for every field, its default and its meaning."""
        lines = [super().format_help()]
        if "--config" in self._option_string_actions:
            lines.append("\nfields, set with --config.NAME=VALUE:\n")
            for name, field in config_files.fields().items():
                unit = f" [{field.unit}]" if field.unit else ""
                lines.append(f"  {name:<38} {field.initial:<20} {field.text}{unit}\n")
        return "".join(lines)


def settings(beside: Sequence[str]) -> dict[str, list[str]]:
    """The settings to compare, as {name: overrides}: "as given" without overrides, then each text of --beside. The text
    "a=1,b=2" adds "a=1,b=2": ["--config.a=1", "--config.b=2"]. Raises ValueError for a text of another form."""
    found: dict[str, list[str]] = {"as given": []}
    for setting in beside:
        changes = [change.strip().removeprefix("--config.") for change in setting.split(",")]
        if not all(change.partition("=")[0] and change.partition("=")[2] for change in changes):
            raise ValueError(f"--beside={setting}: write FIELD=VALUE,FIELD=VALUE, as in model.lora.rank=16")
        found[setting] = [f"--config.{change}" for change in changes]
    return found


def parser(name: str, description: str) -> Parser:
    """The parser of `python -m rpg_jax.NAME`, which is `rpg-NAME` where the package is installed.

    A `name` with a dot is the whole name of a module outside the package. `description` begins --help. The parser has
    the switch --debug."""
    script = f"rpg-{name}"
    made = Parser(
        prog=script if Path(sys.argv[0]).stem == script else f"python -m {name if '.' in name else f'rpg_jax.{name}'}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_switch("debug", help="show the traceback of user errors too")
    return made


def run(
    command: Callable[[argparse.Namespace], int | None],
    parser: Parser,
    argv: Sequence[str] | None = None,
    *,
    joins: bool = False,
) -> int:
    """Reads the command line, calls `command` with the options, returns the exit code: that of `command`, 0 for None.

    An error is printed as one line, and gives its `exit_code`, or `GAVE_UP` if it has a text in the attribute
    `ends_again`. Ctrl-C gives 130. A bug, and with --debug every error, keeps its traceback: the error is raised again;
    it is printed instead if the processes end together (a bug then gives `FAILED`), or with `ends_again`. --help raises
    SystemExit.

    Args:
      argv: the arguments without the program's name; None: this process's, and `prepare_process` is called.
      joins: processes on several machines may run the command together (JAX_COORDINATOR_ADDRESS is set). If the command
        fails in one of them, all end with its code.
    """
    if argv is None:
        prepare_process()
    several = joins and "JAX_COORDINATOR_ADDRESS" in os.environ
    options = argparse.Namespace(debug=False)
    try:
        options = parser.read(sys.argv[1:] if argv is None else argv)
        ended = command(options) or 0
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()  # a full disk is an error of the command
        return ended
    except Exception as error:
        code, reason, again = exit_code(error), in_words(error), getattr(error, "ends_again", "")
        if options.debug or code is None:
            if not (several or again):
                raise
            traceback.print_exc()
        if again:
            code, reason = GAVE_UP, f"{reason}; {again}"
        install = f"; pip install '{_EXTRAS.get(getattr(error, 'name', None) or '', 'rpg_jax')}' brings it"
        print(f"error: {reason}{install if reason.startswith('No module named') else ''}", file=sys.stderr)
        code = FAILED if code is None else code
    except KeyboardInterrupt:
        code, reason = 128 + signal.SIGINT, "interrupted"
        print(reason, file=sys.stderr)
    if several:
        from rpg_jax.parallel import joining  # loads JAX

        joining.fail(" ".join(reason.split()), code)
    return code


def exit_code(error: Exception) -> int | None:
    """The exit code of a command that `error` ends. None for a bug.

    A ValueError and a missing package are the user's: `USAGE_ERROR`. An OSError, and a ValueError because storage did
    not answer, give `FAILED`. `Ended` has its own code."""
    from rpg_jax.storage import errors  # it is light, but wrong flags need not wait for it

    if isinstance(error, Ended):
        return error.code
    if isinstance(error, ModuleNotFoundError):
        return None if (error.name or "").startswith("rpg_jax") else USAGE_ERROR
    if isinstance(error, ValueError):
        return FAILED if errors.kind_of(error) is errors.Kind.TRANSIENT else USAGE_ERROR
    return FAILED if isinstance(error, OSError) else None


def ends_again(home: epath.Path, error: Exception, *, stepped: bool) -> str:
    """Why another start of the run in the folder `home` would end with `error` too; "" if another start may go on.

    A lack of memory comes again, and so does a bug before the first step (not `stepped`). For other errors, such as a
    silent judge, the file `FAILURES` in `home` counts the starts in a row that ended with the same text after the same
    checkpoint; this call writes it, in process i > 0 of several the file "i-FAILURES". The third start is the last.
    Errors of storage, of a lost process and of the user do not count."""
    import jax

    from rpg_jax.storage import checkpoints, errors

    if (code := exit_code(error)) not in (None, FAILED):
        return ""
    causes = list(errors.chain(error))
    if any(isinstance(one, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(one) for one in causes):
        return "another start would need the same memory"
    if errors.kind_of(error) is errors.Kind.TRANSIENT or any(isinstance(one, OSError) for one in causes):
        return ""
    if code is None and not stepped:
        return "it took no step, and another start would end the same"
    own = f"{jax.process_index()}-" if jax.process_index() else ""  # each counts its own starts
    file, times, before = home / f"{own}{FAILURES}", 1, None
    now = [max(checkpoints.committed_steps(home / "checkpoints"), default=0), errors.one_line(error)]
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # it may be damaged
        *before, times = json.loads(file.read_text())
    times = times + 1 if before == now else 1
    file.write_text(json.dumps([*now, times]))
    return f"{times} starts have ended so after checkpoint {now[0]}" if times >= _STARTS else ""


def in_words(error: Exception) -> str:
    """The error as text, or its type if it has no text. The text names a file that cannot be read or written."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def load_config(options: argparse.Namespace) -> config_files.Loaded | None:
    """The config that --config and the overrides in `options` (from `Parser.read`) name; None without --config. Raises
    ValueError for overrides without --config, and as `config_files.load`."""
    if options.config is not None:
        return config_files.load(options.config, options.overrides)
    if options.overrides:
        raise ValueError(f"{options.overrides[0]} needs --config=FILE")
    return None


def number(kind: Callable[[str], Any], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """The type of a flag, for argparse: a function from a text to its number, `kind` (int, float) of the text. Outside
    [`low`, `high`] it raises argparse.ArgumentTypeError, for a text that is no number ValueError."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"{text} must be {allowed}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


def keep_pages() -> bool:
    """Makes glibc take and return memory in pieces of 128 MiB; returns whether it could.

    XLA on CPU takes a program's buffers from malloc and frees them when the program ends. By default glibc then returns
    most pages to the system, and the next call faults the pages in again, zeroed: a third of the time of a small step.
    Call this function before JAX starts its threads. Without glibc it does nothing."""
    return _glibc("mallopt", -2, 1 << 27)  # M_TOP_PAD of glibc's malloc.h


def keep_buffers() -> bool:
    """Makes glibc keep freed buffers of any size for the next program; returns whether it could.

    A buffer that does not fit into the free memory would otherwise be mapped for one call and unmapped after it. The
    process keeps its peak of memory. So call this where programs run on the CPU, and where no large model is copied."""
    never = (1 << 31) - 1
    return _glibc("mallopt", -4, 0) and _glibc("mallopt", -1, never)  # M_MMAP_MAX, M_TRIM_THRESHOLD


def return_pages() -> bool:
    """Gives memory of freed buffers, which glibc keeps, back to the system; returns whether there was any.

    A process that trains several models would otherwise grow with each model: the gaps that one run's buffers leave do
    not fit the buffers of the next run."""
    return _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> bool:
    """Whether the function of glibc says that it did something; False without glibc."""
    try:
        return bool(getattr(ctypes.CDLL("libc.so.6"), function)(*arguments))
    except (OSError, AttributeError):
        return False


def prepare_process() -> None:
    """Prepares the process of a command or worker. A crash prints the Python stacks. stdout and stderr print plain text
    (`screen.guard`). Python's logs go through absl. Then it calls `prepare_libraries`."""
    gc.set_threshold(50_000)  # tracing makes objects and little garbage: 8 % of a short run at 700
    atexit.register(gc.freeze)  # an exit collects garbage several times: half a second
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is no file
        faulthandler.enable()
    screen.guard()
    absl.logging.use_absl_handler()
    prepare_libraries()


def prepare_libraries() -> None:
    """Prepares the process for libraries: malloc keeps pages, absl's flags take their defaults, and absl, asyncio and
    gcsfs log less. Replaces `sys.unraisablehook`."""
    keep_pages()
    absl.flags.FLAGS.mark_as_parsed()  # Grain and Orbax read their defaults there
    absl.logging.set_verbosity(absl.logging.WARNING)  # Orbax reports every file it writes
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its tracebacks; `rpg_jax.storage.errors` says one line
    # Orbax logs an error that it also raises. Errors of the other arrays end in asyncio's log, or with the garbage.
    for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
        logger.addFilter(lambda record: not (record.exc_info and _passes_orbax(record.exc_info[2])))
    sys.unraisablehook = _unraisable


def _passes_orbax(trace: types.TracebackType | None) -> bool:
    return any(frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in traceback.walk_tb(trace))


def _unraisable(caught: Any) -> None:
    if str(caught.exc_value) != "Event loop is closed" and not _passes_orbax(caught.exc_traceback):
        sys.__unraisablehook__(caught)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")
