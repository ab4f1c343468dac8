"""Shows a run live: a bar and the latest numbers on a terminal, elsewhere one plain line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rpg_jax.report import screen

SHOWN = (  # metric key, its name on the screen, format
    ("reward", "reward", "{:+.2f}"),
    ("accuracy", "accuracy", "{:.2f}"),
    ("eval/accuracy", "held out", "{:.2f}"),
    ("nll", "nats per token", "{:.3f}"),
    ("held_out_nll", "held out", "{:.3f}"),
    ("turns", "turns", "{:.1f}"),
    ("kl", "KL", "{:.1e}"),
    ("entropy", "entropy", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


def duration(seconds: float) -> str:
    """The duration as text, rounded to whole seconds: "12 s", "3 min 05 s"; from one hour on cut to "2 h 07 min"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """Shows how far a run is, as a context manager: a live bar on a terminal, elsewhere plain lines. `Progress(120)`
    counts steps to 120. `Progress(goal=0.55, title="warm start")` shows how near the accuracy is to the goal, where the
    number of steps is not known. If a step lacks a metric, the metric's last value stays on the screen."""

    def __init__(
        self,
        total: int | None = None,
        *,
        first: int = 0,
        goal: float | None = None,
        title: str = "training",
        unit: str = "step",
        every: float = 5.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises ValueError unless either `total`, a number of steps, or `goal`, an accuracy, is given. `first` steps
        were done by an earlier process. `title` names the work, `unit` a step of the work. Bar and lines go to `stream`
        (None: stderr). Plain lines but the last are at least `every` seconds apart. `clock` gives the time in seconds.
        """
        if (total is None) == (goal is None):
            raise ValueError(f"give either total (steps) or goal (an accuracy), got {total=} and {goal=}")
        self.total, self.goal, self.title, self.unit, self.every = total, goal, title, unit, every
        self.step, self._clock = first, clock
        self._done_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=20)  # of recent steps; the first step compiles and never counts
        self._latest: dict[str, float] = {}
        self._printed_at, self._unprinted = -math.inf, False
        self._console = screen.console(stream or sys.stderr)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.__exit__(*exception)
        elif self._unprinted:
            self._print_line()

    def update(self, step: int, metrics: Mapping[str, float], *, title: str | None = None) -> None:
        """Shows that the step with the number `step` is done (1 is the first), and the `metrics` that are in `SHOWN` or
        part of the reward (reward/NAME). `title` takes the place of the title; None changes nothing. A later call with
        the same step adds metrics."""
        self.title = self.title if title is None else title
        now, is_new = self._clock(), step > self.step
        if is_new:
            if self._done_at is not None:
                self._seconds.append((now - self._done_at) / (step - self.step))
            self._done_at = now
        self.step = step
        self._latest.update(metrics)
        self._unprinted = True
        if not self._live and (now - self._printed_at >= self.every or (is_new and step == self.total)):
            self._print_line()

    def note(self, text: str) -> None:
        """Prints at once a line that stays: a checkpoint written, a skipped step, a warning."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _headline(self) -> str:
        if self.goal is not None:
            value = self._latest.get("accuracy")
            return f"{self.title}: accuracy {'…' if value is None else f'{value:.2f}'} / {self.goal:.2f}"
        return f"{self.title}: {self.unit} {self.step}/{self.total}"

    def _numbers(self) -> list[str]:
        in_headline = "accuracy" if self.goal is not None else ""
        shown = {key: f"{name} {form.format(self._latest[key])}" for key, name, form in SHOWN if key in self._latest}
        if "reward" in shown and (
            parts := [f"{key[7:]} {value:+.2f}" for key, value in self._latest.items() if key.startswith("reward/")]
        ):
            shown["reward"] += f" ({', '.join(parts)})"
        return [text for key, text in shown.items() if key != in_headline]

    def time_left(self) -> str:
        """A text as "3 min 05 s left", by the median time of recent steps; "" without a total, before two steps are
        shown, and at the end."""
        if not self.total or not self._seconds or self.step == self.total:
            return ""
        return f"{duration(max(self.total - self.step, 0) * median(self._seconds))} left"

    def _fraction(self) -> float:
        done = self.step / self.total if self.total else self._latest.get("accuracy", 0.0) / (self.goal or 1.0)
        return min(max(done, 0.0), 1.0) if math.isfinite(done) else 0.0

    def _print_line(self) -> None:
        parts = [self._headline(), *self._numbers(), self.time_left()]
        self._console.print(" | ".join(part for part in parts if part), markup=False, soft_wrap=True)
        self._printed_at, self._unprinted = self._clock(), False

    def __rich__(self) -> Group:
        bar = ProgressBar(total=1.0, completed=self._fraction(), width=30, complete_style="blue", finished_style="blue")
        head = Table.grid(padding=(0, 1))
        head.add_row(Text(self._headline(), style="bold"), bar, Text(self.time_left(), style="dim"))
        return Group(head, Text("   ".join(self._numbers()), style="dim"))
