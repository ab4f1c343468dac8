"""The two logs of a run, one line a step and one a sampled completion, kept in step with each other and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rpg_jax.parallel import hosts
from rpg_jax.training import rollout_files
from rpg_jax.training.groups import Group
from rpg_jax.training.metrics import JsonLines
from rpg_jax.training.writers import Writer


class RunLog:
    """metrics.jsonl and samples.jsonl of a run folder; `samples` prompts a step have their completions written.

    Metrics go to `writers` as well.
    """

    def __init__(self, run_dir: Path, *, samples: int):
        self.writers: list[Writer] = []
        self._run_dir = run_dir
        self._metrics, self._samples = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "samples.jsonl")
        self._samples_per_step = samples

    def append(self, step: int, values: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Writes a step: the samples first, so that a step with metrics has them. One process of several writes."""
        if not hosts.is_first():
            return
        for group in groups[: self._samples_per_step]:
            for text, completion, reward, accuracy in zip(
                group.texts, group.completions, group.rewards, group.accuracy, strict=True
            ):
                self._samples.append(
                    {
                        "step": step,
                        "prompt": group.problem.prompt,
                        "completion": text,
                        "answer": group.problem.answer,
                        "reward": reward,
                        "accuracy": accuracy,
                        "tokens": len(completion.tokens),
                        "finish_reason": completion.finish_reason,
                    }
                )
        self._metrics.append({"step": step, **values})
        for writer in self.writers:
            writer.append(step, values)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def rewind(self, step: int) -> None:
        """Drops what was written after `step`, rollout files too, which a resumed run does again."""
        for log in (self._metrics, self._samples) if hosts.is_first() else ():
            log.rewind(step)
        if hosts.is_first():
            rollout_files.rewind(self._run_dir, step)
