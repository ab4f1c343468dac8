from __future__ import annotations

import re
import signal
import subprocess
import sys

import grpc
import jax
import pytest

from configs import tiny
from rpg_jax import evaluate, serve
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


@pytest.mark.slow  # a model is compiled
def test_an_evaluation_by_a_server_without_jetstream_is_one_line_with_the_fix(run, no_jetstream, capsys):
    assert evaluate.main([f"--run={run[0]}", "--server=localhost:1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == ABSENT


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
            assert "draining" in process.communicate(timeout=60)[0] and process.returncode == 0
        finally:
            process.kill()


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
