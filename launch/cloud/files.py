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

COORDINATOR_PORT = 8476  # jax's default moved to 8482, which Google's automatic firewall rule does not open (jax#35905)


def startup_script(job: Job) -> str:
    """The script that every worker runs at each boot."""
    head = f"#!/bin/bash\n# Startup script of {job.name}.\nFILES={shlex.quote(job.files)}\n\n"
    return head + (Path(__file__).parent / "worker.sh").read_text(encoding="utf-8")


def run_script(job: Job) -> str:
    """The script that every worker runs as its service: the trainer or a server, with secrets fetched by name."""
    train = [".venv/bin/python", "-m", *job.command]
    train += [f"--announce={job.addresses}"] if job.serves_for else []
    if job.secrets:
        secrets = [f"--project={job.tpu.project}", *(f"{variable}={name}" for variable, name in job.secrets)]
        train = [".venv/bin/python", "launch/cloud/with_secrets.py", *secrets, "--", *train]
    words = [shlex.quote(word) for word in train]
    options = train.index(job.command[0]) + 1
    command = " \\\n  ".join([" ".join(words[:options]), *words[options:]])
    return f"""#!/bin/bash
# {_purpose(job)}
attribute() {{
  curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}}
coordinator="$(attribute tpu-env | sed -n "s/^MEGASCALE_COORDINATOR_ADDRESS: *'\\([^:']*\\).*/\\1/p")"
if [ -z "$coordinator" ]; then
  coordinator="$(attribute worker-network-endpoints | cut -d, -f1 | cut -d: -f3)"
fi
export JAX_COORDINATOR_ADDRESS="$coordinator:{COORDINATOR_PORT}"
export JAX_COMPILATION_CACHE_DIR={shlex.quote(job.bucket)}/jax-cache
export JAX_PLATFORMS=tpu
export RPG_COMMIT={shlex.quote(commit())}

.venv/bin/python launch/cloud/extras.py {shlex.join(job.trainer)} || exit 1

trap : TERM  # the trainer gets the signal too; wait for it to save
{command} &
trainer=$!
wait "$trainer"
status=$?
while kill -0 "$trainer" 2>/dev/null; do
  wait "$trainer"
  status=$?
done
if [ "$status" = 0 ] && [ "$(attribute agent-worker-number)" = 0 ]; then
  date --utc +%FT%TZ | gcloud storage cp - {shlex.quote(job.files)}/finished
{_free(job)}fi
exit "$status"
"""


def _purpose(job: Job) -> str:
    if job.serves_for:
        return f"Serves for {job.serves_for}, until nobody asks any more."
    return f"Trains {job.name}; the same name resumes from its last checkpoint."


def _free(job: Job) -> str:
    """The line that deletes the TPU from its first worker, where its service account may; otherwise launch/tpu does."""
    if job.keep:
        return ""
    family = "tpu-vm" if job.tpu.direct else "queued-resources"
    words = ["gcloud", "compute", "tpus", family, "delete", job.name, *job.tpu.place, "--quiet", "--async"]
    words += [] if job.tpu.direct else ["--force"]
    return f"  {shlex.join(words)} || echo 'the TPU is still there and costs: launch/tpu delete'\n"


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
    """Writes source.tar.gz, startup.sh and run.sh into `folder` and returns their paths."""
    shell.write(folder / "startup.sh", startup_script(job), executable=True)
    shell.write(folder / "run.sh", run_script(job), executable=True)
    archive = folder / "source.tar.gz"
    archive.write_bytes(source_archive())
    if shell.dry_run:
        print(f"# writes {archive}")
    return [archive, folder / "startup.sh", folder / "run.sh"]
