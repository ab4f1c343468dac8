"""The command lines of launch/tpu and launch/xpk. Later commands for a name remember its earlier options."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cloud import preflight, words
from cloud.errors import LaunchError
from cloud.job import FIELDS, ROOT, Job, load
from cloud.shell import Shell


class Parser(argparse.ArgumentParser):
    """Parses a command line; a wrong one is one line."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message, "--help lists all options")


def parser(program: str, description: str, commands: dict[str, str]) -> Parser:
    """Makes a parser of `program COMMAND [options] [-- trainer arguments]`."""
    made = Parser(
        program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="Everything after -- goes to `python -m rpg_jax.train` on all workers, or with --serves-for to\n"
        "`python -m rpg_jax.serve`; first-hour there checks one host (docs/first_hour.md). The same --name resumes.\n\n"
        "commands:\n" + "\n".join(f"  {name:<8} {meaning}" for name, meaning in commands.items()),
    )  # fmt: skip
    made.add_argument("command", choices=list(commands), metavar="COMMAND", help="one of the commands below")
    for name, how in FIELDS.items():
        if how:
            flag = "--secret" if name == "secrets" else f"--{name.replace('_', '-')}"
            made.add_argument(flag, dest=name, default=None, **how)
    made.add_argument("--dry-run", action="store_true", help="print every command, write every file, run nothing")
    made.add_argument("--yes", action="store_true", help="delete without asking")
    made.add_argument("--staging", type=Path, help="folder for the written files (default: runs/launch/NAME)")
    made.add_argument("--no-watch", action="store_true", help="up: return once all is asked for")
    made.add_argument("--no-plan", action="store_true", help="do not ask rpg_jax.plan whether the config fits")
    return made


@dataclasses.dataclass
class Launch:
    """A parsed command line: the job, the folder of its files, and the shell."""

    options: argparse.Namespace
    job: Job
    staging: Path
    shell: Shell


def parse(made: Parser, argv: list[str], shell: Shell | None = None) -> Launch:
    """Parses a command line; its options win over the options remembered for the name.

    Raises:
      LaunchError: an option is missing.
    """
    if broken := [argument for argument in argv if re.search("[\ud800-\udfff]", argument)]:
        raise LaunchError(f"{broken[0]!r} is no text in UTF-8")
    separator = argv.index("--") if "--" in argv else len(argv)
    options, after = made.parse_args(argv[:separator]), tuple(argv[separator + 1 :])
    if not options.name:
        raise LaunchError("--name is missing", "name the run, e.g. --name=rpg-4b")
    if "/" in options.name or options.name.startswith("."):  # it names a folder of this machine too
        raise LaunchError(f"--name={options.name!r} is not a DNS label", "e.g. --name=rpg-4b")
    shell = shell or Shell(options.dry_run)
    staging = options.staging or ROOT / "runs" / "launch" / options.name
    given = {name: getattr(options, name, None) for name in FIELDS}
    given |= {"trainer": after or None, "secrets": _pairs(options.secrets)}
    fields = load(staging / "job.json") | {name: value for name, value in given.items() if value is not None}
    missing = [f"--{name}" for name in ("type", "zone", "bucket") if not fields.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} missing, and nothing named {options.name!r} was launched from here",
            "e.g. --type=v5p-16 --zone=us-east5-a --bucket=gs://NAME",
        )  # fmt: skip
    fields["project"] = fields.get("project") or _default_project(shell)
    fields["bucket"] = fields["bucket"].rstrip("/")
    return Launch(options, Job(**fields), staging, shell)


def run(made: Parser, argv: list[str], shell: Shell | None, command: Callable[[Launch], None]) -> int:
    """Runs a command line and returns its exit code; each error of the user is one line."""
    try:
        launch = parse(made, argv, shell)
        if launch.options.command != "up":  # it runs all checks, and shows every mistake at once
            words.words_are_plain(launch.job)  # no limit keeps `delete` from what an earlier version has launched
        command(launch)
    except LaunchError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        commands = f"{made.prog} status, stop, delete"
        print(f"\ninterrupted here; in the cloud everything goes on ({commands})", file=sys.stderr)
        return 130
    return 0


def check(launch: Launch, *, vms: bool) -> None:
    """Runs the checks of `preflight`, shows their notes and remembers the job."""
    for note in preflight.check(launch.job, launch.shell, plan=not launch.options.no_plan, vms=vms):
        launch.shell.say(f"  {note}")
    if not launch.shell.dry_run:
        launch.job.save(launch.staging / "job.json")


def confirm(question: str, launch: Launch) -> None:
    """Asks on the terminal; raises LaunchError unless the answer is yes."""
    if launch.options.yes or launch.shell.dry_run:
        return
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        raise LaunchError("nobody is there to say yes", "pass --yes") from None
    if answer.strip().lower() not in ("y", "yes"):
        raise LaunchError("left as it is")


def _pairs(secrets: list[str] | None) -> tuple[tuple[str, str], ...] | None:
    if secrets is None:
        return None
    return tuple((variable, name or variable) for variable, _, name in (s.partition("=") for s in secrets))


def _default_project(shell: Shell) -> str:
    if project := os.environ.get("CLOUDSDK_CORE_PROJECT"):
        return project
    project = shell.ask(["gcloud", "config", "get-value", "project", "--quiet"], dry_answer="PROJECT").strip()
    if not project or project == "(unset)":
        raise LaunchError("no project", "pass --project=ID, or set it: gcloud config set project ID")
    return project
