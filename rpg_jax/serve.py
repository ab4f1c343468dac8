"""Serves a policy over gRPC with JetStream's protocol, and over HTTP to OpenAI's clients.

  python -m rpg_jax.serve --run=runs/tiny-rpg-reinforce-urkl-seed0 --port=9000
  python -m rpg_jax.serve --model=/models/Qwen3-0.6B --http_port=8000
  python -m rpg_jax.serve --config=configs/x.py --http_port=8000 --weights_from=FOLDER --idle=3600

JetStream's clients work against it. --http_port=8000 adds /v1/completions, /v1/chat/completions, /v1/models, /metrics
and /health, which need aiohttp; docs/serving.md lists the fields of a request, and `evaluate --server` asks there. The
server listens on the loopback interface. Another --host needs TLS, and an API key that clients send with every request:
--api_key_file, or the variable RPG_JAX_API_KEY. The variables RPG_JAX_CERTIFICATE and RPG_JAX_PRIVATE_KEY may hold the
texts of the PEM files.

Prompt and completion together may have as many tokens as the model has positions for (on a CPU at most 8192), or
--context. The server decodes as many completions at a time as fit the memory, or 1 GiB of it on a CPU.

The third line starts a server for a trainer with rollout.driver=servers: give it the trainer's own --config and
overrides, and as FOLDER the trainer's servers.weights. The server may start before the trainer. With --idle it ends
when the run is over; with --announce the trainer finds it (docs/servers.md).

SIGTERM or Ctrl-C lets running requests end, for at most --grace seconds. A second signal, more than a second later,
ends the server at once. The exit code is 0 after --idle, and 128 plus the signal's number after a signal.
"""

import argparse
import sys
from collections.abc import Sequence

from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv`, by default those of the process; returns its exit code."""
    parser = cli.parser("serve", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run whose checkpoint is served")
    parser.add_argument("--model", help="in place of a run a model, as --config.model.path takes it")
    parser.add_argument("--step", type=int, help="checkpoint to serve; default: the last")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port = cli.number(int, 0, 65535)
    parser.add_argument("--port", type=port, default=9000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--http_port", type=port, help="port of the HTTP endpoint, Prometheus's /metrics included")
    of_variable = "default: the text of the variable"
    parser.add_argument("--certificate", help=f"PEM file of TLS; {of_variable} RPG_JAX_CERTIFICATE")
    parser.add_argument("--private_key", help=f"PEM file of its private key; {of_variable} RPG_JAX_PRIVATE_KEY")
    parser.add_argument("--api_key_file", help="file of the API key; default: the variable RPG_JAX_API_KEY")
    active, seconds = cli.number(int, 1), cli.number(float, 0)
    longest = (
        "tokens of prompt and completion together (default: the model's positions; with --weights_from the config's)"
    )
    parser.add_argument("--context", type=cli.number(int, 2), help=longest)
    parser.add_argument("--weights_from", help="folder inside which HTTP clients may name weights to load")
    parser.add_argument("--max_active", type=active, default=1024, help="completions served or queued (default: 1024)")
    parser.add_argument("--temperature", type=seconds, default=1.0, help="default of a request; 0 is greedy")
    parser.add_argument("--grace", type=seconds, default=30.0, help="seconds for running requests at shutdown")
    idle = "end after so many seconds without a completion or a load (default: never); longer than a step's training"
    parser.add_argument("--idle", type=cli.number(float, 1), help=idle)
    parser.add_argument("--announce", metavar="FOLDER", help="write the HTTP address into a file of this folder")
    parser.add_argument("--announce_name", metavar="NAME", help="of this file (default: HOST-PORT)")
    return cli.run(serve, parser, argv)


def serve(options: argparse.Namespace) -> int:
    """Checks `options`, the flags of the command, serves until a signal or --idle ends the server, and returns the exit
    code. Raises ValueError if the flags do not name one policy or do not fit together, and as `policy_server.serve`."""
    if (options.announce or options.announce_name) and (options.http_port is None or not options.announce):
        raise ValueError("--announce=FOLDER, which --announce_name needs, is of the HTTP address: add --http_port=8000")
    if options.model is not None and options.config is None:  # the fields that a config would have
        options.config, options.overrides = "base", [f"--config.model.path={options.model}", *options.overrides]
    elif options.model is not None:
        raise ValueError("--model takes no --config: leave --model out, and add --config.model.path=MODEL")
    loaded = cli.load_config(options) if options.run is None or options.config is not None else None
    if (options.run is None) == (loaded is None):
        raise ValueError("which policy? Give one of --run=runs/NAME, --model=NAME and --config=FILE")
    if options.run is not None and options.overrides:
        raise ValueError(f"{options.overrides[0]}: a run has its own config, and --run takes no field of it")
    from rpg_jax.runs import policy_server  # loads JAX: wrong flags need not wait for it

    return policy_server.serve(options, loaded)


if __name__ == "__main__":
    sys.exit(main())
