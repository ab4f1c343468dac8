"""Groups runs by config, and says in what configs differ."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report.run_files import flat, read_config, read_metrics

# Runs of one config may differ in these fields: their places, logs and seeds.
ASIDE = ("seed", "run.", "distributed.", "log.", "checkpoint.", "profile.")
SHOWN_FIELDS = 2  # most fields in a label

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder that was read: the config by dotted names, and one record of metrics for each step."""

    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        return cls(folder, flat(read_config(folder)), read_metrics(folder))

    @property
    def name(self) -> str:
        return self.folder.resolve().name


@dataclasses.dataclass(frozen=True)
class Config:
    """Runs that differ in their seeds alone; the label tells the config from others."""

    label: str
    runs: Sequence[Run]

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.runs[0].config


def configs_of(runs: Sequence[Run]) -> list[Config]:
    """Groups runs by config, in the order given. A run without config.json is a config of its own."""
    by_fields: dict[str, list[Run]] = {}
    for run in runs:
        counted = {k: v for k, v in run.config.items() if not k.startswith(ASIDE)}
        by_fields.setdefault(json.dumps(counted or run.name, sort_keys=True), []).append(run)
    groups = list(by_fields.values())
    return [Config(_label(own[0], [g[0] for g in groups]), own) for own in groups]


def differences(configs: Sequence[Config]) -> list[Json]:
    """Fields whose values differ between configs, with each config's value as text."""
    names = dict.fromkeys(name for c in configs for name in c.fields if not name.startswith(ASIDE))
    rows = [{"field": name, "values": [_text(c.fields.get(name)) for c in configs]} for name in sorted(names)]
    return [row for row in rows if len(set(row["values"])) > 1]


def anchor(config: Config) -> str:
    """The policy to which the KL of a config is measured, in words; "unknown" without a config."""
    rule = config.fields.get("reference.rule")
    return {
        None: "unknown",
        "fixed": "the initial policy",
        "behaviour": "the policy that sampled",
        "every": f"the policy after every {config.fields.get('reference.every')}",
        "kl": f"the policy after the last KL above {config.fields.get('reference.kl_threshold')} nats",
    }.get(rule, str(rule))


def _label(run: Run, all_runs: Sequence[Run]) -> str:
    """The method, and the fields that tell the run from others of its method."""
    method = run.config.get("method")
    if method is None:
        return run.name
    rivals = [r.config for r in all_runs if r.config.get("method") == method]
    names = sorted({k for r in rivals for k in r if not k.startswith(ASIDE)})
    told = [k for k in names if any(r.get(k) != run.config.get(k) for r in rivals)]
    parts = [f"{k.rpartition('.')[2]} {_text(run.config.get(k))}" for k in told[:SHOWN_FIELDS]]
    return ", ".join([str(method), *parts, *(["…"] if len(told) > SHOWN_FIELDS else [])])


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)
