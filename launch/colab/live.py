"""Runs commands from a notebook and shows how far they are."""

import collections
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report.plots import draw_curves
from rpg_jax.report.run_files import Run
from rpg_jax.report.summary import closing_message


def follow(command: Sequence[str], run_dir: str | Path, *, every: float = 5.0) -> str:
    """Runs `command`, which trains in `run_dir`; draws the run's curves again every `every` seconds.

    The command runs in a process of its own, so the accelerator is free again when the command ends. Returns the
    closing message with the scores.

    Raises:
      ValueError: the command failed; the message holds the end of its output.
    """
    from IPython.display import Image, display

    run_dir, shown, drawn = Path(run_dir), None, 0
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.txt"
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}

    def end() -> str:
        return log.read_text(encoding="utf-8", errors="replace")[-2000:]

    with log.open("wb") as out, _process(command, end, stdout=out, env=plain) as process:
        while True:
            ended = process.poll() is not None
            run = Run.read(run_dir)
            if (steps := len(run.records)) > drawn:
                image, drawn = Image(draw_curves(run).read_bytes(), width=900), steps
                if shown is None:
                    shown = display(image, display_id=True)
                else:
                    shown.update(image)
            if ended:
                break
            time.sleep(every)
    return closing_message(run)


def run(command: Sequence[str]) -> None:
    """Runs `command` and shows the latest line of its output; each line replaces the line before it.

    Raises:
      ValueError: the command failed; the message holds the end of its output.
    """
    from IPython.display import clear_output

    lines: collections.deque[str] = collections.deque(maxlen=40)
    with _process(command, lambda: "".join(lines), stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout or ():
            lines.append(line)
            clear_output(wait=True)
            print(line, end="", flush=True)


@contextlib.contextmanager
def _process(command: Sequence[str], end: Callable[[], str], **options: Any) -> Iterator[subprocess.Popen]:
    """Starts `command` and waits for its end; `end` returns the last lines of its output, for the error."""
    with subprocess.Popen(command, stderr=subprocess.STDOUT, **options) as process:
        try:
            yield process
        except BaseException:
            process.terminate()  # training saves and ends; the same command continues it
            raise
    if process.returncode:
        raise ValueError(f"{' '.join(command)} ended with {process.returncode}:\n{end()}")
