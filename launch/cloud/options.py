"""The options of launch/tpu and launch/xpk. What was given once for a name is remembered for its later commands."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from cloud.errors import LaunchError
from cloud.job import CAPACITIES, ROOT, Job, load
from cloud.shell import Shell


def parser(program: str, description: str, commands: dict[str, str]) -> argparse.ArgumentParser:
    """A parser of `program COMMAND [options] [-- trainer arguments]`."""
    made = argparse.ArgumentParser(
        program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="Everything after -- goes to `python -m rpg_jax.train` on all workers. The same --name resumes.\n\n"
        "commands:\n" + "\n".join(f"  {name:<8} {meaning}" for name, meaning in commands.items()),
    )  # fmt: skip
    made.add_argument("command", choices=list(commands), metavar="COMMAND", help="one of those below")
    what = made.add_argument_group("what")
    what.add_argument("--name", help="of the run and of the TPU: a DNS label; the same name resumes")
    what.add_argument("--type", help="accelerator type of one slice, e.g. v5p-16 (launch/tpu types lists all)")
    what.add_argument("--slices", type=int, help="number of slices (default 1)")
    what.add_argument("--capacity", choices=CAPACITIES, help="default on-demand")
    what.add_argument("--secret", action="append", metavar="VARIABLE=NAME", dest="secrets",
                      help="environment variable filled from Secret Manager, by name; repeatable")  # fmt: skip
    where = made.add_argument_group("where")
    where.add_argument("--zone", help="e.g. us-east5-a")
    where.add_argument("--project", help="default: the one gcloud is set to")
    where.add_argument(
        "--bucket", help="gs://NAME[/folder] in the zone's region: runs, launch files, compilation cache"
    )
    where.add_argument("--service-account", help="of the workers; default: the project's Compute Engine account")
    where.add_argument("--network", help="VPC network; default: default")
    where.add_argument("--internal-ips", action="store_true", default=None, help="workers without external addresses")
    how = made.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="print every command, write every file, run nothing")
    how.add_argument("--yes", action="store_true", help="delete without asking")
    how.add_argument("--staging", type=Path, help="folder of the written files (default: runs/launch/NAME)")
    how.add_argument("--no-plan", action="store_true", help="do not ask rpg_jax.plan whether the config fits")
    how.add_argument("--chip-price", type=float, help="dollars per chip and hour to reckon with")
    how.add_argument("--timeout", type=float, default=24 * 3600.0, help="seconds to wait for capacity (default: a day)")
    return made


@dataclasses.dataclass
class Launch:
    """A parsed command line: the job, where its files go, and the shell."""

    options: argparse.Namespace
    job: Job
    staging: Path
    shell: Shell


def parse(made: argparse.ArgumentParser, argv: list[str], shell: Shell | None = None) -> Launch:
    """Options on the command line win over those remembered for the name; raises LaunchError for what is missing."""
    separator = argv.index("--") if "--" in argv else len(argv)
    options, after = made.parse_args(argv[:separator]), tuple(argv[separator + 1 :])
    options.after = after
    if not options.name:
        raise LaunchError("--name is missing", "name the run, e.g. --name=rpg-4b")
    shell = shell or Shell(options.dry_run)
    staging = options.staging or ROOT / "runs" / "launch" / options.name
    given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(Job)}
    given |= {"trainer": (after or None) if options.command != "ssh" else None, "secrets": _pairs(options.secrets)}
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
