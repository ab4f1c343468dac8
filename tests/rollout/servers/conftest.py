"""A stand-in that speaks vLLM's form, with faults on demand; what it samples depends on prompt and seed alone."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import pytest

from rpg_jax.rollout import Request
from rpg_jax.rollout.servers.balance import Balance
from rpg_jax.rollout.servers.client import Client
from rpg_jax.rollout.servers.rollout import ServersRollout
from rpg_jax.rollout.servers.server import KINDS
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.types import Sampling

PARAMS = {"w": np.arange(6, dtype=np.float32)}
REQUEST = Request(
    [np.arange(1, 2 + i % 5, dtype=np.int32) for i in range(8)],
    prompt_ids=range(100, 108),
    group_size=2,
    sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=4, stop_token_ids=(0,)),
    seed=1,
    step=6,
)


def sampled(body):
    """The choice of a request: four tokens, or two of which the last stops."""
    rng = np.random.default_rng([body["seed"], *body["prompt"]])
    tokens = rng.integers(1, 90, 4).tolist()
    if rng.random() < 0.5:
        tokens = [tokens[0], 0]
    logprobs = (-rng.random(len(tokens))).astype(np.float32).tolist()
    return {
        "index": 0,
        "token_ids": tokens,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": "stop" if tokens[-1] == 0 else "length",
    }


class StandIn(ThreadingHTTPServer):
    """Calls `fault(path, body)` first, which may return a status, or a choice in place of the sampled one."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, fault=lambda path, body: None, port=0, host="127.0.0.1"):
        self.fault, self.calls, self.lock = fault, [], threading.Lock()
        super().__init__((host, port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://{host}:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # a client that has gone

    def paths(self):
        return [path for path, _ in self.calls]

    def end(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Content-Type"] != "application/json":
            self.send_error(400, "Unsupported Media Type: Only 'application/json' is allowed")  # as vLLM does
            return
        with self.server.lock:
            self.server.calls.append((self.path, body))
        self.answer(body)

    def answer(self, body):
        found = self.server.fault(self.path, body)
        if found == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, answer = found if isinstance(found, tuple) else (200, found)
        if answer is None:
            answer = {"choices": [sampled(body)]} if self.path == "/v1/completions" else None
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in():
    """A server in a thread."""
    made = []

    def make(*args, **options):
        made.append(StandIn(*args, **options))
        return made[-1]

    yield make
    for server in made:
        server.end()


@pytest.fixture
def served(tmp_path):
    """A rollout by servers, with weights of its own; `options` are those of the balance and of calls."""
    made = []

    def make(*urls, kind=KINDS["vllm"], params=PARAMS, store=None, timeout=20.0, key=None, model=None, **options):
        client = Client(timeout=timeout, key=key)
        addresses = urls if not callable(urls[0]) else urls[0]
        balance = Balance(addresses, client, kind, **{"parallel": 4, "patience": 20.0, "rest": 0.01, **options})
        params, store = jax.tree.map(jax.numpy.asarray, params), store or Npy()
        weights = WeightFolders(params, tmp_path / "weights", store, balance.use)
        sizes = {"capacity": 48, "vocab_size": 100 if params.keys() == PARAMS.keys() else 50}
        rollout = ServersRollout(balance, weights, model=model, counters=kind.counters, **sizes)
        rollout.sync_weights(params, 3)
        made.append(rollout)
        return rollout

    yield make
    for rollout in made:
        rollout.close()


def first_of(rollout):
    """The first server as the rollout's balance knows it."""
    return next(iter(rollout._balance._servers.values()))


class Npy:
    """A store of one array."""

    def fetch(self, params):
        return [np.asarray(params["w"])]

    def write(self, folder, blocks):
        np.save(folder / "w.npy", blocks[0])
        return blocks[0].nbytes

    def complete(self, folder):
        (folder / "config.json").write_text("{}", encoding="utf-8")
