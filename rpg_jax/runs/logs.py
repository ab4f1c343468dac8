"""The logs of a run, rewound exactly on resume: one JSON object a line; metrics go to trackers as well."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.data import Group
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import read_jsonl, read_lines
from rpg_jax.runs import rollout_files
from rpg_jax.runs.trackers import Tracker
from rpg_jax.storage import naming, write_atomically
from rpg_jax.types import Completion


class JsonLines:
    """An append-only file of JSON objects that each carry a `step`."""

    def __init__(self, path: Path):
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives a kill of the process from then on; non-finite numbers become null."""
        line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False)
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every complete line; one that a kill cut short is left out. Raises ValueError as `read_lines` does."""
        return read_jsonl(self._path)

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step` and a line cut short, atomically; the latter is said.

        Raises ValueError as `read_lines` does, and for a line without a step.
        """
        if not self._path.exists():
            return
        lines, torn = read_lines(self._path)
        for number, line in enumerate(lines, start=1):
            if not isinstance(line.record.get("step"), int):
                raise ValueError(f"{self._path}:{number}: it has no step; remove this line")
        if torn:
            print(f"{self._path}: the last line was cut short after {len(torn)} bytes; it is left out", file=sys.stderr)
        kept = [line.content for line in lines if line.record["step"] <= step]
        write_atomically(self._path, b"".join(content + b"\n" for content in kept))


class RunLog:
    """metrics.jsonl and samples.jsonl of a run folder, kept in step with each other and with the weights.

    Metrics go to `trackers` as well. The completions of the first `samples` prompts of each step are written.
    """

    def __init__(self, run_dir: Path, *, samples: int):
        self.trackers: list[Tracker] = []
        self._failing: set[Tracker] = set()
        self._run_dir = run_dir
        self._metrics, self._samples = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "samples.jsonl")
        self._samples_per_step = samples

    def append_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Writes completions of a step; on the first process.

        Call it before `append`, so that a step with metrics has its completions.
        """
        for group in groups[: self._samples_per_step] if hosts.is_first() else ():
            failed = group.failed or [None] * len(group.texts)
            for text, completion, reward, accuracy, failure in zip(
                group.texts, group.completions, group.rewards, group.accuracy, failed, strict=True
            ):
                self._samples.append(
                    {
                        "step": step,
                        "prompt": group.problem.prompt,
                        "completion": text,
                        "answer": group.problem.answer,
                        "reward": reward,
                        "accuracy": accuracy,
                        **({"failed": failure} if failure else {}),
                        **told(completion),
                    }
                )

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step; on the first process."""
        if not hosts.is_first():
            return
        self._metrics.append({"step": step, **values})
        for tracker in self.trackers:
            self._try(tracker, f"step {step}", lambda own: own.append(step, _numbers(values)))

    def has(self, step: int) -> bool:
        """Whether the metrics of a step are written. Collective: every process gets the answer of the first."""
        found = hosts.is_first() and any(record["step"] == step for record in self._metrics.read())
        return bool(hosts.pmax(found))

    def close(self) -> None:
        for tracker in self.trackers:
            self._try(tracker, "the end", lambda own: own.close())

    def rewind(self, step: int) -> None:
        """Drops the lines and rollout files of steps after `step`, which a resumed run writes again."""
        for log in (self._metrics, self._samples) if hosts.is_first() else ():
            log.rewind(step)
        if hosts.is_first():
            rollout_files.rewind(self._run_dir, step)

    def drop_samples(self, step: int) -> None:
        """Drops the completions of steps from `step` on."""
        if hosts.is_first():
            self._samples.rewind(step - 1)

    def _try(self, tracker: Tracker, what: str, do: Callable[[Tracker], None]) -> None:
        """Gives `what` to a tracker. A client whose server is away raises anything, and no run ends for that."""
        try:
            do(tracker)
            self._failing.discard(tracker)
        except Exception as error:
            if tracker not in self._failing:
                said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                kept = f"{type(tracker).__name__} did not take {what}: {said}; metrics.jsonl has every step"
                print(f"log.tracker: {kept}", file=sys.stderr)
            self._failing.add(tracker)


def host_metrics() -> dict[str, float]:
    """This process's resident memory in MiB and its open file descriptors; {} where the system does not tell."""
    status, descriptors = Path("/proc/self/status"), Path("/proc/self/fd")
    if not status.exists():
        return {}
    resident = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return {"host/rss_mib": resident / 1024, "host/open_files": len(list(descriptors.iterdir()))}


def told(completion: Completion) -> dict[str, Any]:
    """What the files of completions say of each, beside its text and scores.

    `tokens` are those that the policy has sampled. A conversation with an environment has `turns`: [first, end] of each
    observation, in tokens of the completion, the rewards of the turns, and the kind of failure or null.
    """
    turns = {} if completion.turns is None else {"turns": completion.turns.record()}
    return {"tokens": int(completion.sampled.sum()), "finish_reason": completion.finish_reason, **turns}


def plain(value: Any) -> Any:
    """`value` with Python's own types for JSON; non-finite numbers become None."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among `values`."""
    return {k: float(v) for k, v in plain(values).items() if isinstance(v, int | float)}
