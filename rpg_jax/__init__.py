"""RPG: regularized policy gradients (arXiv:2505.17508) for Qwen and Llama models on TPU, in JAX.

From Python, as docs/library.md shows:

  losses     every loss and advantage as a function of arrays, for a training loop of one's own
  train      a whole run, with problems and rewards as Python objects; its `Result` has metrics, weights and folder
  Policy     a run's or a published model's policy: sample, logprobs, export

A name is loaded when it is first used, so importing the package costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpg_jax import losses as losses
    from rpg_jax.runs.policy import Policy as Policy
    from rpg_jax.runs.policy import Sample as Sample
    from rpg_jax.runs.train_call import Result as Result
    from rpg_jax.runs.train_call import train as train

__version__ = "0.1.0"
__all__ = ["Policy", "Result", "Sample", "__version__", "losses", "train"]

_OBJECTS = {
    "Policy": "rpg_jax.runs.policy",
    "Sample": "rpg_jax.runs.policy",
    "Result": "rpg_jax.runs.train_call",
    "train": "rpg_jax.runs.train_call",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("rpg_jax.losses")
    if name in _OBJECTS:
        return getattr(importlib.import_module(_OBJECTS[name]), name)
    raise AttributeError(f"module 'rpg_jax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
