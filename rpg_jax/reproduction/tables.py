"""Tables of runs, whose rows differ in a few config fields, and the tables that can be reproduced."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rpg_jax.losses.methods import METHODS, REGULARIZED
from rpg_jax.runs import run_names

SMALL_CONFIG = "configs/small.py"
LEARNING_RATE = "optimizer.learning_rate"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a table: its row and seed, its config file, and overrides as "--config.method=GRPO"."""

    row: str
    seed: int
    config: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run's folder: config file, method, overrides, seed. Two tables may share a run."""
        return f"{run_names.run_name(self.config, self.overrides)}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that differ in a few config fields, over the same seeds.

    Attributes:
      title: title of the page.
      rows: name -> overrides of `config`, as "--config.method=GRPO".
      baseline: the row that other rows are compared with.
      paper: where the paper has this comparison, and what differs here.
      config: the config file of every run.
      published: the paper's own tables to show on the page, by their names in paper_tables.json.
      baselines: row -> the row that it is compared with, in place of `baseline`.
      pooled: name -> rows that are one algorithm to a thousandth of the gradient; their mean is compared too, since
        their differences from each other are noise.
      starts: name -> rows that differ only in the weights they start from. Their differences to the compared rows are
        averaged over the starts too.
      shown: the rows in figures with lines, if these figures have no room for all rows.
      rates: learning rates to choose from for each row, by runs with `scan_seeds`. Empty: all have the config's rate.
      scan_seeds: seeds of the runs that choose learning rates. If runs choose rates, no reported run has these seeds.
      swept: of a sweep, row -> (the row without the swept values, {field: value}).
    """

    title: str
    rows: Mapping[str, Sequence[str]]
    baseline: str
    paper: str
    config: str = SMALL_CONFIG
    published: Sequence[str] = ()
    baselines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pooled: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    shown: Sequence[str] = ()
    rates: Sequence[float] = ()
    scan_seeds: Sequence[int] = (100, 101)
    swept: Mapping[str, tuple[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

    def compared_with(self, row: str) -> str:
        """The row that `row` is compared with: its own in `baselines`, else `baseline`, which may be `row` itself."""
        return self.baselines.get(row, self.baseline)

    def named(self, text: str) -> list[str]:
        """The names of rows in a text that separates them by commas; blanks beside a comma do not count. A name can
        have commas: the longest known name is taken. An unknown name ends at the next comma, and is not refused."""
        parts, names = [part.strip() for part in text.split(",")], []
        while parts:
            known = (n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in self.rows)
            names.append(", ".join(parts[: next(known, 1)]))
            parts = parts[names[-1].count(",") + 1 :]
        return names

    def only(self, rows: Sequence[str]) -> "Table":
        """The same table with these rows only, in this order. Raises ValueError for an unknown row."""
        for row in rows:
            if row not in self.rows:
                raise ValueError(f"no row {row!r} in this table; there are {', '.join(self.rows)}")
        return dataclasses.replace(self, rows={row: self.rows[row] for row in rows})

    def planned_runs(self, seeds: Sequence[int]) -> list[PlannedRun]:
        """A run of each row with each seed, seed by seed. So an interrupted table has all rows with its first seeds."""
        return [PlannedRun(row, seed, self.config, tuple(self.rows[row])) for seed in seeds for row in self.rows]

    def with_settings(self, values: Mapping[str, Mapping[str, Any]]) -> "Table":
        """The table of only the rows in `values`, {row: {field: value}}, with these values as further overrides."""
        rows = {
            row: (*self.rows[row], *(run_names.option(field, value) for field, value in own.items()))
            for row, own in values.items()
        }
        return dataclasses.replace(self, rows=rows)

    def scan(self) -> "Table":
        """A sweep: the table of each row at each of `rates`, whose runs choose the rates. Needs at least one rate."""
        return crossed(
            self.rows,
            {LEARNING_RATE: list(self.rates)},
            title=f"{self.title}: learning rates",
            paper="Runs that choose the learning rate of each row",
            config=self.config,
        )


def crossed(
    rows: Mapping[str, Sequence[str]], fields: Mapping[str, Sequence[Any]], *, title: str, paper: str, config: str
) -> Table:
    """The table of each of `rows`, {name: overrides}, with every combination of `fields`, {field: values}, row by row.
    The first combination of a row is compared with the first row of the table; the other combinations of the row are
    compared with its first. A row is named as "GRPO, lr 3e-4"; `swept` is filled. Needs a row and a value per field."""
    combinations = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    made: dict[str, tuple[str, ...]] = {}
    swept: dict[str, tuple[str, Mapping[str, Any]]] = {}
    baselines: dict[str, str] = {}
    for row, overrides in rows.items():
        names = [", ".join(part for part in (row, run_names.label(own)) if part) for own in combinations]
        for name, own in zip(names, combinations, strict=True):
            made[name] = (*overrides, *(run_names.option(field, value) for field, value in own.items()))
            swept[name] = (row, own)
        baselines |= dict.fromkeys(names[1:], names[0])
    return Table(title, made, next(iter(made)), paper, config, baselines=baselines, swept=swept)


Fields = Mapping[str, object]  # {field: value}


def _method(name: str, fields: Fields = MappingProxyType({})) -> tuple[str, ...]:
    """The overrides of a row: its method, then its fields."""
    return tuple(run_names.option(field, value) for field, value in {"method": name, **fields}.items())


_RPG, _DIFFERENTIABLE = "RPG-REINFORCE-URKL", "RPG-URKL"
_PRETRAINED = ("GRPO", "DAPO", _DIFFERENTIABLE, _RPG, "REINFORCE++-Baseline", "RPG-SEQ-RKL", "KL-in-reward")
# The fields of "pretrained". Of the two updates of a step, the second is off-policy.
_OF_SMOLLM2: Fields = {
    "model.path": "smollm2-135m",
    "train.updates_per_step": 2,
    "evaluation.every": 8,
    "evaluation.k": 4,
}
# The rows of "reasoning", in the order of the paper's tables.
_REASONING = (
    *("GRPO", "DAPO", "REINFORCE++", "REINFORCE++-Baseline", "RLOO", "Dr.GRPO", "GSPO", "CISPO", "DPPO-TV", "MaxRL"),
    *("KL-in-reward", *REGULARIZED),
)
# At β = 1e-4, with the behaviour policy as the reference, the rows of `_ONE_ALGORITHM` are PPO's clip on group-mean
# advantages, up to 2e-4 of the gradient (tests/losses/test_methods.py).
_ALONE = [name for name, method in METHODS.items() if method.reference != "teacher"]  # the others need a teacher
_ONE_ALGORITHM = {"the eight RPG rows": [*REGULARIZED]}  # not every RPG-… of METHODS: a new one has its own β
_TO_GO = {f"{name}, to-go": name for name in _REASONING if "-REINFORCE-" in name}
# The rows of "starts": three warm starts by one recipe, and two methods with each other's advantage.
_STARTS = {n: "configs/chains_start" + f"_{n}" * bool(n) for n in range(3)}
_ADVANTAGES = {
    "DAPO": _method("DAPO"),
    _RPG: _method(_RPG),
    f"{_RPG}, DAPO's advantage": _method(_RPG, {"loss.advantage": "group_standardised"}),
}
_MANY: Fields = {"evaluation.problems": 512, "evaluation.every": 30}  # one run: ± less than 3 points
# The row is not called PPO: its critic explains none of the returns' variance, so the row says nothing about PPO.
_PPO = {"PPO, untuned critic": _method("PPO", {"critic.learning_rate": 1e-3})}
# What the gradient of whole completions needs. The row λ = 0 has the KL of tokens: it shows what these fields change.
_OF_COMPLETIONS: Fields = {
    "loss.level": "to_go",
    "loss.advantage": "leave_one_out",
    "loss.aggregate": "sequence_mean_token_sum",
    "dynamic_sampling.enabled": False,
}
_ABLATED: Mapping[str, Fields] = {  # RPG-REINFORCE-URKL has clip dual, β = 1e-4, a reference that moves every batch
    "as published": {},
    **{f"clip {clip}": {"loss.clip": clip} for clip in ("truncate", "reward", "none")},
    **{f"β = {beta}": {"loss.kl_coef": beta} for beta in (0, 1e-3, 1e-2, 1e-1)},
    **{
        f"β = 0.01, {name}": {"loss.kl_coef": 1e-2, **reference}
        for name, reference in {
            "every 10 batches": {"reference.every": "160updates"},
            "κ": {"reference.rule": "kl"},
            "fixed": {"reference.rule": "fixed"},
        }.items()
    },
    "β = 0.1, fixed": {"loss.kl_coef": 0.1, "reference.rule": "fixed"},
    **{
        f"β = 0.1, fixed, λ = {decay}": {"loss.kl_coef": 0.1, "reference.rule": "fixed", **_OF_COMPLETIONS}
        | ({"loss.trace_decay": decay} if decay != 1 else {})
        for decay in (0, 0.5, 0.9, 1)
    },
}

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "small": Table(
            "Every method on sums and differences",
            {row: own for name in _ALONE for row, own in (_PPO if name == "PPO" else {name: _method(name)}).items()},
            baseline="DAPO",
            shown=("GRPO", "DAPO", "REINFORCE++", "RPG-RKL", "RPG-URKL", *_PPO),
            paper="In the paper: Table 8 (Qwen2.5-7B-Instruct); the rows below RPG's rows are ours",
            published=("table8_qwen2p5_7b_instruct",),
            rates=(5e-5, 1e-4, 2e-4),
            pooled=_ONE_ALGORITHM,
        ),
        "reasoning": Table(
            "Every kind of method on chains of operations",
            {name: _method(name) for name in _REASONING}
            | {row: _method(name, _OF_COMPLETIONS) for row, name in _TO_GO.items()}
            | _PPO,
            baseline="DAPO",
            baselines=_TO_GO,
            shown=("GRPO", "DAPO", "GSPO", "KL-in-reward", _DIFFERENTIABLE, _RPG),
            config="configs/reasoning.py",
            paper="In the paper: Tables 3 and 8, at 4 and 7 billion parameters. Here completions of about 29 tokens "
            "may grow to 80, and a step has 16 updates, as in the paper. All runs start from weights that come with "
            "the code: they imitate a pupil who is more often wrong than right on a seventh of the facts, and solve a "
            "third of the chains. The old skill is not trained: it shows forgetting",
            published=("table3_qwen3_4b_8k", "table8_qwen2p5_7b_instruct"),
            rates=(1e-4, 2e-4, 4e-4),
            scan_seeds=(100,),
            pooled=_ONE_ALGORITHM,
        ),
        "reasoning-ablations": Table(
            f"{_RPG} on chains of operations: clip, β, reference and λ",
            {name: _method(_RPG, fields) for name, fields in _ABLATED.items()},
            baseline="as published",
            baselines={f"β = 0.01, {name}": "β = 0.01" for name in ("every 10 batches", "κ", "fixed")}
            | {f"β = 0.1, fixed, λ = {decay}": "β = 0.1, fixed" for decay in (0, 0.5, 0.9, 1)},
            shown=(
                "as published",
                "clip none",
                "β = 0.1",
                "β = 0.01, fixed",
                "β = 0.1, fixed",
                "β = 0.1, fixed, λ = 1",
            ),
            config="configs/reasoning.py",
            paper="In the paper: Figures 8 and 9 have some of these. λ is the decay of the KL to come; rows without λ "
            "have the KL of tokens",
        ),
        "starts": Table(
            f"DAPO, {_RPG} and {_RPG} with DAPO's advantage, from three starts",
            {
                f"{name}, start {n}": (*overrides, *_method("", {"model.path": path, **_MANY})[1:])
                for n, path in _STARTS.items()
                for name, overrides in _ADVANTAGES.items()
            },
            baseline="DAPO, start 0",
            baselines={f"{name}, start {n}": f"DAPO, start {n}" for n in _STARTS for name in _ADVANTAGES},
            starts={name: [f"{name}, start {n}" for n in _STARTS] for name in _ADVANTAGES},
            config="configs/reasoning.py",
            paper="Not in the paper. All rows have the rate that both methods chose in `reasoning`, on another seed. A "
            "held-out score has 512 problems. Stated before the runs: three seeds of each start; rows whose interval "
            "over starts lies within 2 points of training accuracy count as equal",
        ),
        "adapters": Table(
            f"{_RPG} with low-rank adapters beside full training, on chains of operations",
            {"full": _method(_RPG)} | {f"rank {rank}": _method(_RPG, {"model.lora.rank": rank}) for rank in (1, 4, 16)},
            baseline="full",
            config="configs/reasoning.py",
            paper="Not in the paper. Adapters (arXiv:2106.09685) on the matrices of attention and of the feed-forward "
            "layers, of a model whose layers are 64 wide",
            rates=(1e-4, 2e-4, 4e-4),
            scan_seeds=(100,),
        ),
        "pretrained": Table(
            "SmolLM2-135M-Instruct learns sums by eight methods",
            {name: _method(name, _OF_SMOLLM2) for name in _PRETRAINED}
            | {"no KL": _method(_RPG, {**_OF_SMOLLM2, "loss.kl_coef": 0})},
            baseline="DAPO",
            shown=("GRPO", "DAPO", _DIFFERENTIABLE, _RPG),
            config="configs/smollm2_135m_sums.py",
            paper="In the paper: Tables 3 and 8, at 4 and 7 billion parameters. Here a pretrained model of 135 million "
            "learns 'What is a + b?'. `python -m launch.pretrained smollm2-135m` makes the folder of its "
            "weights. On CPUs choose --jobs=1: a run takes two cores, up to 9 GB of memory and three to seven minutes, "
            "and leaves a checkpoint of up to 1.8 GB. No row filters prompts",
            published=("table3_qwen3_4b_8k", "table8_qwen2p5_7b_instruct"),
            rates=(1e-5, 3e-5),  # at 1e-4 GRPO's held-out accuracy falls from 0.14 to 0.04
            scan_seeds=(100,),
        ),
    }
)
