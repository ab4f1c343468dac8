"""A process that trains cells one after another. It imports JAX once, and runs of one method share compiled programs.

It reads a cell a line from stdin: JSON of the arguments of `rpg_jax.train` and of the file that takes all output. It
writes an empty line to stdout after each run that ended well. At the first that did not, it ends with the code of that
run, and its parent starts another process. So a run is as alone as in a process of its own: a signal, the watchdog or
an error ends no other.
"""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import rpg_jax
from rpg_jax.runs import cli, train_command


def main() -> int:
    cli.prepare_process()
    answers = os.dup(1)
    for line in sys.stdin:
        cell = json.loads(line)
        if code := run(cell["arguments"], Path(cell["log"])):
            return code
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it: the command was killed
            os.write(answers, b"\n")
    return 0


def run(arguments: Sequence[str], log: Path) -> int:
    """Trains one run, with the process's output in `log`; returns the exit code of `rpg_jax.train`."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [str(Path(rpg_jax.__file__).parent / "train.py"), *arguments]  # noted in versions.json
    code = train_command.main(arguments)
    gc.collect()  # the run's arrays
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
