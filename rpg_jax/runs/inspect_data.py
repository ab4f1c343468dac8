"""What `data inspect --config=FILE` needs of a config: its sources, its template, its tokenizer and its limits."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rpg_jax import data
from rpg_jax.environments.stage import Stage
from rpg_jax.runs import config_files
from rpg_jax.runs.experiment import make_stage, open_tokenizer
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import with_method


class Seen(NamedTuple):
    """How a config reads rows and shows them to the policy."""

    sources: list[str]
    template: str | None
    tokenizer: data.Tokenizer
    thinking: bool
    max_prompt_tokens: int
    max_tokens: int
    stage: Stage | None

    def opened(self, problems: list[data.Problem]) -> list[data.Problem]:
        """The problems with the prompts of the config's environment, if it has one; ends the environment."""
        if self.stage is None:
            return problems
        with self.stage as stage:
            return stage.opened(problems)


def seen_by(file: str, overrides: Sequence[str]) -> Seen:
    """How the config in `file` with `overrides` sees its data; without a tokenizer of its own it trains one.

    Raises ValueError if the task is not one of files, or as a run's start does.
    """
    config = with_method(config_files.load(file, overrides).config)
    if config.task.name != "files":
        raise ValueError(
            f"--config={file}: task.name={config.task.name!r} makes its problems itself; files are inspected with "
            "--config.task.name=files --config.task.train=SOURCE"
        )
    with config.unlocked():
        config.warm_start.enabled = True  # with what supervised training reads
    task = Task.from_config(config, held_out=bool(config.task.held_out_sets))
    stage = make_stage(config)
    if stage is not None:
        task = task.opened(stage)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = open_tokenizer(config, task, Path(scratch))
    t, limit = config.task, config.warm_start.max_tokens or config.rollout.max_tokens
    sources = [s.strip() for s in ",".join(filter(None, (t.train, config.warm_start.train))).split(",") if s.strip()]
    return Seen(sources, t.template, tokenizer, t.thinking, t.max_prompt_tokens, limit, stage)
