"""Evaluates a policy on held-out problems: Mean@k, pass@k, maj@k, with errors over problems.

  python -m rpg_jax.evaluate --run=runs/tiny-rpg-reinforce-urkl-seed0 --k=32
  python -m rpg_jax.evaluate --folder=Qwen3-4B --config=configs/qwen3_4b_2k.py --sets=AIME25=aime25.parquet
  python -m rpg_jax.evaluate --run=runs/NAME --server=http://localhost:8000

The policy is a run's checkpoint, a folder in Hugging Face layout, or the one that `python -m rpg_jax.serve` serves.
The results are completions.jsonl, one object per completion with its verdict, scores.md and scores.json. The same
command continues an evaluation that was killed, to the same bytes; docs/evaluation.md describes other layouts.
"""

import argparse
import sys
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv`, by default those of the process; returns its exit code."""
    parser = cli.parser("evaluate", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run whose checkpoint is evaluated")
    parser.add_argument("--step", type=int, help="checkpoint to evaluate; default: the last")
    parser.add_argument("--folder", help="weights, as model.path; --config says problems, limits, verifier")
    parser.add_argument("--server", help="http://HOST:PORT that samples; --run or --folder says with which tokenizer")
    parser.add_argument("--server_certificate", help="PEM file to trust for an https address")
    parser.add_argument("--api_key_file", help="file of the server's API key; default: the variable RPG_JAX_API_KEY")
    parser.add_argument("--sets", help="NAME=SOURCE, separated by commas; default: the config's held-out sets")
    parser.add_argument("--rewards", help="as rewards.parts, or FILE.py:function; default: the config's")
    count = cli.number(int, 1)
    parser.add_argument(
        "--k", type=count, help="completions per problem; default: as often as its source repeats it, else evaluation.k"
    )
    parser.add_argument("--problems", type=count, help="of each set; default: all of --sets, else evaluation.problems")
    parser.add_argument("--temperature", type=cli.number(float, 0), default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--max_tokens", type=count, help="of a completion; default: rollout.max_tokens")
    parser.add_argument("--seed", type=int, help="of the completions; default: the config's")
    parser.add_argument("--out", help="folder to write; default: a folder of its own beside the run")
    parser.add_switch("trust", help=cli.TRUST)
    return cli.run(evaluate, parser, argv)


def evaluate(options: argparse.Namespace) -> int:
    """Checks the flags, evaluates the policy, and writes the results. `options` has the flags of the command. Returns
    the exit code: 0, or 130 if Ctrl-C stopped the evaluation, which the same command continues. Raises ValueError if
    the flags do not fit together, and the errors of `policy.of_run`, `policy.of_config` and `evaluation.evaluate`."""
    if (options.run is None) == (options.folder is None):
        raise ValueError("which policy? Give either --run=runs/NAME or --folder=MODEL with --config=FILE")
    if options.run is not None and (options.config or options.overrides):
        raise ValueError("a run has its own config: leave --config out, and set --sets, --k, --max_tokens, …")
    loaded = cli.load_config(options)
    if options.folder is not None and loaded is None:
        raise ValueError("--folder needs --config=FILE for problems, limits and verifier: configs/qwen3_4b_2k.py")
    from rpg_jax import storage  # these load JAX: wrong flags need not wait for it
    from rpg_jax.runs import evaluation, policy, run_folder

    if options.out is not None:
        storage.local(options.out)
    needed: dict[str, Any] = {"held_out": True, "weights": options.server is None}
    how: dict[str, Any] = {"k": options.k, "out": options.out, "server": options.server}
    how |= {"certificate": options.server_certificate, "api_key_file": options.api_key_file}
    if loaded is None:
        with run_folder.opened(options.run) as home:
            kept = run_folder.read_config(home.files)
            opened = policy.of_run(home, options.step, changes(options, kept), **needed, trust=options.trust)
            found = evaluation.evaluate(opened, home.home.name, home, **how)
    else:
        fields = {"model.path": options.folder, **changes(options, loaded.config, loaded.overrides)}
        with storage.Folder(loaded.config.run.dir) as home, tempfile.TemporaryDirectory() as scratch:
            opened = policy.of_config(loaded.config, Path(scratch), fields, **needed)
            found = evaluation.evaluate(opened, Path(options.folder).name, home, **how)
    return 130 if found is None else 0  # as after Ctrl-C: the same command continues


def changes(options: argparse.Namespace, config: ConfigDict, given: Container[str] = ()) -> dict[str, Any]:
    """{dotted name: value} of the fields of `config` that the flags in `options` replace. A flag that is None replaces
    none, but --sets without --problems takes all problems, and --rewards unsets `rewards.accuracy`. If then another
    part decides, `rewards.right_above` stays in [0, 1) alone, where 1 is right, 0 and -1 are wrong. Fields in
    `given` stay. Raises ValueError if --rewards names a file that is not there."""
    from rpg_jax.rewards.callables import in_file
    from rpg_jax.rewards.verifiers import deciding_part
    from rpg_jax.runs import config_files
    from rpg_jax.runs.arguments import reward_arguments

    sets = options.sets is not None
    fields = {
        "evaluation.temperature": options.temperature,
        "evaluation.problems": options.problems or (10**9 if sets else None),
        "rollout.max_tokens": options.max_tokens,
        "rewards.parts": options.rewards and in_file(options.rewards),
        "seed": options.seed,
        "task.name": "files" if sets else None,
        "task.held_out_sets": options.sets,
    }
    found = {name: value for name, value in fields.items() if value is not None}
    if options.rewards and "rewards.accuracy" not in given:
        found["rewards.accuracy"] = None
    high, new = config.rewards.right_above, config_files.changed(config, found)
    decides = {deciding_part(reward_arguments(c)[0], c.rewards.accuracy) for c in (config, new)}
    if not (high is None or 0 <= high < 1 or len(decides) == 1 or "rewards.right_above" in given):
        found["rewards.right_above"] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
