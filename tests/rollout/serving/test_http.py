"""The HTTP endpoint: OpenAI's form, the same tokens and limits as over gRPC."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from rpg_jax.rollout import Request
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def server(build, letters):
    sampler = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    made = Server(sampler, letters, Sampling(stop_token_ids=(5, 9)), max_active=4, http_port=0, name="letters")
    yield made
    made.stop(grace=5)


def ask(server, body, path="/v1/completions"):
    """Status and answer."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def completion(server, **body):
    status, answer = ask(server, body)
    assert status == 200, answer
    return json.loads(answer)


def test_completions_are_those_of_the_engine(server, build, work, is_same, letters):
    asked = {"temperature": 0.8, "max_tokens": 24, "n": 4, "seed": 11, "logprobs": 0}
    answer = completion(server, prompt=work.prompts[1].tolist(), model="letters", **asked)
    sampling = Sampling(temperature=0.8, max_tokens=24, stop_token_ids=(5, 9))
    one = {"prompts": work.prompts[1:2], "prompt_ids": [0], "group_size": 4, "step": 0}
    (expected,) = build("simple").generate(Request(**one, sampling=sampling, seed=11))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, made in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == made.tokens.tolist() and choice["finish_reason"] == made.finish_reason
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], made.logprobs, atol=5e-6)  # f32 sums
        assert choice["text"] == letters.decode(made.tokens[: len(made.tokens) - (made.finish_reason == "stop")])
    drawn = sum(len(made.tokens) for made in expected)
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": drawn, "total_tokens": 20 + drawn}
    assert json.loads(ask(server, None, "/v1/models")[1])["data"][0]["id"] == "letters"


def test_a_stream_is_the_whole_in_pieces_and_requests_without_a_seed_differ(server):
    asked = {"prompt": "123", "max_tokens": 24, "seed": 5}
    (whole,) = completion(server, **asked)["choices"]
    status, stream = ask(server, asked | {"stream": True})
    *events, end = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    pieces = [json.loads(event)["choices"][0] for event in events]
    assert status == 200 and end == "[DONE]"
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [whole["finish_reason"]]
    texts = {completion(server, prompt="123", max_tokens=20)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        ([1], "JSON object"),
        ({}, "prompt must be"),
        ({"prompt": ["a", "b"]}, "prompt must be"),
        ({"prompt": [2**70]}, "prompt must be"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": "1\ud800"}, "is a lone surrogate"),
        ({"prompt": "1", "stream": 1}, "truth value"),
        ({"prompt": [1, 999]}, "vocabulary"),
        ({"prompt": [1] * 60}, "does not fit"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "1", "max_tokens": 1.5}, "whole number"),
        ({"prompt": "1", "temperature": "hot"}, "finite number"),
        ({"prompt": "1", "temperature": 10**400}, "finite number"),
        ({"prompt": "1", "top_p": True}, "finite number"),
        ({"prompt": "1", "top_p": 2}, "top_p"),
        ({"prompt": "1", "n": 9}, "n must be"),
        ({"prompt": "1", "n": 2, "stream": True}, "n must be"),
        ({"prompt": "1", "logprobs": 5}, "logprobs 0 or null"),
        ({"prompt": "1", "stop": "x"}, "unknown fields"),
        ({"prompt": "1", "model": "gpt"}, "is not served"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_served_are_400_with_the_reason(server, body, message):
    status, answer = ask(server, body)
    assert status == 400 and message in json.loads(answer)["error"]["message"]


def test_a_body_that_does_not_come_is_408_and_its_place_is_free_again(server, monkeypatch):
    monkeypatch.setattr("rpg_jax.rollout.serving.http.STALL_SECONDS", 0.2)
    head = {"Content-Type": "application/json", "Content-Length": "100"}
    idle = [http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20) for _ in range(4)]
    for connection in idle:
        connection.request("POST", "/v1/completions", b'{"prompt":', head)
    for connection in idle:
        reply = connection.getresponse()
        assert reply.status == 408 and "longer than 0.2 s" in json.loads(reply.read())["error"]["message"]
        connection.close()
    monkeypatch.undo()
    assert ask(server, {"prompt": "1"})[0] == 200


def test_a_full_server_says_429_and_a_fault_500(server, monkeypatch):
    go, original = threading.Event(), server._rollout.engine.prefill

    def held(**arguments):
        assert go.wait(30)
        return original(**arguments)

    monkeypatch.setattr(server._rollout.engine, "prefill", held)
    answers = []
    callers = [threading.Thread(target=lambda: answers.append(ask(server, {"prompt": "1"})[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    deadline = time.monotonic() + 20
    while server._admission.active < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(server, {"prompt": "1"})[0] == 429
    go.set()
    for caller in callers:
        caller.join(timeout=30)
    assert answers == [200] * 4

    def broken(**arguments):
        raise OSError("device fell off the bus")

    monkeypatch.setattr(server._rollout.engine, "prefill", broken)
    status, answer = ask(server, {"prompt": "1"})
    assert status == 500 and b"fell off the bus" in answer
    monkeypatch.undo()
    assert ask(server, {"prompt": "1"})[0] == 200


def test_a_client_that_leaves_gives_its_slot_back_without_a_traceback(server, caplog):
    for number in range(24):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
        stream, cut, reset = number % 2 == 0, number % 3 == 0, number % 4 < 2
        body = json.dumps({"prompt": "1", "max_tokens": 24, "stream": stream}).encode()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:9] if cut else body)
        if reset:  # close() sends RST
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    deadline = time.monotonic() + 20
    while ask(server, {"prompt": "1"})[0] != 200 or server._admission.active or server._rollout.driver()._channels:
        assert time.monotonic() < deadline, "a request outlives its caller"
        time.sleep(0.01)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_health_is_200_until_the_server_drains(server, monkeypatch):
    assert ask(server, None, "/health") == (200, b'{"status": "ok"}')
    monkeypatch.setattr(server._admission, "draining", True)
    assert ask(server, None, "/health") == (503, b'{"status": "draining"}')


def test_a_shutdown_lets_what_runs_end_and_refuses_what_comes(build, letters, monkeypatch):
    sampler = JetStreamRollout(build("orchestrator").engine)
    made = Server(sampler, letters, Sampling(), http_port=0)
    ask(made, {"prompt": "1"})
    begun, original = threading.Event(), sampler.engine.prefill
    monkeypatch.setattr(sampler.engine, "prefill", lambda **asked: begun.set() or original(**asked))
    answers = []
    running = threading.Thread(target=lambda: answers.append(ask(made, {"prompt": "1", "max_tokens": 40})))
    running.start()
    assert begun.wait(60)
    made.stop()
    running.join(timeout=20)
    assert answers[0][0] == 200
    with pytest.raises(urllib.error.URLError):
        ask(made, {"prompt": "1"})
