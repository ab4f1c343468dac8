"""The runs of the frontier: SmolLM2-135M-Instruct learns sums under a KL term of some kind and strength."""

import dataclasses
from collections.abc import Iterator

CONFIG = "configs/smollm2_135m_sums.py"
# Rewards and KL of whole completions in nats: β means the same in every row.
_SHARED = {
    "loss.advantage": "leave_one_out",
    "loss.aggregate": "sequence_mean_token_sum",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "dynamic_sampling.enabled": False,
    "reference.rule": "fixed",
    "train.updates_per_step": 2,
    "evaluation.every": 8,
    "log.rollouts_every": 8,
}
NO_KL = "no KL"
ROWS = {
    "completions: RKL": {"method": "RPG-SEQ-RKL"},
    "to-go: URKL": {"method": "RPG-REINFORCE-URKL", "loss.level": "to_go"},
    "per token: URKL": {"method": "RPG-REINFORCE-URKL"},
    "per token (GRPO): k₃": {"method": "GRPO-DeepSeekMath"},
    "KL in the reward": {"method": "KL-in-reward"},
    NO_KL: {"method": "RPG-REINFORCE-URKL"},
}
"""The kind of KL term, and the config fields of it."""
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a kind of KL term, its β and a seed."""

    row: str
    kl_coef: float
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"frontier-{[*ROWS].index(self.row)}-{self.kl_coef:g}-seed{self.seed}"

    @property
    def overrides(self) -> dict[str, object]:
        """The fields in which the run differs from `CONFIG`."""
        own = ROWS[self.row] | {"loss.kl_coef": self.kl_coef, "seed": self.seed, "run.name": self.name}
        return _SHARED | own


def cells(seeds: int) -> Iterator[Cell]:
    """All runs, the most telling ones first: a table that is interrupted has all seeds of its strongest contrasts."""
    yield from (Cell(NO_KL, 0.0, seed) for seed in range(seeds))
    for strengths in ((0.1,), (0.03, 0.3), (0.01, 0.003)):
        for seed in range(seeds):
            yield from (Cell(row, strength, seed) for strength in strengths for row in ROWS if row != NO_KL)
