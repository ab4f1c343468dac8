"""What differs between the programs that serve completions, each declared once.

vLLM's terms were met with vLLM 0.32.0 on a CPU (`tests/end_to_end/test_vllm.py`). SGLang's are those of its pages on RL
of 2026, and SGLang never ran against this code.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rpg_jax.types import Sampling

Call = tuple[str, Mapping[str, Any]]
"""A path, and the JSON object that is posted there."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One program.

    Attributes:
      loads: from a folder of weights and a label to the calls, in order, that replace the server's weights by those.
        They end what the server still samples, and empty its cache of prefixes.
      prefetch: to the call that makes the server read the weights while it samples with others; None if it cannot.
      needs: what must serve, and how it must be started for `loads`, as a sentence.
      cut: the log-probabilities that it can return are those after top-p, top-k and min-p too.
      counters: it is this project's own: it draws this project's random numbers, and every answer has the checksum of
        the weights. The others are probed after each load.
      refuses: what an answer 500 to a load says if the next one would be the same.
      health: what is asked for the health of the program that samples, once it should be ready. vLLM's /health is that
        of its HTTP server, which answers while the engine hangs.
      head: a tied model's folder has the head as a tensor of its own too. vLLM keeps a packed copy of the head on a
        CPU, which a reload replaces only where the folder has the tensor.
    """

    loads: Callable[[str, str], list[Call]]
    needs: str
    prefetch: Callable[[str, str], Call] | None = None
    cut: bool = True
    counters: bool = False
    refuses: str | None = None
    health: str = "/health"
    head: bool = False

    def check(self, sampling: Sampling, name: str) -> None:
        """Raises ValueError if the server cannot return the log-probabilities of what it samples."""
        cuts = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
        on = [f"rollout.{field}={value:g}" for field, (value, off) in cuts.items() if value != off]
        if on and not self.cut:
            raise ValueError(
                f"servers.kind={name} returns log-probs from before {' and '.join(on)}, and training needs those of "
                "what is sampled: switch it off, or choose another kind"
            )


def _vllm(folder: str, label: str) -> list[Call]:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [("/pause?mode=abort", {}), ("/collective_rpc", reload), ("/reset_prefix_cache", {}), ("/resume", {})]


def _from_disk(folder: str, label: str) -> list[Call]:
    return [("/update_weights_from_disk", {"model_path": folder, "weight_version": label})]


def _read_ahead(folder: str, label: str) -> Call:
    return "/update_weights_from_disk", {"model_path": folder, "weight_version": label, "prefetch": True}


def _sglang(folder: str, label: str) -> list[Call]:
    [(path, body)] = _from_disk(folder, label)
    return [(path, {**body, "abort_all_requests": True, "flush_cache": True})]


KINDS = {
    "vllm": Kind(
        _vllm,
        "servers.kind=vllm needs vLLM with a model of the trainer's shapes, which sees the folder servers.weights, "
        "started with VLLM_SERVER_DEV_MODE=1, where only the trainer reaches it",
        refuses="collective_rpc method failed",
        health="/is_paused",
        head=True,
    ),
    "sglang": Kind(
        _sglang,
        "servers.kind=sglang needs SGLang with a model of the trainer's shapes, which sees the folder servers.weights",
        cut=False,
    ),
    "rpg_jax": Kind(
        _from_disk,
        "servers.kind=rpg_jax needs this project's server with a model of the trainer's shapes, started with "
        "--weights_from=FOLDER, the folder servers.weights",
        prefetch=_read_ahead,
        counters=True,
    ),
}
"""By the value of the config field `servers.kind`."""
