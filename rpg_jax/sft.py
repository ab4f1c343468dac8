"""Trains a policy on demonstrations alone (supervised fine-tuning), from random weights or from model.path.

  python -m rpg_jax.sft --config=mine.py --config.warm_start.epochs=3 --out=sft
  python -m rpg_jax.train --config=mine.py --config.model.path=sft

It learns the rows that have a `demonstration`, a `completion` or `messages`, as the fields of warm_start say. It
measures the loss on such rows of the held-out sets, and the accuracy on rows with answers. The same command continues
an interrupted run. --out receives the policy in Hugging Face layout. In a run of RL, warm_start.enabled does the same.
"""

import argparse
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv`, by default those of the process; returns its exit code."""
    parser = cli.parser("sft", __doc__)
    parser.add_config("configs/tiny.py")
    parser.add_argument("--out", help="folder for the trained policy, in Hugging Face layout")
    return cli.run(sft, parser, argv, joins=True)


def sft(options: argparse.Namespace) -> int:
    """Names the run, resolves its config, trains, and exports the policy after the last update to `options.out`, if it
    is given. Returns 0, or 128 plus the number of the signal that stopped the run; nothing is exported then. Raises
    ValueError if the config does not fit or `options.out` holds files, and `cli.Ended` if the run cannot go on."""
    config, file, overrides = cli.config_files.load(options.config, options.overrides)
    # They load JAX: wrong flags need not wait for it.
    from rpg_jax.runs import policy, processes, run_folder, supervised
    from rpg_jax.runs.resolve import resolve

    if options.out:
        policy.free_folder(options.out)
    if config.warm_start.epochs is None:
        config.warm_start.epochs = supervised.PASSES
    if "seed" in overrides and "warm_start.seed" not in overrides:
        config.warm_start.seed = config.seed
    config = run_folder.named(config, file, overrides, kind="sft")
    processes.join(config)
    resolved = supervised.supervised_config(resolve(config))
    code = supervised.run(resolved)
    if options.out and not code:
        trained = policy.Policy.from_run(str(run_folder.of(resolved).home))
        trained.export(options.out)
        after = f"the policy after update {trained.step} is in {options.out}"
        print(f"{after}: --config.model.path={options.out} starts from it")
    return code


if __name__ == "__main__":
    sys.exit(main())
