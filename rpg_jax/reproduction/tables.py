"""The tables that can be reproduced: the runs of each row, and the row that it is compared with."""

from collections.abc import Mapping
from types import MappingProxyType

from rpg_jax.losses import METHODS
from rpg_jax.reproduction.table import Table

Fields = Mapping[str, object]  # {section__field: value}


def _method(name: str, **fields: object) -> tuple[str, ...]:
    """The overrides of a row: its method, then its fields `section__field=value`."""
    overrides = (f"--config.{field.replace('__', '.')}={value}" for field, value in fields.items())
    return (f"--config.method={name}", *overrides)


_RPG, _DIFFERENTIABLE = "RPG-REINFORCE-URKL", "RPG-URKL"
_PRETRAINED = ("GRPO", "DAPO", _DIFFERENTIABLE, _RPG, "REINFORCE++-Baseline", "RPG-SEQ-RKL", "KL-in-reward")
# Of "pretrained": with two updates a step the second one is off-policy.
_OF_SMOLLM2: Fields = {
    "model__path": "smollm2-135m",
    "train__updates_per_step": 2,
    "evaluation__every": 8,
    "evaluation__k": 4,
}
# The rows of "reasoning", in the order of the paper's tables.
_REASONING = (
    *("GRPO", "DAPO", "REINFORCE++", "REINFORCE++-Baseline", "RLOO", "Dr.GRPO", "GSPO", "CISPO", "DPPO-TV", "MaxRL"),
    *("KL-in-reward", *(name for name in METHODS if name.startswith("RPG-") and "SEQ" not in name)),
)
# At β = 1e-4, with the behaviour policy as the reference, these are PPO's clip on group-mean advantages to 2e-4 of the
# gradient (tests/losses/test_methods.py).
_ONE_ALGORITHM = {"the eight RPG rows": [name for name in METHODS if name.startswith("RPG-") and "SEQ" not in name]}
_TO_GO = {f"{name}, to-go": name for name in _REASONING if "-REINFORCE-" in name}
# Of "starts": three warm starts by one recipe, and two methods with each other's advantage.
_STARTS = {n: "configs/chains_start" + f"_{n}" * bool(n) for n in range(3)}
_ADVANTAGES = {
    "DAPO": _method("DAPO"),
    _RPG: _method(_RPG),
    f"{_RPG}, DAPO's advantage": _method(_RPG, loss__advantage="group_standardised"),
}
_MANY: Fields = {"evaluation__problems": 512, "evaluation__every": 30}  # half an interval of one run: below 3 points
# A row of its own name: the critic explains none of the returns' variance, so this says nothing of PPO.
_PPO = {"PPO, untuned critic": _method("PPO", critic__learning_rate=1e-3)}
# What the gradient of completions needs. λ = 0 has the KL of tokens: it shows what these fields change by themselves.
_OF_COMPLETIONS: Fields = {
    "loss__level": "to_go",
    "loss__advantage": "leave_one_out",
    "loss__aggregate": "sequence_mean_token_sum",
    "dynamic_sampling__enabled": False,
}
_ABLATED: Mapping[str, Fields] = {  # of RPG-REINFORCE-URKL: clip dual, β = 1e-4, the reference moves every batch
    "as published": {},
    **{f"clip {clip}": {"loss__clip": clip} for clip in ("truncate", "reward", "none")},
    **{f"β = {beta}": {"loss__kl_coef": beta} for beta in (0, 1e-3, 1e-2, 1e-1)},
    **{
        f"β = 0.01, {name}": {"loss__kl_coef": 1e-2, **reference}
        for name, reference in {
            "every 10 batches": {"reference__every": "160updates"},
            "κ": {"reference__rule": "kl"},
            "fixed": {"reference__rule": "fixed"},
        }.items()
    },
    "β = 0.1, fixed": {"loss__kl_coef": 0.1, "reference__rule": "fixed"},
    **{
        f"β = 0.1, fixed, λ = {decay}": {"loss__kl_coef": 0.1, "reference__rule": "fixed", **_OF_COMPLETIONS}
        | ({"loss__trace_decay": decay} if decay != 1 else {})
        for decay in (0, 0.5, 0.9, 1)
    },
}

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "small": Table(
            "Every method on sums and differences",
            {row: own for name in METHODS for row, own in (_PPO if name == "PPO" else {name: _method(name)}).items()},
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
            | {row: _method(name, **_OF_COMPLETIONS) for row, name in _TO_GO.items()}
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
            {name: _method(_RPG, **fields) for name, fields in _ABLATED.items()},
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
                f"{name}, start {n}": (*overrides, *_method("", model__path=path, **_MANY)[1:])
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
            {"full": _method(_RPG)} | {f"rank {rank}": _method(_RPG, model__lora__rank=rank) for rank in (1, 4, 16)},
            baseline="full",
            config="configs/reasoning.py",
            paper="Not in the paper. Adapters (arXiv:2106.09685) on the matrices of attention and of the feed-forward "
            "layers, of a model whose layers are 64 wide",
            rates=(1e-4, 2e-4, 4e-4),
            scan_seeds=(100,),
        ),
        "pretrained": Table(
            "SmolLM2-135M-Instruct learns sums by eight methods",
            {name: _method(name, **_OF_SMOLLM2) for name in _PRETRAINED}
            | {"no KL": _method(_RPG, **_OF_SMOLLM2, loss__kl_coef=0)},
            baseline="DAPO",
            config="configs/smollm2_135m_sums.py",
            paper="In the paper: Tables 3 and 8, at 4 and 7 billion parameters. Here a pretrained model of 135 million "
            "learns 'What is a + b?'. `python -m rpg_jax.data pretrained smollm2-135m` makes the folder of its "
            "weights. Choose --jobs=1: a run takes both cores, up to 9 GB of memory and three to five minutes. "
            "No row filters prompts",
            published=("table3_qwen3_4b_8k", "table8_qwen2p5_7b_instruct"),
            rates=(1e-5, 3e-5, 1e-4),
            scan_seeds=(100,),
        ),
    }
)
