"""A disk that is full, a tmpfs of few pages: a command ends in one line that names the file."""

import re
import subprocess
import sys

import pytest

from tests.end_to_end.whole_runs import MICRO, ROOT, environment

MOUNTED = ["unshare", "--mount", "--map-root-user"]  # the mount ends with the command
FILLED = """
mount -t tmpfs -o size="$1" tmpfs "$2" || exit 99
cd "$3"
if [ "$4" = stdout ]; then head -c "$1" /dev/zero >"$2/other"; exec >"$2/log"; fi
exec "${@:5}"
"""


def can_mount():
    try:
        return not subprocess.run([*MOUNTED, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
    except OSError:
        return False


@pytest.mark.slow  # three processes
@pytest.mark.skipif(not can_mount(), reason="mounts nothing here")
@pytest.mark.parametrize(
    ("what", "size", "named"),
    [
        ("evaluate", 12 * 1024, r"No space left on device: \S+/disk/e/completions.jsonl"),
        ("sft", 300 * 1024, r"\S+/disk/s/checkpoints/4 could not be written: .*No space left on device .*"),
        ("stdout", 4 * 1024, r"No space left on device: <stdout>"),
    ],
)
def test_a_full_disk_is_one_line_that_names_the_file(warm, tmp_path, what, size, named):
    (disk := tmp_path / "disk").mkdir()
    out = tmp_path / "e" if what == "stdout" else disk / "e"
    command = ["evaluate", f"--run={warm / 'w'}", "--k=8", f"--out={out}"]
    if what == "sft":
        fields = {"run.dir": disk, "run.name": "s", "warm_start.epochs": 1, "checkpoint.every": 4}
        command = ["sft", f"--config={MICRO}", *(f"--config.{name}={value}" for name, value in fields.items())]
    arguments = [str(size), str(disk), str(ROOT), what, sys.executable, "-m", f"rpg_jax.{command[0]}", *command[1:]]
    env = environment(warm)
    done = subprocess.run([*MOUNTED, "bash", "-c", FILLED, "bash", *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if not re.match(r"sft: |before the first update", line)]
    assert len(errors) == 1 and re.fullmatch(f"error: {named}", errors[0]), done.stderr
