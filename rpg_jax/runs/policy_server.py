"""Serves a policy until a signal or an idle time: its JetStream driver behind gRPC and HTTP."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rpg_jax import models, storage
from rpg_jax.rollout.jetstream.adapter import JetstreamMetricsCollector
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.access import (
    CERTIFICATE,
    PRIVATE_KEY,
    Access,
    ApiKey,
    address_of,
    announce,
    file_of,
    pem_file,
)
from rpg_jax.rollout.serving.server import Server
from rpg_jax.runs import config_files, policy, run_folder
from rpg_jax.runs.experiment import make_rollout
from rpg_jax.runs.layout import Layout
from rpg_jax.runs.memory import bytes_on_a_device, cache_bytes, decoding_params, has_copy, make_decoding
from rpg_jax.runs.policy import Policy
from rpg_jax.runs.processes import StopRequest, fast_dtype
from rpg_jax.training.state import shardings_of

_CHANGES = {"rollout.driver": "orchestrator"}
_CPU_CONTEXT = 8192
_CPU_CACHE = 1 << 30  # bytes of keys and values: a CPU copies them now and then
_CLOSING = 30.0  # seconds that closing may take after --grace
_LOOK = 1.0  # seconds between two looks at the requests under way


def serve(options: argparse.Namespace, loaded: config_files.Loaded | None) -> int:
    """Serves the policy of the config `loaded`, or for None of the run `options.run`. `options` are the flags of
    `rpg_jax.serve`. Blocks until a signal or the idle time ends the server, and then at most --grace seconds for
    running requests. Returns 0, or 128 plus the signal's number. Raises ValueError if a certificate, the API key's
    file, a port, a folder, the run or the model does not fit."""
    files = pem_file(options.certificate, CERTIFICATE), pem_file(options.private_key, PRIVATE_KEY)
    access = Access(options.host, *files, ApiKey.find(options.api_key_file))
    access.tls()  # a broken file, a wrong folder or a taken port is said before the weights are loaded
    for flag in ("port", "http_port"):
        access.check_free(flag, getattr(options, flag))
    if options.announce:
        file_of(options.announce, options.announce_name, options.http_port)
    home = None if options.weights_from is None else storage.local(options.weights_from).resolve()
    served, name = _opened(options, loaded)
    if home is not None:
        served = with_room_to_load(served)
    if options.context is not None or home is None:
        served = with_context(served, options.context)
    model_name = Path(options.run or served.experiment.config.model.path or "policy").name
    chosen = {flag: getattr(options, flag) for flag in ("temperature", "port", "max_active", "http_port")}
    server = _make_policy_server(served, home=home, name=model_name, access=access, **chosen)
    del served  # the server has its own weights, in the dtype that decodes
    return _until_the_end(server, name, access, options)


def _opened(options: argparse.Namespace, loaded: config_files.Loaded | None) -> tuple[Policy, str]:
    """The policy that the flags name, and the name of the policy for the screen."""
    if loaded is None:
        with run_folder.opened(options.run) as folder:
            served = policy.of_run(folder, options.step, changes=_CHANGES)
        return served, f"{options.run}, step {served.step},"
    model = loaded.config.model
    if options.model and "model.compute_dtype" not in loaded.overrides:
        loaded.config.model.compute_dtype = fast_dtype()[0]
    trains_tokenizer = not (model.tokenizer or model.path)  # from the text of the problems
    with tempfile.TemporaryDirectory() as scratch:
        served = policy.of_config(loaded.config, Path(scratch), changes=_CHANGES, held_out=trains_tokenizer)
    return served, model.path or "random weights"


def with_room_to_load(served: Policy) -> Policy:
    """A copy of `served` whose slots leave room on a device for the weights of a load beside the present. A server that
    decodes with a copy has this room already. Raises ValueError if a device cannot hold the weights twice."""
    layout, decoding = served.experiment.layout, make_decoding(served.experiment.layout)
    if layout.device_memory is None or has_copy(layout, decoding):
        return served
    gib, own = layout.device_memory / 2**30, bytes_on_a_device(decoding_params(layout, decoding))
    if layout.device_memory < 2 * own:
        twice = f"--weights_from: a load needs the weights twice, {2 * own / 2**30:.1f} GiB on a device with {gib:.1f}"
        raise ValueError(f"{twice}: spread them over more devices, or lower model.compute_dtype")
    layout = dataclasses.replace(layout, device_memory=layout.device_memory - own)
    return dataclasses.replace(served, experiment=dataclasses.replace(served.experiment, layout=layout))


def with_context(served: Policy, tokens: int | None) -> Policy:
    """A copy of `served` with room for prompt and completion of `tokens` tokens together, half of them each. None: as
    many as the model has positions for, and at most 8192 on a CPU. Raises ValueError if the model has fewer positions.
    A device has `rollout.slots` slots (unset: as many as a step of training needs, on a CPU at most 128), but no more
    than fit its memory, or 1 GiB on a CPU."""
    layout = served.experiment.layout
    positions = layout.model.rope.max_position_embeddings
    on_cpu = layout.device_memory is None
    tokens = (min(positions, _CPU_CONTEXT) if on_cpu else positions) if tokens is None else tokens
    if tokens > positions:
        raise ValueError(f"--context={tokens}: the model has positions for {positions} tokens, give at most as many")
    config = layout.config.copy_and_resolve_references()
    config.task.max_prompt_tokens, config.rollout.max_tokens = tokens - tokens // 2, tokens // 2
    asked, config.rollout.slots, config.rollout.threads = config.rollout.slots, None, 1
    wide = dataclasses.replace(layout, config=config)
    decoding = make_decoding(wide, asked)
    devices = 1 if decoding.mesh is None else decoding.mesh.size
    fitting = usual = decoding.slots // devices
    if on_cpu:
        one = dataclasses.replace(decoding, slots=devices)
        fitting = int(_CPU_CACHE // cache_bytes(layout, one))
    config.rollout.slots = max(1, min(asked or usual, fitting))
    return dataclasses.replace(served, experiment=dataclasses.replace(served.experiment, layout=wide))


def _until_the_end(server: Server, name: str, access: Access, options: argparse.Namespace) -> int:
    """Serves until a signal or --idle ends `server`, and lets running requests end. Returns the exit code."""
    also = "" if options.http_port is None else f", over HTTP on port {server.http_port}"
    with StopRequest(options.grace + _CLOSING, _give_up).listening() as stop, contextlib.ExitStack() as closing:
        closing.callback(server.stop, options.grace)  # runs last: by then no new client finds the address
        if options.announce:
            file = file_of(options.announce, options.announce_name, server.http_port)
            address = address_of(options.host, server.http_port, tls=access.certificate is not None)
            closing.enter_context(announce(file, address))
        print(f"serving {name} on {options.host}:{server.port}{also}", flush=True)
        room, slots = server.decoding.capacity, server.decoding.slots
        print(f"prompt and completion: up to {room} tokens; {slots} completions are decoded at a time", flush=True)
        while not stop.wait(None if options.idle is None else _LOOK) and server.idle_seconds < options.idle:
            pass
        print("draining" if stop.signal else f"no request for {options.idle:g} s: draining", flush=True)
    return 128 + stop.signal if stop.signal else 0


def _give_up() -> None:
    print("error: the server did not close in time; its process ends here", file=sys.stderr)


def _make_policy_server(served: Policy, *, temperature: float, home: Path | None, **options: Any) -> Server:
    """Starts a server of `served`, whose config must name the driver "orchestrator". A request without a temperature
    has `temperature`. HTTP clients may load weights from folders inside `home`, a local folder; None: from
    nowhere. `options` are further arguments of `Server`."""
    experiment = served.experiment
    with experiment.layout.activate():
        made = make_rollout(experiment.layout, served.params)
        assert isinstance(made, JetStreamRollout), "the driver is the orchestrator"
        rollout = JetStreamRollout(made.engine, keep_state=True, metrics_collector=JetstreamMetricsCollector())
        chat, thinking = experiment.tokenizer.chat, experiment.config.task.thinking
        options["render"] = None if chat is None else functools.partial(chat, thinking=thinking)
        if home is not None:
            options["disk"] = _Disk(experiment.layout, rollout, home)
        return Server(rollout, experiment.tokenizer, experiment.sampling(temperature), **options)


class _Disk:
    """Reads weights from folders inside `home`, and gives them to `rollout`."""

    def __init__(self, layout: Layout, rollout: JetStreamRollout, home: Path):
        self._layout, self._rollout, self._home = layout, rollout, home

    def read(self, folder: str) -> models.InHostMemory:
        """Reads weights into host memory. Raises ValueError if `folder` or a file in it is not inside `home`, or if the
        folder is not complete or has another model."""
        try:
            path = Path(folder).resolve()
            inside = [path, *(file.resolve() for file in path.iterdir())] if path.is_dir() else [path]
        except (OSError, RuntimeError, ValueError) as error:  # a name without end, a link to itself, a null byte
            raise ValueError(f"{folder[:100]} is no folder: {type(error).__name__}") from error
        if not all(one.is_relative_to(self._home) for one in inside):
            raise ValueError(f"{folder} is not inside {self._home}, the folder of --weights_from")
        if not (path / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json, which is written last: it is not there, or not complete")
        return models.read(path, self._layout.model)

    def swap(self, weights: models.InHostMemory) -> int:
        with self._layout.activate():
            dtype = jnp.dtype(self._layout.config.model.compute_dtype)  # decoding's dtype; a sync would cast to it
            params = weights.placed(dtype, shardings_of(self._layout.weights))
            self._rollout.sync_weights(params, self._rollout.weights.version + 1)
            return self._rollout.weights.checksum()
