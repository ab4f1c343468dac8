"""Puts plans of several settings beside each other, by arithmetic: no program is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax.planning import estimates, plan_figures
from rpg_jax.planning.compiling import Program
from rpg_jax.planning.lengths import Lengths
from rpg_jax.planning.run_plan import layout_on, with_known_shapes
from rpg_jax.planning.topologies import Topology
from rpg_jax.rollout.footprint import bytes_on_a_device
from rpg_jax.runs import memory
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.memory import make_decoding, resident
from rpg_jax.runs.resolve import resolve

SAMPLING = frozenset({"prefill", "decode"})


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A plan by arithmetic; bytes are of one chip.

    Attributes:
      trained: numbers that an update changes: weights, or adapters.
      base: bytes of weights that are frozen.
      state: bytes of what is trained and of the optimizer's state.
      synced: bytes that a weight sync brings to the rollout.
      programs: see `estimates.programs`.
      step: see `plan_figures.step_figures`.
    """

    trained: int
    base: float
    state: float
    synced: float
    programs: dict[str, Program]
    step: dict[str, Any]

    def peak(self, *, sampling: bool) -> tuple[float, str]:
        """Bytes at the peak of the largest program of sampling or of training, with what others hold; its name."""
        return max((p.hbm, name) for name, p in self.programs.items() if (name in SAMPLING) == sampling)

    def fits(self, topology: Topology) -> bool:
        return all(p.fits(topology.chip) for p in self.programs.values())

    def as_dict(self, topology: Topology) -> dict[str, Any]:
        training, sampling = self.peak(sampling=False), self.peak(sampling=True)
        return {
            "fits": self.fits(topology),
            "trained": self.trained,
            "base_bytes": self.base,
            "state_bytes": self.state,
            "sync_bytes": self.synced,
            "training_peak_bytes": training[0],
            "training_peak_program": training[1],
            "sampling_peak_bytes": sampling[0],
            "step": self.step,
        }


def compare(
    configs: Mapping[str, ConfigDict], topology: Topology, *, mean: float = 0, prompt: float = 0
) -> dict[str, Estimate]:
    """An estimate of each setting; `mean` and `prompt` as in `plan_figures.lengths_of`."""
    found = {}
    for name, config in configs.items():
        resolved = resolve(config)
        found[name] = estimate(resolved, topology, plan_figures.lengths_of(resolved, mean=mean, prompt=prompt))
    return found


def estimate(config: ConfigDict, topology: Topology, lengths: Lengths | None = None) -> Estimate:
    """The plan of a resolved config by arithmetic.

    Raises:
      ValueError: no compiler for TPUs here, which knows the slices, or sizes that do not go together.
    """
    config = with_known_shapes(config)
    layout = layout_on(config, topology)
    decoding, learner = make_decoding(layout), make_learner(layout)
    programs = estimates.programs(layout, decoding, resident(layout, learner, decoding))
    assumed = lengths or plan_figures.lengths_of(config)
    return Estimate(
        trained=sum(x.size for x in jax.tree.leaves(layout.trained_shapes)),
        base=0.0 if layout.abstract_base is None else bytes_on_a_device(layout.abstract_base),
        state=bytes_on_a_device(learner.like),
        synced=bytes_on_a_device(memory.synced_params(layout, decoding)),
        programs=programs,
        step=plan_figures.step_figures(layout, decoding, programs, topology, assumed),
    )
