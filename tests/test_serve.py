from __future__ import annotations

import re
import signal
import subprocess
import sys

import grpc
import pytest

from rpg_jax.rollout.jetstream_compat import jetstream_pb2, jetstream_pb2_grpc


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
            assert "draining" in process.stdout.read()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_no_policy_named_is_one_line_with_the_fix():
    done = subprocess.run([sys.executable, "-m", "rpg_jax.serve"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: which policy? Give either --run")
