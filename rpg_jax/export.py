"""Exports a run's policy as a folder in Hugging Face layout, which transformers loads as it is.

  python -m rpg_jax.export --run=runs/tiny-rpg-reinforce-urkl-seed0 --out=exported

The folder holds model*.safetensors, config.json and the tokenizer's files. It loads back by --config.model.path=FOLDER.
The adapters of a run with model.lora.rank are merged into their base. With --adapter they become a folder of their own,
which the library peft loads, and --config.model.lora.path=FOLDER.
"""

import argparse
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv`, by default those of the process; returns its exit code."""
    parser = cli.parser("export", __doc__)
    parser.add_argument("--run", help="folder of the run")
    parser.add_argument("--out", help="folder to write; must be new or empty")
    parser.add_argument("--step", type=int, help="checkpoint to export; default: the last")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights; default: the run's")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, as the library peft reads them")
    return cli.run(export, parser, argv)


def export(options: argparse.Namespace) -> None:
    """Writes the folder --out of `options`, the flags, and prints a line. Raises ValueError if flags are missing or
    clash, if the folder holds files, or if there is no such run or checkpoint, or with --adapter no adapter."""
    if options.run is None or options.out is None:
        raise ValueError("give the run and where to write it: --run=runs/NAME --out=FOLDER")
    from rpg_jax.runs.policy import Policy, free_folder  # loads JAX: wrong flags need not wait for it

    if options.adapter:
        if options.dtype:
            raise ValueError(f"adapters are written in float32: leave --dtype={options.dtype} or --adapter out")
        step = export_adapters(options.run, options.out, step=options.step)
        print(f"the adapters of step {step} of {options.run} are in {options.out}")
        return
    free_folder(options.out)  # before the weights are read
    policy = Policy.from_run(options.run, step=options.step)
    policy.export(options.out, dtype=options.dtype)
    print(f"step {policy.step} of {options.run} is in {options.out}")


def export_adapters(run: str, out: str, *, step: int | None = None) -> int:
    """Writes the adapters of a checkpoint to the folder `out`, as the library peft reads them, and returns the
    checkpoint's step. `run` is the run's folder or gs:// address; `step` None is the last one. Raises ValueError if
    `out` holds files or is no local folder, or if there is no such run or checkpoint, or the run trains all weights."""
    from rpg_jax import storage
    from rpg_jax.models import lora
    from rpg_jax.runs import policy, run_folder

    target = policy.free_folder(out)
    with run_folder.opened(run) as folder:
        if not run_folder.read_config(folder.files).model.lora.rank:
            raise ValueError(f"{run} trains all weights (model.lora.rank=0) and has no adapters; leave --adapter out")
        adapted = policy.of_run(folder, step, merge=False)
        layout = adapted.experiment.layout
        assert layout.lora is not None
        with storage.files.whole(target) as made, layout.activate():
            base = layout.config.model.path
            lora.save_adapters(made, layout.model, layout.lora, adapted.params, base=base)
    return adapted.step


if __name__ == "__main__":
    sys.exit(main())
