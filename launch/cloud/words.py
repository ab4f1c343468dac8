"""Checks the form of names, addresses and limits: commands paste them into scripts that run on workers."""

import math
import re
from collections.abc import Callable, Iterable

from cloud.errors import LaunchError
from cloud.job import Job

Check = Callable[[Job], Iterable[str] | None]
NAME = r"[a-z]([-a-z0-9]{0,37}[a-z0-9])?"
BUCKET = r"gs://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9](/[-_.A-Za-z0-9]+)*"
HOURS = (0.1, 24 * 365)  # a boot takes minutes
SECRETIVE = re.compile(r"(?i)(token(?!s|izer)|secret|password|api_?key(?!_file))[\w.]*=.")


def passes(job: Job, checkers: Iterable[Check]) -> list[str]:
    """Runs all checkers and returns their notes. Raises LaunchError with one line for each mistake."""
    notes, problems = [], []
    for checker in checkers:
        try:
            notes += checker(job) or ()
        except LaunchError as error:
            problems.append(str(error))
    if problems:
        raise LaunchError("\n".join(dict.fromkeys(problems)))
    return notes


def words_are_plain(job: Job) -> None:
    """Checks the forms of all names; every wrong one has its line."""
    wrong = [
        f"{option}={value!r} is not {what}"
        for option, value, pattern, what in (
            ("--name", job.name, NAME, "a DNS label; use up to 39 of a-z, 0-9 and -, a letter first, no - at the end"),
            ("--bucket", job.bucket, BUCKET, "a bucket; use gs://NAME or gs://NAME/folder, without / at the end"),
            ("--zone", job.zone, r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]", "a zone; e.g. us-east5-a"),
            ("--project", job.project, r"[A-Za-z0-9.:-]{1,63}", "the ID of a project"),
            ("--network", job.network, r"[-A-Za-z0-9/_.]+", "the name of a network"),
            ("--service-account", job.service_account, r"[-a-z0-9._]+(@[-a-z0-9.]+)?", "the address of an account"),
            ("--serves-for", job.serves_for, NAME, "the name of a run"),
            ("--give-up-after", job.give_up_after, r"[1-9]\d*[smhd]", "a length of time; e.g. 12h"),
        )
        if value is not None and not re.fullmatch(pattern, value)
    ]
    if wrong:
        raise LaunchError("\n".join(wrong))


def no_secret_values(job: Job) -> None:
    for argument in job.trainer:
        if SECRETIVE.search(argument):
            raise LaunchError(
                f"{argument.partition('=')[0]} looks like a secret on the command line",
                "store it: gcloud secrets create NAME --data-file=-, then pass --secret=VARIABLE=NAME",
            )
    for variable, name in job.secrets:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) or not re.fullmatch(r"[-\w]{1,255}", name):
            raise LaunchError(f"--secret={variable}=…", "write --secret=VARIABLE=name-in-secret-manager, never a value")


def limits_agree(job: Job) -> None:
    """Checks that hours and dollars are a limit; of two limits the earlier one counts."""
    for option, value in (("--chip-price", job.chip_price), ("--budget", job.budget)):
        if value is not None and not 0 < value < math.inf:
            raise LaunchError(f"{option}={value:g}", "use a positive number")
    least, most = HOURS
    if job.max_hours is not None and not least <= job.max_hours <= most:
        raise LaunchError(f"--max-hours={job.max_hours:g}", f"use {least:g} to {most:g}")
    if job.hours and not least <= job.hours <= most:
        raise LaunchError(f"--budget={job.budget:g} pays {job.hours:g} hours", f"use what pays {least:g} to {most:g}")


FORMS = (words_are_plain, no_secret_values, limits_agree)
