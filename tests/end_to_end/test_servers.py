"""Real trainers whose completions come from a real server on loopback, in its own form and in that of vLLM."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.end_to_end.fleet_chaos import SETTINGS
from tests.end_to_end.test_processes import MICRO, assert_same_run, printed, records, reserve_port, run, samples, start
from tests.end_to_end.whole_runs import ROOT, environment

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow

STEPS = (*SETTINGS, "--config.train.steps=6", "--config.mesh.fsdp=1", "--config.mesh.replica=1")
SERVES = [s for s in SETTINGS if s.startswith("--config.model.")] + ["--config.warm_start.seed=3"]  # other weights


class ServerProcess:
    """`rpg_jax.serve` on one port, which may be killed and started again."""

    def __init__(self, folder):
        self._folder, self._process = folder, None
        reserved, self.port = reserve_port()
        reserved.close()
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def start(self):
        """Returns when it serves."""
        flags = [f"--config={MICRO}", *SERVES, "--port=0", f"--http_port={self.port}"]
        flags += [f"--weights_from={self._folder / 'weights'}"]
        command = [sys.executable, "-m", "rpg_jax.serve", *flags]
        env = environment(self._folder / "server")
        options = {"cwd": ROOT, "env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, **options)
        line = self._process.stdout.readline()
        assert f"over HTTP on port {self.port}" in line, line + self._process.communicate(timeout=60)[0]
        threading.Thread(target=self._process.stdout.read, daemon=True).start()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with ServerProcess(folder) as process:
        process.folder = folder
        yield process


def by_server(server, kind, port, name):
    """The overrides of a run that this server samples."""
    return (
        "--config.rollout.driver=servers",
        f"--config.servers.kind={kind}",
        f"--config.servers.urls=http://127.0.0.1:{port}",
        f"--config.servers.weights={server.folder / 'weights'}",
        f"--config.run.name={name}",
    )


def test_a_server_that_is_killed_and_started_anew_samples_what_the_trainer_alone_samples(server, tmp_path):
    alone = run(tmp_path, 1, *STEPS, "--config.run.name=alone", devices=1)
    trainer = start(tmp_path, 1, *STEPS, *by_server(server, "rpg_jax", server.port, "served"), devices=1)
    metrics = tmp_path / "served" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert trainer[0].poll() is None, printed(trainer, timeout=60)
        time.sleep(0.05)
    server.kill()  # it comes back with random weights
    server.start()
    (output,) = printed(trainer, timeout=600)
    assert trainer[0].returncode == 0, output
    assert sum(r.get("servers/failures", 0) for r in records(tmp_path / "served")) > 0
    assert_same_run(tmp_path / "alone", tmp_path / "served")
    checksum = [re.search("weights checksum: .*", text).group() for text in (alone[0], output)]
    assert checksum[0] == checksum[1]


class AsVLLM(ThreadingHTTPServer):
    """Before this project's server: vLLM's paths. `loads` is False for a server that says so and loads nothing."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, port, loads=True):
        self.port, self.loads = port, loads
        super().__init__(("127.0.0.1", 0), Translate)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Translate(BaseHTTPRequestHandler):
    def do_POST(self):
        path, body = self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = 200, b"{}"
        if path == "/collective_rpc" and self.server.loads:
            assert body["method"] == "reload_weights"
            path, body = "/update_weights_from_disk", {"model_path": body["kwargs"]["weights_path"]}
        if path in ("/v1/completions", "/update_weights_from_disk"):
            url = f"http://127.0.0.1:{self.server.port}{path}"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as reply:
                    content = reply.read()
            except urllib.error.HTTPError as error:
                status, content = error.code, error.read()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_in_the_form_of_vllm_a_run_trains_on_the_policy_s_own_completions_and_repeats(server, tmp_path):
    for name in ("one", "two"):
        overrides = by_server(server, "vllm", AsVLLM(server.port).server_address[1], name)
        run(tmp_path, 1, *STEPS, *overrides, devices=1)
        assert all(r["sampler_gap"] < 1e-4 for r in records(tmp_path / name) if r["step"])
    assert samples(tmp_path / "one") == samples(tmp_path / "two")


def test_a_server_that_only_says_that_it_loads_the_weights_ends_the_run(server, tmp_path):
    port = AsVLLM(server.port, loads=False).server_address[1]
    trainer = start(tmp_path, 1, *STEPS, "--config.seed=5", *by_server(server, "vllm", port, "stale"), devices=1)
    (output,) = printed(trainer, timeout=600)
    assert trainer[0].returncode and "sampler and trainer disagree by" in output, output


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            ["--config.servers.kind=vllm"],
            r"error: http://\S+/pause\?mode=abort answered 404: .*\(servers.kind=vllm needs vLLM with .*\)",
        ),
        (
            ["--config.servers.model=other"],
            r"error: http://\S+/v1/completions answered 400: .*model 'other' is not served .*",
        ),
        (
            ["--config.model.hidden_dim=96"],
            r"error: http://\S+/update_weights_from_disk answered 400: .* \(servers.kind=rpg_jax needs .* shapes, .*\)",
        ),
    ],
    ids=["kind", "name", "shape"],
)
def test_a_server_that_does_not_fit_ends_the_run_with_one_line(server, tmp_path, changes, line):
    overrides = by_server(server, "rpg_jax", server.port, f"misfit-{changes[0].rpartition('=')[2]}")
    trainer = start(tmp_path, 1, *STEPS, *overrides, *changes, devices=1)
    (output,) = printed(trainer, timeout=600)
    assert trainer[0].returncode == 1 and "Traceback" not in output, output
    assert re.search(f"^{line}$", output, re.MULTILINE), output
