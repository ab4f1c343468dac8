"""Real trainers whose completions come from a real server on loopback, in its own form and in that of vLLM."""

import faulthandler
import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.end_to_end import conversing
from tests.end_to_end.servers_chaos import SETTINGS, ServerProcess, chaos
from tests.end_to_end.test_journal import counts, journaled
from tests.end_to_end.test_processes import assert_same_run, printed, records, run, samples, start

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow

STEPS = (*SETTINGS, "--config.train.steps=6", "--config.mesh.fsdp=1", "--config.mesh.replica=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with ServerProcess(folder, folder / "weights") as process:
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


@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="whole"),
        pytest.param(("--config.rollout.partial_tokens=2",), id="in parts", marks=pytest.mark.soak),
    ],
)
def test_a_server_that_is_killed_and_started_anew_samples_what_the_trainer_alone_samples(server, tmp_path, how):
    steps, home = (*STEPS, *how), f"--config.servers.weights={server.folder / 'weights' / str(len(how))}"
    alone = run(tmp_path, 1, *steps, "--config.run.name=alone", devices=1)
    trainer = start(tmp_path, 1, *steps, *by_server(server, "rpg_jax", server.port, "served"), home, devices=1)
    metrics = tmp_path / "served" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
        assert trainer[0].poll() is None, printed(trainer, timeout=60)
        time.sleep(0.05)
    server.kill()  # it comes back with random weights
    server.start()
    (output,) = printed(trainer, timeout=600)
    assert trainer[0].returncode == 0, output
    assert sum(r.get("servers/failures", 0) for r in records(tmp_path / "served")) > 0
    assert_same_run(tmp_path / "alone", tmp_path / "served")
    if not how:  # the log-probs of earlier parts are the sampler's, rounded by its programs
        assert checksum(alone[0]) == checksum(output)


def checksum(output):
    return re.search("weights checksum: .*", output).group()


def test_a_trainer_that_is_killed_in_the_middle_of_a_step_samples_only_what_is_missing(server, tmp_path):
    settings = (*STEPS, "--config.checkpoint.every=6", "--config.rollout.group_size=8")
    alone = run(tmp_path, 1, *settings, "--config.run.name=alone", devices=1)
    named = *settings, *by_server(server, "rpg_jax", server.port, "killed")
    trainer, killed = start(tmp_path, 1, *named, devices=1)[0], tmp_path / "killed"
    while not sum(journaled(killed).values()) > 40:  # in the second step: steps have 8 groups of 8
        assert trainer.poll() is None, trainer.communicate()[0]
        time.sleep(0.005)
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    complete = sum(journaled(killed).values())
    (output,) = run(tmp_path, 1, *named, devices=1)
    assert checksum(output) == checksum(alone[0])
    assert sum(found for found, _ in counts(killed)) == complete
    assert_same_run(tmp_path / "alone", killed)


def test_several_trainer_processes_sample_by_one_server_what_they_sample_alone(server, tmp_path):
    common = (*SETTINGS, "--config.train.steps=4", "--config.mesh.fsdp=2", "--config.mesh.replica=1")
    alone = run(tmp_path, 2, *common, "--config.run.name=alone", devices=2)
    served = run(tmp_path, 2, *common, *by_server(server, "rpg_jax", server.port, "served-by-two"), devices=2)
    assert_same_run(tmp_path / "alone", tmp_path / "served-by-two")
    assert checksum(alone[0]) == checksum(served[0])
    asked = [line["servers/requests"] for line in records(tmp_path / "served-by-two")[1:]]
    assert asked == [8 + 32, 32, 32, 32], "of both processes, with the evaluation before the first step"


def test_several_trainer_processes_sample_ahead_of_training(server, tmp_path):
    """A batch comes from the weights one step before; one process trains on the same completions."""
    common = (*SETTINGS, "--config.train.steps=4", "--config.rollout.max_staleness=1", "--config.evaluation.every=2")
    common += ("--config.mesh.replica=1", "--config.optimizer.learning_rate=1e-5")
    for processes in (1, 2):
        named = by_server(server, "rpg_jax", server.port, f"ahead-{processes}")
        run(tmp_path, processes, *common, f"--config.mesh.fsdp={processes}", *named, devices=processes)
    assert samples(tmp_path / "ahead-1") == samples(tmp_path / "ahead-2")
    ages = [line["staleness_updates_max"] for line in records(tmp_path / "ahead-2")[1:]]
    assert ages == [0, 2, 2, 2], "a step has two updates"


def test_conversations_train_as_with_an_engine_of_the_trainer_s_own(tmp_path):
    game = (*SETTINGS, *conversing.FLAGS, "--config.rewards.parts=environment:1", "--config.train.steps=3")
    game += ("--config.mesh.fsdp=1", "--config.mesh.replica=1", "--config.rollout.slots=32")
    alone = run(tmp_path, 1, *game, "--config.run.name=alone", devices=1)
    with ServerProcess(tmp_path, tmp_path / "weights", *conversing.FLAGS) as server:
        server.folder = tmp_path
        served = run(tmp_path, 1, *game, *by_server(server, "rpg_jax", server.port, "served"), devices=1)
    assert_same_run(tmp_path / "alone", tmp_path / "served")
    assert checksum(alone[0]) == checksum(served[0])
    assert max(line["servers/requests"] for line in records(tmp_path / "served")[1:]) > 32, "several turns"


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_servers_that_are_killed_stopped_and_added_behind_a_bad_network_change_nothing(tmp_path, processes):
    faulthandler.cancel_dump_traceback_later()  # pytest's, which ends a worker after 21 minutes
    figures = chaos(tmp_path, steps=200, processes=processes, seed=0, pause=(0.3, 2.0), every=20, patience=3 * 3600)
    print(figures)
    assert sum(figures["events"].values()) >= 40 and sum(figures["faults"].values()) >= 100


class AsVLLM(ThreadingHTTPServer):
    """Before this project's server: vLLM's paths. `loads` is False for a server that says so and loads nothing."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, port, loads=True):
        self.port, self.loads, self.asked = port, loads, 0
        super().__init__(("127.0.0.1", 0), Translate)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Translate(BaseHTTPRequestHandler):
    def do_POST(self):
        path, body = self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = 200, b"{}"
        if path == "/collective_rpc" and self.server.loads:
            assert body["method"] == "reload_weights"
            path, body = "/update_weights_from_disk", {"model_path": body["kwargs"]["weights_path"]}
        self.server.asked += path == "/v1/completions"
        body.pop("ignore_eos", None)  # of a probe, which names no stop token: then ours samples to the limit
        if path in ("/v1/completions", "/update_weights_from_disk"):
            url = f"http://127.0.0.1:{self.server.port}{path}"
            try:
                head = {"Content-Type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as reply:
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


def test_each_process_has_a_server_of_its_own_of_another_kind_and_where_one_loses_it_all_end(server, tmp_path):
    servers = [AsVLLM(server.port) for _ in range(2)]
    urls = ",".join(f"http://127.0.0.1:{one.server_address[1]}" for one in servers)
    common = (*SETTINGS, "--config.train.steps=1000", "--config.mesh.fsdp=2", "--config.mesh.replica=1")
    common += ("--config.distributed.heartbeat_timeout=15", "--config.servers.patience_seconds=5")
    named = [*by_server(server, "vllm", 0, "lost"), f"--config.servers.urls={urls}"]
    trainers, metrics = start(tmp_path, 2, *common, *named, devices=2), tmp_path / "lost" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3:
        assert all(process.poll() is None for process in trainers), printed(trainers, timeout=60)
        time.sleep(0.1)
    assert all(one.asked for one in servers)
    servers[1].shutdown()
    servers[1].server_close()
    lost = time.monotonic()
    outputs = printed(trainers, timeout=120)
    assert time.monotonic() - lost < 90 and all(process.returncode for process in trainers)
    assert re.search(r"^error: no server has answered for 5 s .*refused", outputs[1], re.MULTILINE), outputs[1]
    assert max(line["sampler_gap"] for line in records(tmp_path / "lost")[1:]) < 1e-4


def test_a_server_that_only_says_that_it_loads_the_weights_ends_the_run(server, tmp_path):
    port = AsVLLM(server.port, loads=False).server_address[1]
    trainer = start(tmp_path, 1, *STEPS, "--config.seed=5", *by_server(server, "vllm", port, "stale"), devices=1)
    (output,) = printed(trainer, timeout=600)
    assert trainer[0].returncode and "and the trainer disagree by" in output, output


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


def test_a_run_of_a_fleet_goes_on_with_a_server_that_it_finds_by_its_announcement(tmp_path, monkeypatch):
    """By TLS and with a key, as on Cloud TPU; the certificate's name is not the host's."""
    alone = run(tmp_path, 1, *STEPS, "--config.run.name=alone", devices=1)
    half = (*STEPS, "--config.train.steps=3", "--config.checkpoint.every=3", "--config.run.name=old")
    run(tmp_path, 1, *half, "--config.rollout.driver=lockstep", devices=1)
    file = tmp_path / "old" / "config.json"  # as the version before wrote it
    old = json.loads(file.read_text(encoding="utf-8"))
    old["rollout"]["driver"], old["fleet"] = "fleet", {"host": "127.0.0.1", "port": 9100, "lost_seconds": 20.0}
    del old["servers"]["certificate_name"]
    file.write_text(json.dumps(old), encoding="utf-8")

    pem = {"-keyout": tmp_path / "private.pem", "-out": tmp_path / "certificate.pem"}
    certificate = "-subj /CN=rpg-servers -addext subjectAltName=DNS:rpg-servers"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {certificate}".split()
    subprocess.run([*command, *(str(x) for pair in pem.items() for x in pair)], check=True, capture_output=True)
    monkeypatch.setenv("RPG_JAX_CERTIFICATE", pem["-out"].read_text(encoding="utf-8"))
    monkeypatch.setenv("RPG_JAX_PRIVATE_KEY", pem["-keyout"].read_text(encoding="utf-8"))
    for variable in ("RPG_JAX_API_KEY", "RPG_JAX_SERVERS_KEY"):
        monkeypatch.setenv(variable, "f0" * 16)
    folder, flags = tmp_path / "addresses", ("--host=0.0.0.0", "--announce_name=s0")
    with ServerProcess(tmp_path, tmp_path / "weights" / "old", *flags, f"--announce={folder}") as process:
        assert (folder / "s0").read_text(encoding="utf-8").startswith("https://")
        resumed = (
            "--config.rollout.driver=servers",
            "--config.servers.kind=rpg_jax",
            f"--config.servers.urls=file:{folder}",
            f"--config.servers.weights={tmp_path / 'weights'}",
            f"--config.servers.certificate={pem['-out']}",
            "--config.servers.certificate_name=rpg-servers",
            "--config.servers.patience_seconds=120",
        )
        (output,) = run(tmp_path, 1, *STEPS, *resumed, "--config.run.name=old", devices=1)
        assert "after step 3" in output and checksum(output) == checksum(alone[0])
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(timeout=60) == 128 + signal.SIGTERM
    assert_same_run(tmp_path / "alone", tmp_path / "old")
    assert not any(folder.iterdir())
