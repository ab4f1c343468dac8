"""Completes prompts of your own with a run's policy, or chats: with the policy, or as the policy with an environment.

python -m rpg_jax.sample --run=runs/tiny-rpg-reinforce-urkl-seed0 --prompt=17+25= --prompt=8+9= --k=4
python -m rpg_jax.sample --chat --config=tiny --config.environment.name=module:Class   # you are the policy
python -m rpg_jax.sample --chat --run=runs/NAME   # the run's environment; without one, its policy answers you
"""

import argparse
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli, config_files


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("sample", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run, local or gs://BUCKET/…")
    parser.add_argument("--prompt", action="append", help="text to complete; may be given again")
    parser.add_switch("chat", default=False, help="talk turn by turn; an empty line ends it")
    parser.add_argument("--k", type=int, default=4, help="completions of each (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the last)")
    parser.add_switch("trust", default=False, help=cli.TRUST)
    return cli.run(sample, parser, argv)


def sample(options: argparse.Namespace) -> None:
    """Prints each prompt and, indented, its completions, of which … marks those that the limit cut; or chats."""
    loaded = cli.load_config(options)
    if options.chat:
        chat(options, loaded)
        return
    if options.run is None or not options.prompt or loaded is not None:
        raise ValueError("give --run=runs/NAME and one or more --prompt=TEXT; --config goes with --chat alone")
    from rpg_jax.runs.policy import Policy  # loads JAX: wrong flags need not wait for it

    how = {name: getattr(options, name) for name in ("k", "temperature", "seed")}
    policy = Policy.from_run(options.run, step=options.step)
    for prompt, samples in zip(options.prompt, policy.sample(options.prompt, **how), strict=True):
        print(prompt)
        for sample in samples:
            cut = " …" if sample.finish_reason == "length" else ""
            print(f"  {sample.text.replace(chr(10), chr(10) + 4 * ' ')}{cut}")


def chat(options: argparse.Namespace, loaded: config_files.Loaded | None) -> None:
    """Plays the environment of a config or a run, or talks with the run's policy."""
    if (options.run is None) == (loaded is None):
        raise ValueError("--chat needs --run=runs/NAME or --config=FILE, and not both")
    from rpg_jax.runs import chatting  # loads JAX

    asked = options.step, options.temperature, options.seed
    chatting.chat(options.run, loaded and loaded.config, *asked, trust=options.trust)


if __name__ == "__main__":
    sys.exit(main())
