"""Evaluates a policy on held-out problems: Mean@k, pass@k, maj@k, with errors over problems.

  python -m rpg_jax.evaluate --run=runs/tiny-rpg-reinforce-urkl-seed0 --k=32
  python -m rpg_jax.evaluate --run=runs/tiny-rpg-reinforce-urkl-seed0 --steps=all
  python -m rpg_jax.evaluate --folder=Qwen3-4B --config=configs/qwen3_4b_2k.py --sets=AIME25=aime25.parquet
  python -m rpg_jax.evaluate --run=runs/NAME --server=localhost:9000

The policy is a run's checkpoint, a folder in Hugging Face layout, or the one that `python -m rpg_jax.serve` serves.
The results are completions.jsonl, one object per completion with its verdict, scores.md and scores.json. The same
command continues an evaluation that was killed, to the same bytes; docs/evaluation.md describes other layouts.
"""

import sys
from collections.abc import Sequence

from rpg_jax.runs import cli, evaluate_command


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("evaluate", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run whose checkpoint is evaluated")
    parser.add_argument("--step", type=int, help="checkpoint to evaluate; default: the last")
    parser.add_argument("--steps", help="100,200, or all: a table and a plot of the scores of these checkpoints")
    parser.add_argument("--folder", help="weights, as model.path; --config says problems, limits, verifier")
    parser.add_argument("--server", help="host:port that samples; --run or --folder says with which tokenizer")
    parser.add_argument("--server_certificate", help="PEM file that proves the server; without it no TLS")
    parser.add_argument("--api_key_file", help="file of the server's API key; default: the variable RPG_JAX_API_KEY")
    parser.add_argument("--sets", help="NAME=SOURCE, separated by commas; default: the config's held-out sets")
    parser.add_argument("--rewards", help="as rewards.parts, e.g. by_source; default: the config's")
    count = cli.number(int, 1)
    parser.add_argument(
        "--k", type=count, help="completions per problem; default: as often as its source repeats it, else evaluation.k"
    )
    parser.add_argument("--problems", type=count, help="of each set; default: all of --sets, else evaluation.problems")
    parser.add_argument("--temperature", type=cli.number(float, 0), default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--max_tokens", type=count, help="of a completion; default: rollout.max_tokens")
    parser.add_argument("--seed", type=int, help="of the completions; default: the config's")
    parser.add_argument("--out", help="folder to write; default: a folder of its own beside the run")
    return cli.run(evaluate_command.evaluate, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
