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


def option(help: str, default: Any = dataclasses.MISSING, **how: Any) -> Any:
    """A field of `Job` that both launchers take as an option; `how` is for argparse."""
    return dataclasses.field(default=default, metadata={"help": help, **how})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One launch, and the TPU slices that it asks Google Cloud for. A field with a help text is an option of both
    launchers. `give_up_after` is an option of launch/tpu; `cluster` and `reservation` are options of launch/xpk.

    `trainer` is what follows `--`: arguments of `python -m rpg_jax.train`, of `rpg_jax.serve` with `serves_for`, or
    "first-hour" and arguments of `launch.first_hour`. `secrets` are (environment variable, name) pairs.
    """

    name: str = option("name of the run and of the TPU: a DNS label; the same name resumes")
    type: str = option("accelerator type of one slice, e.g. v5p-16 (a wrong one lists all)")
    slices: int = option("number of slices, which talk over the data centre's network (default: 1)", 1, type=int)
    capacity: str = option("default: on-demand", "on-demand", choices=CAPACITIES)
    secrets: tuple[tuple[str, str], ...] = option(
        "environment variable to fill from Secret Manager, by name; repeatable",
        (),
        action="append",
        metavar="VARIABLE=NAME",
    )
    serves_for: str | None = option("servers for the run of this name (rollout.driver=servers)", None, metavar="RUN")
    zone: str = option("e.g. us-east5-a")
    project: str = option("default: gcloud's current project")
    bucket: str = option("gs://NAME[/folder] in the zone's region; holds runs, launch files, a cache")
    service_account: str | None = option("of the workers (default: the project's Compute Engine account)", None)
    network: str | None = option("VPC network (default: default)", None)
    internal_ips: bool = option("workers without external addresses", False, action="store_true")
    chip_price: float | None = option("dollars per chip and hour, in place of the price list", None, type=float)
    keep: bool = option("keep what costs when the run has ended", False, action="store_true")
    max_hours: float | None = option("save, end and free everything so many hours from now", None, type=float)
    budget: float | None = option("the hours that so many dollars pay, as --max-hours", None, type=float, metavar="USD")
    give_up_after: str = "30d"
    cluster: str | None = None
    reservation: str | None = None
    trainer: tuple[str, ...] = ()

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
        return chips * price, f"{accelerators.count(chips, 'chip')} × ${price:.2f} ({source})"

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
            return ("launch.first_hour", "--platform=tpu", *self.trainer[1:], f"--out={self.runs}/{self.name}")
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


FIELDS = {field.name: dict(field.metadata) for field in dataclasses.fields(Job)}


def load(path: Path) -> dict[str, Any]:
    """Fields of a saved job; {} if nothing was launched under this name from here."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    fields = {name: value for name, value in found.items() if name in FIELDS}  # older launches had others
    fields["trainer"] = tuple(fields["trainer"])
    fields["secrets"] = tuple(tuple(pair) for pair in fields["secrets"])
    return fields
