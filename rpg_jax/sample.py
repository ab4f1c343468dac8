"""Completes prompts of your own with a run's policy.

python -m rpg_jax.sample --run=runs/tiny-rpg-reinforce-urkl-seed0 --prompt=17+25= --prompt=8+9= --k=4
"""

import argparse
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("sample", __doc__)
    parser.add_argument("--run", required=True, help="folder of the run, local or gs://BUCKET/…")
    parser.add_argument("--prompt", action="append", required=True, help="text to complete; may be given again")
    parser.add_argument("--k", type=int, default=4, help="completions of each (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the last)")
    return cli.run(sample, parser, argv)


def sample(options: argparse.Namespace) -> None:
    """Prints each prompt and, indented, its completions."""
    from rpg_jax.runs.policy import Policy  # loads JAX: wrong flags need not wait for it

    how = {name: getattr(options, name) for name in ("k", "temperature", "seed")}
    policy = Policy.from_run(options.run, step=options.step)
    for prompt, samples in zip(options.prompt, policy.sample(options.prompt, **how), strict=True):
        print(prompt, *(f"  {sample.text}" for sample in samples), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
