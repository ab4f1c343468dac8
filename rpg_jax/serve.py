"""Serves a policy over gRPC with JetStream's protocol, and over HTTP to OpenAI's clients.

  python -m rpg_jax.serve --run=runs/tiny-rpg-reinforce-urkl-seed0 --port=9000
  python -m rpg_jax.serve --config=configs/x.py --config.model.path=/models/Qwen3-0.6B

JetStream's clients work against it; `rpg_jax.rollout.serving.client.GrpcRollout` also chooses seed, temperature and
cuts per request and gets log-probabilities back. --http_port=8000 adds /v1/completions, /v1/chat/completions,
/v1/models, /metrics and /health, which need aiohttp; docs/serving.md lists the fields of a request. The server listens
on the loopback interface. Another --host needs TLS, and an API key that clients send with every request:
--api_key_file, or the variable RPG_JAX_API_KEY. SIGTERM or Ctrl-C lets running requests end, for at most --grace
seconds. A second signal, more than a second later, ends the server at once.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rpg_jax.runs import cli

_CLOSING = 30.0  # seconds that closing may take after --grace


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("serve", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run whose checkpoint is served")
    parser.add_argument("--step", type=int, help="checkpoint to serve; default: the last")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port = cli.number(int, 0, 65535)
    parser.add_argument("--port", type=port, default=9000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--http_port", type=port, help="port of the HTTP endpoint, Prometheus's /metrics included")
    parser.add_argument("--certificate", help="PEM file of the TLS certificate chain")
    parser.add_argument("--private_key", help="PEM file of the certificate's private key")
    parser.add_argument("--api_key_file", help="file of the API key; default: the variable RPG_JAX_API_KEY")
    active, seconds = cli.number(int, 1), cli.number(float, 0)
    parser.add_argument("--weights_from", help="folder inside which HTTP clients may name weights to load")
    parser.add_argument("--max_active", type=active, default=1024, help="requests served or queued (default: 1024)")
    parser.add_argument("--temperature", type=seconds, default=1.0, help="default of a request; 0 is greedy")
    parser.add_argument("--grace", type=seconds, default=30.0, help="seconds for running requests at shutdown")
    return cli.run(serve, parser, argv)


def serve(options: argparse.Namespace) -> int:
    """Loads the weights, serves until a signal asks it to stop, and lets running requests end."""
    loaded = cli.load_config(options)
    if (options.run is None) == (loaded is None):
        raise ValueError("which policy? Give either --run=runs/NAME or --config=FILE with --config.model.path=MODEL")
    from rpg_jax.rollout.serving.access import Access, ApiKey  # loads JAX: wrong flags need not wait for it
    from rpg_jax.runs import policy, run_folder
    from rpg_jax.runs.policy_server import make_policy_server
    from rpg_jax.runs.stopping import StopRequest

    access = Access(options.host, options.certificate, options.private_key, ApiKey.find(options.api_key_file))
    access.tls()  # a broken file is said before the weights are loaded
    changes = {"rollout.driver": "orchestrator"}
    if loaded is None:
        with run_folder.opened(options.run) as folder:
            served = policy.of_run(folder, options.step, changes=changes)
        name = f"{options.run}, step {served.step},"
    else:
        model = loaded.config.model
        trains_tokenizer = not (model.tokenizer or model.path)  # on the problems' text
        with tempfile.TemporaryDirectory() as scratch:
            served = policy.of_config(loaded.config, Path(scratch), changes=changes, held_out=trains_tokenizer)
        name = model.path or "random weights"
    flags = ("temperature", "port", "max_active", "http_port", "weights_from")
    model_name = Path(options.run or served.experiment.config.model.path or "policy").name
    chosen = {flag: getattr(options, flag) for flag in flags}
    server = make_policy_server(served, name=model_name, access=access, **chosen)
    del served  # the server has its own weights, in the dtype that decodes
    also = "" if options.http_port is None else f", over HTTP on port {server.http_port}"
    with StopRequest(options.grace + _CLOSING, _give_up).listening() as stop:
        print(f"serving {name} on {options.host}:{server.port}{also}", flush=True)
        stop.wait()
        print("draining", flush=True)
        server.stop(options.grace)
    return 0


def _give_up() -> None:
    print("error: the server did not close in time; its process ends here", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
