"""What `rpg_jax.serve` does with its command line: it opens the policy that the flags name, and serves it to an end."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rpg_jax.runs import cli, config_files

if TYPE_CHECKING:
    from rpg_jax.rollout.serving.access import Access
    from rpg_jax.rollout.serving.server import Server
    from rpg_jax.runs.policy import Policy

_CHANGES = {"rollout.driver": "orchestrator"}
_CLOSING = 30.0  # seconds that closing may take after --grace
_LOOK = 1.0  # seconds between two looks at the requests under way
_PASSED = ("temperature", "port", "max_active", "http_port", "weights_from")


def serve(options: argparse.Namespace) -> int:
    """Serves what the flags name; returns the exit code. Raises ValueError where they do not name a policy."""
    if (options.announce or options.announce_name) and (options.http_port is None or not options.announce):
        raise ValueError("--announce=FOLDER, which --announce_name needs, is of the HTTP address: add --http_port=8000")
    loaded = cli.load_config(options)
    if (options.run is None) == (loaded is None):
        raise ValueError("which policy? Give either --run=runs/NAME or --config=FILE with --config.model.path=MODEL")
    # These load JAX: wrong flags need not wait for it.
    from rpg_jax.rollout.serving import announced
    from rpg_jax.rollout.serving.access import CERTIFICATE, PRIVATE_KEY, Access, ApiKey, pem_file
    from rpg_jax.runs.policy_server import make_policy_server

    files = pem_file(options.certificate, CERTIFICATE), pem_file(options.private_key, PRIVATE_KEY)
    access = Access(options.host, *files, ApiKey.find(options.api_key_file))
    access.tls()  # a broken file, or a wrong folder, is said before the weights are loaded
    if options.announce:
        announced.file_of(options.announce, options.announce_name, options.http_port)
    served, name = _opened(options, loaded)
    model_name = Path(options.run or served.experiment.config.model.path or "policy").name
    chosen = {flag: getattr(options, flag) for flag in _PASSED}
    server = make_policy_server(served, name=model_name, access=access, **chosen)
    del served  # the server has its own weights, in the dtype that decodes
    return _until_the_end(server, name, access, options)


def _opened(options: argparse.Namespace, loaded: config_files.Loaded | None) -> tuple[Policy, str]:
    """The policy that the flags name, and its name."""
    from rpg_jax.runs import policy, run_folder

    if loaded is None:
        with run_folder.opened(options.run) as folder:
            served = policy.of_run(folder, options.step, changes=_CHANGES)
        return served, f"{options.run}, step {served.step},"
    model = loaded.config.model
    trains_tokenizer = not (model.tokenizer or model.path)  # on the problems' text
    with tempfile.TemporaryDirectory() as scratch:
        served = policy.of_config(loaded.config, Path(scratch), changes=_CHANGES, held_out=trains_tokenizer)
    return served, model.path or "random weights"


def _until_the_end(server: Server, name: str, access: Access, options: argparse.Namespace) -> int:
    """Serves until a signal or --idle ends it, and lets running requests end; returns the exit code."""
    from rpg_jax.rollout.serving.announced import address_of, announced, file_of
    from rpg_jax.runs.stopping import StopRequest

    also = "" if options.http_port is None else f", over HTTP on port {server.http_port}"
    with StopRequest(options.grace + _CLOSING, _give_up).listening() as stop, contextlib.ExitStack() as closing:
        closing.callback(server.stop, options.grace)  # once nobody is sent here any more
        if options.announce:
            file = file_of(options.announce, options.announce_name, server.http_port)
            address = address_of(options.host, server.http_port, tls=access.certificate is not None)
            closing.enter_context(announced(file, address))
        print(f"serving {name} on {options.host}:{server.port}{also}", flush=True)
        while not stop.wait(None if options.idle is None else _LOOK) and server.idle_seconds < options.idle:
            pass
        print("draining" if stop.signal else f"no request for {options.idle:g} s: draining", flush=True)
    return 128 + stop.signal if stop.signal else 0


def _give_up() -> None:
    print("error: the server did not close in time; its process ends here", file=sys.stderr)
