from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import grpc
import jax
import pytest

from configs import tiny
from rpg_jax import serve
from rpg_jax.rollout.jetstream.adapter import jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.runs import config_files, policy
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
    # Since Python 3.13 a link to itself has a path, and no file is there.
    with pytest.raises(ValueError, match=r"is not inside|is no folder|loop has no config\.json") as refused:
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
    assert done.stderr.strip().splitlines()[-1].startswith("error: which policy? Give one of --run")


MODEL = "configs/chains_start"  # it has positions for 32768 tokens


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run=x", "--config.seed=1"], "--config.seed=1: a run has its own config, and --run takes no field of it"),
        (["--model=x", "--config=tiny"], "--model takes no --config: leave --model out, and add --config.model.path="),
        (["--run=x", "--model=y"], "which policy? Give one of --run=runs/NAME, --model=NAME and --config=FILE"),
        (["--model=/absent", "--weights_from=gs://b/w"], "'gs://b/w' is no local folder"),  # before weights are read
        ([f"--model={MODEL}", "--context=99999"], "--context=99999: the model has positions for 32768 tokens"),
    ],
)
def test_what_cannot_be_served_is_one_line_with_what_serve_takes(flags, said, capsys):
    assert serve.main([*flags, "--port=0"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_a_taken_port_is_said_with_its_flag_before_weights_are_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve.main([f"--model={MODEL}", "--port=0", f"--http_port={port}"]) == 2
    said = f"error: cannot serve on 127.0.0.1:{port}: Address already in use; choose another --http_port\n"
    assert capsys.readouterr().err == said


def test_the_limits_of_a_server_are_those_of_its_model_and_slots_fit_the_memory(tmp_path):

    from rpg_jax.runs import policy_server
    from rpg_jax.runs.memory import cache_bytes, make_decoding

    config = config_files.changed(tiny.get_config(), {"model.path": MODEL, "rollout.slots": 512})
    served = policy.of_config(config, tmp_path, weights=False)
    for tokens, room in ((None, 8192), (32768, 32768), (96, 96)):
        layout = policy_server.with_context(served, tokens).experiment.layout
        decoding = make_decoding(layout)
        assert decoding.capacity == room
        assert cache_bytes(layout, decoding) <= 1 << 30 and decoding.slots >= 1
    assert decoding.slots == 512 * jax.device_count(), "where they fit, the slots are those of the config"


def test_a_server_that_loads_weights_leaves_room_for_them_beside_its_own(tmp_path):
    from rpg_jax.runs import policy_server
    from rpg_jax.runs.memory import LEFT_FREE, bytes_on_a_device, cache_bytes, decoding_params, make_decoding

    config = config_files.changed(tiny.get_config(), {"model.path": MODEL, "model.compute_dtype": "float32"})
    served = policy.of_config(config, tmp_path, weights=False)

    def on_a_device_of(memory):
        layout = dataclasses.replace(served.experiment.layout, device_memory=memory)
        wide = dataclasses.replace(served, experiment=dataclasses.replace(served.experiment, layout=layout))
        layout = policy_server.with_room_to_load(wide).experiment.layout
        decoding = make_decoding(layout)
        own = bytes_on_a_device(decoding_params(layout, decoding))
        return own, decoding.slots // decoding.mesh.size, 2 * own + cache_bytes(layout, decoding)

    own, most, _ = on_a_device_of(2.0**40)
    _, slots, needed = on_a_device_of(3 * own)
    assert 1 < slots < most and needed < 3 * own * (1 - LEFT_FREE)
    with pytest.raises(ValueError, match="a load needs the weights twice, 0.0 GiB on a device with 0.0: spread"):
        on_a_device_of(1.9 * own)


@pytest.mark.slow  # a server and three trainers in processes of their own
def test_errors_of_servers_are_one_line_each_in_a_trainer(tmp_path):
    pytest.importorskip("aiohttp")
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef", encoding="utf-8")
    weights, runs = tmp_path / "weights", tmp_path / "runs"
    trains = [
        *TRAINERS[:3],
        f"--config.servers.weights={weights}",
        f"--config.run.dir={runs}",
        "--config.train.steps=99",
    ]
    trains += [
        "--config.servers.patience_seconds=8",
        "--config.warm_start.enabled=False",
        "--config.dynamic_sampling.enabled=False",
        "--config.evaluation.every=99",
    ]
    flags = ["--port=0", "--http_port=0", f"--weights_from={weights}", f"--api_key_file={key}"]

    def trainer(port, secret):
        urls = f"--config.servers.urls=http://127.0.0.1:{port}"
        env = os.environ | {"RPG_JAX_SERVERS_KEY": secret}
        command = [sys.executable, "-m", "rpg_jax.train", *trains, urls]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def last_words(process, timeout=240):
        said = process.communicate(timeout=timeout)[1]
        assert process.returncode == 1 and "Traceback" not in said
        return said.strip().splitlines()[-1]

    command = [sys.executable, "-m", "rpg_jax.serve", *TRAINERS, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = re.search(r"over HTTP on port (\d+)", server.stdout.readline())[1]
            wrong = last_words(trainer(port, "f" * 32))
            assert wrong.startswith("error: ") and "answered 401" in wrong and "RPG_JAX_SERVERS_KEY" in wrong
            dies = trainer(port, key.read_text(encoding="utf-8"))
            heard = []
            while "step 1/" not in "".join(heard):
                heard.append(dies.stderr.readline())
                assert heard[-1], (heard, server.poll() is not None and server.stderr.read())
            server.kill()
            gone = last_words(dies)
            assert gone.startswith("error: no server has answered for 8 s (servers.patience_seconds)")
            assert "Traceback" not in server.communicate(timeout=60)[1]
        finally:
            server.kill()
