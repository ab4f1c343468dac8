"""Completes prompts of your own with a run's policy, or chats: with the policy, or as the policy with an environment.

python -m rpg_jax.sample --run=runs/tiny-rpg-reinforce-urkl-seed0 --prompt=17+25= --prompt=8+9= --k=4
python -m rpg_jax.sample --chat --model=smollm2-135m   # a folder, OWNER/NAME on the hub, FILE.gguf
python -m rpg_jax.sample --chat --config=tiny --config.environment.name=module:Class   # you are the policy
python -m rpg_jax.sample --chat --run=runs/NAME   # the run's environment; without one, its policy answers you
"""

import argparse
import functools
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli, config_files


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("sample", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run, local or gs://BUCKET/…")
    parser.add_argument("--model", help="in place of a run a model, as --config.model.path takes it")
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
    if (options.run is None) == (options.model is None) or not options.prompt or loaded is not None:
        raise ValueError(
            "give --run=runs/NAME or --model=NAME, and one or more --prompt=TEXT; --config goes with --chat alone"
        )
    from rpg_jax.runs.policy import Policy  # loads JAX: wrong flags need not wait for it

    how = {name: getattr(options, name) for name in ("k", "temperature", "seed")}
    own = functools.partial(Policy.from_run, options.run, step=options.step)
    policy = Policy.from_pretrained(options.model) if options.model else own()
    for prompt, samples in zip(options.prompt, policy.sample(options.prompt, **how), strict=True):
        print(prompt)
        for sample in samples:
            cut = " …" if sample.finish_reason == "length" else ""
            print(f"  {sample.text.replace(chr(10), chr(10) + 4 * ' ')}{cut}")


def chat(options: argparse.Namespace, loaded: config_files.Loaded | None) -> None:
    """Plays the environment of a config or a run, or talks with the run's policy."""
    if (options.run, options.model, loaded).count(None) != 2:
        raise ValueError("--chat needs --run=runs/NAME, --model=NAME or --config=FILE, and one of them alone")
    from rpg_jax.runs import chatting  # loads JAX
    from rpg_jax.runs.policy import Policy

    if options.model:
        return chatting.talk(Policy.from_pretrained(options.model), options.temperature, options.seed)
    asked = options.step, options.temperature, options.seed
    chatting.chat(options.run, loaded and loaded.config, *asked, trust=options.trust)


if __name__ == "__main__":
    sys.exit(main())
