from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import grpc
import jax
import pytest

from configs import tiny
from rpg_jax import serve
from rpg_jax.rollout.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.runs import policy
from tests import test_export
from tests.modules import forget

run = test_export.run


@pytest.fixture
def no_jetstream(monkeypatch):
    """JetStream is absent, and so is every module of ours that imports it."""
    forget(monkeypatch, "rpg_jax.rollout.jetstream", "rpg_jax.rollout.serving", "rpg_jax.runs.policy_server")
    monkeypatch.setitem(sys.modules, "jetstream", None)


ABSENT = "error: JetStream is not installed: pip install --no-deps google-jetstream==0.2.2"


def test_serve_without_jetstream_is_one_line_with_the_fix(no_jetstream, capsys):
    assert serve.main(["--config=configs/tiny.py"]) == 2
    assert capsys.readouterr().err == ABSENT + "\n"


@pytest.mark.slow
def test_the_command_serves_text_and_drains_on_sigterm():
    command = [sys.executable, "-m", "rpg_jax.serve", "--config=configs/tiny.py", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"on (127\.0\.0\.1:\d+)", process.stdout.readline())[1]
            text = jetstream_pb2.DecodeRequest.TextContent(text="12+34=")
            with grpc.insecure_channel(address) as channel:
                stub = jetstream_pb2_grpc.OrchestratorStub(channel)
                assert list(stub.Decode(jetstream_pb2.DecodeRequest(text_content=text, max_tokens=5), timeout=120))
            process.send_signal(signal.SIGTERM)
            assert "draining" in process.communicate(timeout=60)[0] and process.returncode == 128 + signal.SIGTERM
        finally:
            process.kill()


TRAINERS = (
    "--config=tests/end_to_end/micro.py",
    "--config.rollout.driver=servers",
    "--config.servers.kind=rpg_jax",
    "--config.servers.urls=https://10.0.0.5:8000",
    "--config.servers.weights=/absent",
    "--config.run.name=r",
    "--config.rollout.max_staleness=1",
    "--config.loss.sampler_correction=truncate",
)


@pytest.mark.slow
def test_a_server_of_a_trainers_own_command_line_is_announced_and_ends_with_0_when_nobody_asks_any_more(tmp_path):
    pytest.importorskip("aiohttp")
    flags = ["--port=0", "--http_port=0", f"--weights_from={tmp_path / 'weights'}", "--idle=4", "--announce_name=w0"]
    command = [sys.executable, "-m", "rpg_jax.serve", *TRAINERS, *flags, f"--announce={tmp_path / 'servers'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = re.search(r"over HTTP on port (\d+)", process.stdout.readline())[1]
            address = (tmp_path / "servers" / "w0").read_text(encoding="utf-8")
            assert address == f"http://127.0.0.1:{port}\n"
            body = json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode()
            headers, began = {"Content-Type": "application/json"}, time.monotonic()
            while time.monotonic() < began + 8:  # twice as long as it waits when nobody asks
                request = urllib.request.Request(address.strip() + "/v1/completions", body, headers)
                assert len(json.load(urllib.request.urlopen(request, timeout=120))["choices"]) == 1
                time.sleep(0.5)
            asked = time.monotonic()
            while process.poll() is None and time.monotonic() < asked + 60:
                with contextlib.suppress(OSError):  # it may end meanwhile
                    urllib.request.urlopen(address.strip() + "/health", timeout=5).read()
                time.sleep(0.5)
            assert process.poll() == 0 and time.monotonic() >= asked + 3
            assert "no request for 4 s: draining" in process.stdout.read()
            assert not any((tmp_path / "servers").iterdir())
        finally:
            process.kill()


@pytest.mark.parametrize(
    "flags", [["--announce=x"], ["--announce_name=w0", "--http_port=0"], ["--announce=x", "--announce_name=w0"]]
)
def test_an_announcement_without_an_address_is_one_line_with_the_fix(flags, capsys):
    assert serve.main(["--config=configs/tiny.py", *flags]) == 2
    assert capsys.readouterr().err == (
        "error: --announce=FOLDER, which --announce_name needs, is of the HTTP address: add --http_port=8000\n"
    )


def place(home, kind):
    """What a client names as `model_path`, in the folder of --weights_from."""
    (home.parent / "secret").mkdir()
    (home.parent / "secret" / "config.json").write_text("{}", encoding="utf-8")
    (home / "v1").mkdir(parents=True)
    (home / "v1" / "config.json").write_text("{}", encoding="utf-8")
    if kind == "a link that leads out":
        (home / "out").symlink_to(home.parent / "secret")
        return str(home / "out")
    if kind == "a file that leads out":
        (home / "v1" / "model.safetensors").symlink_to(home.parent / "secret" / "config.json")
        return str(home / "v1")
    if kind == "a link to itself":
        (home / "loop").symlink_to(home / "loop")
        return str(home / "loop")
    return {"dots": f"{home}/v1/../../secret", "a name without end": "a" * 5000, "a byte of no name": "v1\0"}[kind]


KINDS = (
    "a link that leads out",
    "a file that leads out",
    "a link to itself",
    "dots",
    "a name without end",
    "a byte of no name",
)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_client_names_lie_inside_the_folder(tmp_path, kind):
    """A ValueError is an answer of 400, see tests/rollout/serving/test_http.py."""
    from rpg_jax.runs import policy_server  # not above: another test forgets what imports JetStream

    asked = place(home := tmp_path / "weights", kind)
    with pytest.raises(ValueError, match=r"is not inside|is no folder|null byte") as refused:
        policy_server._Disk(None, None, home).read(asked)
    assert len(str(refused.value)) < 1000


@pytest.mark.slow  # draws weights
def test_a_configs_weights_are_held_in_the_dtype_that_decodes_and_the_config_stays_as_it_is(tmp_path):
    config = tiny.get_config()
    config.model.compute_dtype = "bfloat16"
    before = config.to_json_best_effort()
    served = policy.of_config(config, tmp_path, changes={"rollout.driver": "orchestrator"}, held_out=True)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(served.params)} == {"bfloat16"}
    assert config.to_json_best_effort() == before


@pytest.mark.slow
def test_no_policy_named_is_one_line_with_the_fix():
    done = subprocess.run([sys.executable, "-m", "rpg_jax.serve"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: which policy? Give either --run")
