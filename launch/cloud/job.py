"""A job: a config that trains on TPU slices under a name, or servers for such a run. The same name resumes the run."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from cloud import accelerators
from cloud.accelerators import Slice
from rpg_jax.planning.chips import PRICES_AS_OF

ROOT = Path(__file__).resolve().parents[2]
CAPACITIES = ("on-demand", "spot", "reserved", "flex-start")
PORT = 8000  # of servers
SERVERS_SECRETS = ("RPG_JAX_API_KEY", "RPG_JAX_CERTIFICATE", "RPG_JAX_PRIVATE_KEY")


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch, and the TPU slices that it asks Google Cloud for.

    Attributes:
      name: of the run, the queued resource and the TPU VM; a DNS label.
      bucket: gs:// address for runs, launch files and the compilation cache.
      type: accelerator type of one slice.
      slices: number of slices, which talk over the data centre's network.
      capacity: one of `CAPACITIES`.
      service_account: of the workers; None is the project's default.
      network: VPC network; None is `default`.
      internal_ips: whether workers have no external addresses.
      give_up_after: how long the request may queue.
      chip_price: dollars per chip and hour; None takes the price list.
      trainer: arguments for `python -m rpg_jax.train`, or for `rpg_jax.serve` with `serves_for`; or "first-hour" and
        arguments for `rpg_jax.first_hour`.
      secrets: (environment variable, name in Secret Manager) pairs.
      keep: whether a TPU stays, and costs, once its run has ended.
      max_hours: after so many hours the run is saved and the TPU deleted; None sets no limit.
      budget: dollars, which are a limit of hours too; None sets no limit.
      serves_for: name of the run for which every slice of this job is a server; None for a job that trains.
    """

    name: str
    bucket: str
    type: str
    zone: str
    project: str
    slices: int = 1
    capacity: str = "on-demand"
    service_account: str | None = None
    network: str | None = None
    internal_ips: bool = False
    give_up_after: str = "30d"
    chip_price: float | None = None
    trainer: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
    keep: bool = False
    max_hours: float | None = None
    budget: float | None = None
    serves_for: str | None = None

    @property
    def slice(self) -> Slice:
        return accelerators.find(self.type)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def place(self) -> list[str]:
        return [f"--zone={self.zone}", f"--project={self.project}"]

    def cost(self) -> tuple[float, str]:
        """Dollars per hour while the slices are up, and how they add up."""
        chips, price, source = self.slice.chips * self.slices, self.chip_price, "--chip-price"
        if price is None:
            price, source = self.slice.chip.price or 0.0, f"{PRICES_AS_OF}, on demand"
            if self.capacity != "on-demand":
                source += f"; {self.capacity} is billed otherwise, name yours with --chip-price"
        return chips * price, f"{chips} chips × ${price:.2f} ({source})"

    @property
    def rate(self) -> str:
        return f"about ${self.cost()[0]:.2f} an hour"

    @property
    def vms(self) -> tuple[str, ...]:
        """Names of the TPU VMs, one for each slice, as queued resources number them."""
        return (self.name,) if self.slices == 1 else tuple(f"{self.name}-{i}" for i in range(self.slices))

    def deadline(self) -> int:
        """When the `hours` from now are over, in seconds since 1970; 0 without a limit."""
        return int(time.time() + 3600 * self.hours) if self.hours else 0

    @property
    def hours(self) -> float | None:
        """The limit that `max_hours` or the `budget` sets, whichever comes first; hours in a queue count too."""
        price = self.cost()[0]
        limits = [self.max_hours, self.budget / price if self.budget and price > 0 else None]
        return min((limit for limit in limits if limit), default=None)

    @property
    def files(self) -> str:
        return f"{self.bucket}/launch/{self.name}"

    @property
    def runs(self) -> str:
        return f"{self.bucket}/runs"

    @property
    def command(self) -> tuple[str, ...]:
        """The module that workers run, with the user's arguments and then those that the launcher sets."""
        if self.serves_for:
            # The user's own --idle comes later, and counts.
            return ("rpg_jax.serve", "--idle=3600", *self.trainer, "--host=0.0.0.0", f"--http_port={PORT}")
        if self.is_first_hour:
            return ("rpg_jax.first_hour", "--platform=tpu", *self.trainer[1:], f"--out={self.runs}/{self.name}")
        return ("rpg_jax.train", *self.trainer, f"--config.run.dir={self.runs}", f"--config.run.name={self.name}")

    @property
    def is_first_hour(self) -> bool:
        """Whether the job checks a TPU (docs/first_hour.md): `-- first-hour` stands in place of a trainer's config."""
        return self.trainer[:1] == ("first-hour",)

    @property
    def supervised(self) -> list[str]:
        """Arguments of launch/cloud/supervise.py."""
        secrets = [f"--secret={variable}={name}" for variable, name in self.secrets]
        where = [f"--bucket={self.bucket}", f"--project={self.project}", f"--deadline={self.deadline()}"]
        return [*where, *secrets, "--", *self.command]

    @property
    def config(self) -> tuple[str, ...]:
        """The user's arguments that are --config and its overrides; a server may have others too."""
        kept, found = False, []
        for argument in self.trainer:
            kept = argument.startswith(("--config", "--noconfig")) or (kept and not argument.startswith("--"))
            found += [argument] if kept else []
        return tuple(found)

    @property
    def addresses(self) -> str:
        """The folder in which servers on TPU VMs write where they are."""
        return f"{self.bucket}/servers/{self.serves_for}"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


FIELDS = tuple(field.name for field in dataclasses.fields(Job))


def load(path: Path) -> dict[str, Any]:
    """Fields of a saved job; {} if nothing was launched under this name from here."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    fields = {name: value for name, value in found.items() if name in FIELDS}  # older launches had others
    fields["trainer"] = tuple(fields["trainer"])
    fields["secrets"] = tuple(tuple(pair) for pair in fields["secrets"])
    return fields
