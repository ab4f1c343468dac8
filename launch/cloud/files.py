"""Makes the files of a launch: the source, the startup script, and the script that trains."""

import gzip
import io
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

from cloud.errors import LaunchError
from cloud.job import ROOT, Job
from cloud.shell import Shell


def startup_script(job: Job) -> str:
    """The script that every worker runs at each boot, and that looks into the bucket from then on."""
    head = f"#!/bin/bash\n# Startup script of {job.name}.\nFILES={shlex.quote(job.files)}\n\n"
    return head + (Path(__file__).parent / "worker.sh").read_text(encoding="utf-8")


def run_script(job: Job) -> str:
    """The script that every worker runs as its service: `supervise.py`, which runs the trainer or a server."""
    free = ["gcloud", "compute", "tpus", "queued-resources", "delete", job.name, *job.place, "--quiet", "--async"]
    vm = [f"--files={job.files}", *([] if job.keep else [f"--free={shlex.join([*free, '--force'])}"])]
    purpose = f"Trains {job.name}; the same name resumes from its last checkpoint."
    if job.is_first_hour:
        purpose = f"Makes the first hour of {job.name}; the same name continues it."
    if job.serves_for:
        purpose = f"Serves for {job.serves_for}, until nobody asks any more."
    command = ["exec", "env", f"RPG_COMMIT={commit()}", "python3", "launch/cloud/supervise.py", *vm, *job.supervised]
    command += [f"--announce={job.addresses}"] if job.serves_for else []
    return f"#!/bin/bash\n# {purpose}\n{shlex.join(command)}\n"


def commit() -> str:
    """The commit of the sent files; marked as dirty if files differ from it."""
    described = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described.strip() or "unknown"


def sent() -> list[Path]:
    """The files that workers and images get, relative to the root: all that git tracks, and so no key, run or build.

    Raises LaunchError where git does not say which files these are.
    """
    listed = [Path(name) for name in _git("ls-files", "-z").split("\0") if name]
    if not listed:
        raise LaunchError("git does not say which files a worker gets", "launch from a clone: git clone, then launch/")
    return sorted(path for path in listed if (ROOT / path).is_file())


def source_archive() -> bytes:
    """Packs the files of `sent` as they are now; equal files give equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sent():
            archive.add(ROOT / path, str(path), filter=_without_owner)
    return buffer.getvalue()


def image_context(shell: Shell, folder: Path) -> Path:
    """Copies the files of `sent` into `folder/source`, from which an image is built, and returns that folder."""
    context = folder / "source"
    shutil.rmtree(context, ignore_errors=True)
    for path in sent():
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, context / path)
    if shell.dry_run:
        print(f"# writes {context}")
    return context


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, encoding="utf-8")
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def write(shell: Shell, job: Job, folder: Path) -> list[Path]:
    """Writes source.tar.gz, startup.sh and run.sh into `folder`; returns the paths of what the bucket gets."""
    archive, run = folder / "source.tar.gz", folder / "run.sh"
    shell.write(folder / "startup.sh", startup_script(job).encode(), executable=True)
    shell.write(run, run_script(job).encode(), executable=True)
    shell.write(archive, source_archive())
    return [archive, run]
