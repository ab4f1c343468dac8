"""Exports a run's adapters alone, as the library peft reads them."""

from rpg_jax import storage
from rpg_jax.models import hf_adapters
from rpg_jax.runs import run_folder
from rpg_jax.runs.policy import of_run


def export_adapters(run: str, out: str, *, step: int | None = None) -> int:
    """Writes the adapters of a checkpoint (default: the last) to the folder `out`, and returns its step.

    Raises:
      ValueError: `out` holds an adapter or is no local folder, the run trains all weights, or has no such checkpoint.
    """
    target = storage.local(out)
    if (target / hf_adapters.CONFIG).exists():
        raise ValueError(f"{target} already holds an adapter; choose another folder")
    with run_folder.opened(run) as folder:
        if not run_folder.read_config(folder.files).model.lora.rank:
            raise ValueError(f"{run} trains all weights (model.lora.rank=0) and has no adapters; leave --adapter out")
        policy = of_run(folder, step, merge=False)
        layout = policy.experiment.layout
        assert layout.lora is not None
        with layout.activate():
            base = layout.config.model.path
            hf_adapters.save_adapters(target, layout.model, layout.lora, policy.params, base=base)
    return policy.step
