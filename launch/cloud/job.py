"""What is to be launched: a config on a number of slices under a name that means resume when it is used again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cloud import accelerators
from cloud.accelerators import Slice

ROOT = Path(__file__).resolve().parents[2]
CAPACITIES = ("on-demand", "spot", "reserved")


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
      name: of the run, the queued resource and the TPU VM; a DNS label.
      type: accelerator type of one slice.
      slices: number of them; more than one talk over the data centre's network.
      capacity: how it is paid for.
      bucket: gs:// address that holds runs, launch files and the compilation cache.
      trainer: arguments for `python -m rpg_jax.train`.
      secrets: environment variable -> name in Secret Manager.
      direct: create a TPU VM at once instead of queueing for it.
      chip_price: dollars per chip and hour to reckon with, or None for the table's.
    """

    name: str
    type: str
    zone: str
    project: str
    bucket: str
    slices: int = 1
    capacity: str = "on-demand"
    trainer: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
    service_account: str | None = None
    network: str | None = None
    internal_ips: bool = False
    direct: bool = False
    valid_for: str = "24h"
    chip_price: float | None = None

    @property
    def slice(self) -> Slice:
        return accelerators.find(self.type)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the TPU VMs, one a slice, as queued resources number them."""
        return (self.name,) if self.slices == 1 else tuple(f"{self.name}-{i}" for i in range(self.slices))

    @property
    def files(self) -> str:
        return f"{self.bucket}/launch/{self.name}"

    @property
    def runs(self) -> str:
        return f"{self.bucket}/runs"

    @property
    def place(self) -> list[str]:
        return [f"--zone={self.zone}", f"--project={self.project}"]

    @property
    def trainer_arguments(self) -> tuple[str, ...]:
        """The user's arguments and the name and place of the run, which are the launch's: the same name resumes."""
        return (*self.trainer, f"--config.run.dir={self.runs}", f"--config.run.name={self.name}")

    def cost(self) -> tuple[float, str]:
        return accelerators.cost(self.slice, self.slices, self.capacity, self.chip_price)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load(path: Path) -> dict:
    """Fields of a saved job; {} where nothing was launched under this name from here."""
    if not path.exists():
        return {}
    fields = json.loads(path.read_text())
    fields["trainer"] = tuple(fields["trainer"])
    fields["secrets"] = tuple(tuple(pair) for pair in fields["secrets"])
    return fields
