"""The HTTP endpoint: OpenAI's form, the same tokens and limits as over gRPC."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rpg_jax.rollout import Request
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling

pytest.importorskip("aiohttp")


def render(messages, thinking=False):
    """A chat template: the contents, each with a colon."""
    if messages[0]["role"] == "fail":
        raise ValueError("the template refuses the role 'fail'")
    return "".join(f"{message['content']}:" for message in messages) + "T" * thinking


@pytest.fixture(scope="module")
def server(build, letters):
    sampler = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    made = Server(
        sampler, letters, Sampling(stop_token_ids=(5, 9)), max_active=6, http_port=0, name="letters", render=render
    )
    yield made
    made.stop(grace=5)


def ask(server, body, path="/v1/completions"):
    """Status and answer."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def completion(server, **body):
    status, answer = ask(server, body)
    assert status == 200, answer
    return json.loads(answer)


def test_completions_are_those_of_the_engine(server, build, work, is_same, letters):
    asked = {"temperature": 0.8, "max_tokens": 24, "n": 4, "seed": 11, "logprobs": 0}
    answer = completion(server, prompt=work.prompts[1].tolist(), model="letters", user="somebody", **asked)
    sampling = Sampling(temperature=0.8, max_tokens=24, stop_token_ids=(5, 9))
    one = {"prompts": work.prompts[1:2], "prompt_ids": [0], "group_size": 4, "step": 0}
    (expected,) = build("simple").generate(Request(**one, sampling=sampling, seed=11))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, made in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == made.tokens.tolist() and choice["finish_reason"] == made.finish_reason
        np.testing.assert_allclose(choice["sampler_logprobs"], made.logprobs, atol=5e-6)  # f32 sums
        assert choice["text"] == letters.decode(made.tokens[: len(made.tokens) - (made.finish_reason == "stop")])
    drawn = sum(len(made.tokens) for made in expected)
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": drawn, "total_tokens": 20 + drawn}
    for path in ("/v1/models", "/v1/models/letters"):
        listed = json.loads(ask(server, None, path)[1])
        assert listed.get("data", [listed])[0]["id"] == "letters"
    assert ask(server, None, "/v1/models/other")[0] == 404


def test_a_trainer_s_counters_give_its_completion_and_prompt_ids_and_other_weights_need_a_flag(server, build, work):
    one = {"prompts": work.prompts[1:2], "prompt_ids": [0], "group_size": 4, "step": 0, "seed": 11}
    sampling = Sampling(temperature=0.8, max_tokens=24, stop_token_ids=(5, 9))
    asked = {"prompt": work.prompts[1].tolist(), "temperature": 0.8, "max_tokens": 24, "top_k": -1}
    asked |= {"return_token_ids": True, "sampler_logprobs": True, "repetition_penalty": 1.0}
    answer = completion(server, **asked, counters=[11, 0, 0, 2], stop_token_ids=[5, 9])
    [choice], made = answer["choices"], build("simple").generate(Request(**one, sampling=sampling))[0][2]
    assert choice["token_ids"] == made.tokens.tolist() and choice["prompt_token_ids"] == asked["prompt"]
    np.testing.assert_allclose(choice["sampler_logprobs"], made.logprobs, atol=5e-6)  # f32 sums
    assert choice["logprobs"] is None and answer["weights"] == [f"{server._rollout.weights.checksum():016x}"]
    [other] = completion(server, **asked, seed=5, stop_token_ids=[])["choices"]
    assert other["finish_reason"] == "length" and len(other["token_ids"]) == 24
    for wrong in ({"counters": [1, 2, 3]}, {"counters": [1, 2, 3, -1]}, {"counters": [1, 2, 3, 4], "n": 2}):
        assert ask(server, asked | wrong)[0] == 400, wrong
    status, refusal = ask(server, {"model_path": "/somewhere"}, "/update_weights_from_disk")
    assert status == 400 and b"--weights_from=FOLDER" in refusal


def events(server, path="/v1/completions", **body):
    """The events of a stream, but for its end."""
    status, stream = ask(server, body | {"stream": True}, path)
    assert status == 200, stream
    *found, end = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in found]


def test_a_stream_is_the_whole_in_pieces_and_requests_without_a_seed_differ(server):
    asked = {"prompt": ["123", [1, 2]], "max_tokens": 24, "seed": 5, "n": 2}
    whole = completion(server, **asked)
    *pieces, last = events(server, **asked, stream_options={"include_usage": True})
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for choice in whole["choices"]:
        own = [made for piece in pieces for made in piece["choices"] if made["index"] == choice["index"]]
        assert "".join(made["text"] for made in own) == choice["text"]
        assert sum((made["token_ids"] for made in own), []) == choice["token_ids"]
        assert [made["finish_reason"] for made in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
    texts = {made["text"] for _ in range(2) for made in completion(server, prompt=["123"] * 2, n=2)["choices"]}
    assert len(texts) > 2


def test_a_prompt_s_answer_does_not_depend_on_the_other_prompts(server):
    asked = {"max_tokens": 20, "seed": 3, "n": 2}
    together = completion(server, prompt=["1", "22", [3, 3]], **asked)["choices"]
    alone = [completion(server, prompt=prompt, **asked)["choices"] for prompt in ("1", [2, 2], "33")]
    assert [c["index"] for c in together] == [0, 1, 2, 3, 4, 5]
    assert [c["token_ids"] for c in together] == [c["token_ids"] for answer in alone for c in answer]


def test_a_completion_ends_where_a_stop_text_begins(server):
    asked = {"prompt": "123", "max_tokens": 24, "seed": 5}
    (free,) = completion(server, **asked)["choices"]
    stop = free["text"][3:6]
    (cut,) = completion(server, **asked, stop=["never", stop])["choices"]
    assert cut["text"] == free["text"][: free["text"].index(stop)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == free["token_ids"][: len(cut["text"]) + 3]  # a letter a token
    assert "".join(e["choices"][0]["text"] for e in events(server, **asked, stop=stop)) == cut["text"]
    (whole,) = completion(server, **asked, stop=free["text"][-1] + "x")["choices"]  # begins, and does not come
    assert whole["text"] == free["text"]


def test_logprobs_are_the_model_s_own_and_echo_has_those_of_the_prompt(server, model):
    graphdef, params = model
    prompt = [1, 2, 3, 30, 40]
    asked = {"prompt": prompt, "logprobs": 3, "echo": True, "temperature": 0, "max_tokens": 6}
    (choice,) = completion(server, **asked)["choices"]
    ids = [*prompt, *choice["token_ids"]]
    module, tokens = nnx.merge(graphdef, params), jnp.array([ids])
    hidden = module(tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens))
    expected = np.array(jax.nn.log_softmax(module.logits(hidden[0])))
    given = choice["logprobs"]
    assert given["token_logprobs"][0] is None and given["top_logprobs"][0] is None
    drawn = [expected[t - 1, ids[t]] for t in range(1, len(ids))]
    np.testing.assert_allclose(given["token_logprobs"][1:], drawn, atol=2e-5)
    for t in range(1, len(ids)):
        best = np.sort(expected[t - 1])[-3:]
        named = sorted(given["top_logprobs"][t].values())[-3:]
        np.testing.assert_allclose(named, best, atol=2e-5)
        greedy = given["token_logprobs"][t] == max(given["top_logprobs"][t].values())
        assert greedy == (expected[t - 1].argmax() == ids[t])  # equal bits: clients compare so
    stopped = choice["finish_reason"] == "stop"
    assert choice["text"] == "".join(given["tokens"])[: len(ids) - stopped]
    assert given["text_offset"] == list(range(len(ids)))
    (scored,) = completion(server, **asked | {"max_tokens": 0})["choices"]
    assert scored["token_ids"] == [] and scored["text"] == "".join(given["tokens"][:5])
    np.testing.assert_allclose(scored["logprobs"]["token_logprobs"][1:], drawn[:4], atol=2e-5)
    (own,) = completion(server, **asked | {"echo": False})["choices"]
    assert own["logprobs"]["token_logprobs"] == given["token_logprobs"][5:]
    full = {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": prompt * 12}
    room = server.decoding.capacity
    (scored,) = completion(server, **full | {"prompt": full["prompt"][:room]})["choices"]
    assert len(scored["logprobs"]["tokens"]) == room, "a teacher scores completions that fill a slot"
    status, refusal = ask(server, full | {"prompt": [*full["prompt"][:room], 1]})
    assert status == 400 and b"does not fit" in refusal


HELLO = [{"role": "system", "content": "1"}, {"role": "user", "content": [{"type": "text", "text": "23"}]}]
CHAT = "/v1/chat/completions"


def chat(server, **body):
    status, answer = ask(server, body, CHAT)
    assert status == 200, answer
    return json.loads(answer)


def test_a_conversation_passes_the_template_and_streams(server):
    asked = {"messages": HELLO, "seed": 5, "max_tokens": 24}
    (expected,) = completion(server, prompt="1:23:", seed=5, max_tokens=24)["choices"]
    whole = chat(server, **asked, logprobs=True, top_logprobs=2)
    (choice,) = whole["choices"]
    assert whole["object"] == "chat.completion" and choice["token_ids"] == expected["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2] * len(choice["token_ids"])
    pieces = events(server, CHAT, **asked)
    assert pieces[0]["object"] == "chat.completion.chunk"
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta["content"] for delta in deltas) == expected["text"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    (thinking,) = chat(server, **asked, chat_template_kwargs={"enable_thinking": True})["choices"]
    (with_mark,) = completion(server, prompt="1:23:T", seed=5, max_tokens=24)["choices"]
    assert thinking["token_ids"] == with_mark["token_ids"]
    longest = chat(server, messages=HELLO, seed=6)["usage"]
    assert longest["total_tokens"] <= 48  # what fits


def test_the_tokenizer_is_served_to_clients_that_have_none(server):
    assert json.loads(ask(server, None, "/tokenizer_info")[1])["eos_token"] is None
    status, answer = ask(server, {"prompt": "123", "add_special_tokens": False}, "/tokenize")
    assert status == 200 and json.loads(answer) == {"tokens": [1, 2, 3], "count": 3, "max_model_len": 48}
    assert json.loads(ask(server, {"tokens": [1, 2, 3]}, "/detokenize")[1]) == {"prompt": "123"}
    for path, body in (
        ("/tokenize", {"prompt": [1]}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "1", "add_special_tokens": True}),
        ("/detokenize", {"tokens": [50]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "1"}),
    ):
        assert ask(server, body, path)[0] == 400, body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages must be"),
        ({"messages": []}, "messages must be"),
        ({"messages": ["hello"]}, r"messages[0] must have"),
        ({"messages": [*HELLO, {"role": "user"}]}, r"messages[2] must have"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages[0] must have"),
        ({"messages": [{"role": "user", "content": "1\ud800"}]}, "half of a character at 1"),
        ({"messages": [{"role": "user", "content": "1" * 48}]}, "does not fit"),
        ({"messages": [{"role": "fail", "content": "1"}]}, "the template refuses"),
        ({"messages": HELLO, "tools": [{}]}, "tools="),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "enable_thinking"),
        ({"messages": HELLO, "top_logprobs": 21}, "top_logprobs must be"),
    ],
    ids=str,
)
def test_conversations_that_cannot_be_served_are_400_with_the_reason(server, body, message):
    status, answer = ask(server, body, CHAT)
    assert status == 400 and message in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        ([1], "JSON object"),
        ({}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": ["1", 2]}, "prompt must be"),
        ({"prompt": [2**70]}, "more than 32 bits"),
        ({"prompt": ["1"] * 257}, "256 are the most"),
        ({"prompt": ["1"] * 9, "n": 32}, "more than 256 completions"),
        ({"prompt": ["1", ""]}, "at least one token"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": "1\ud800"}, "half of a character at 1"),
        ({"prompt": "1", "stream": 1}, "true or false"),
        ({"prompt": [1, 999]}, "vocabulary"),
        ({"prompt": [1] * 60}, "does not fit"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "1", "max_tokens": 1.5}, "whole number"),
        ({"prompt": "1", "temperature": "hot"}, "finite number"),
        ({"prompt": "1", "temperature": 10**400}, "finite number"),
        ({"prompt": "1", "temperature": 1e39}, "finite in float32"),
        ({"prompt": "1", "top_p": True}, "finite number"),
        ({"prompt": "1", "top_p": 2}, "top_p"),
        ({"prompt": "1", "n": 257}, "n must be"),
        ({"prompt": "1", "seed": -1}, "seed must be"),
        ({"prompt": "1", "logprobs": 6}, "logprobs must be"),
        ({"prompt": "1", "logprobs": 0, "stream": True}, "a stream has no logprobs"),
        ({"prompt": "1", "return_token_ids": True, "stream": True}, "return_token_ids: leave stream out"),
        ({"prompt": "1", "sampler_logprobs": True, "stream": True}, "a stream has no logprobs, sampler_logprobs"),
        ({"prompt": "1", "stop": ""}, "stop must be"),
        ({"prompt": "1", "stop": ["x"] * 17}, "16 are the most"),
        ({"prompt": "1", "stream_options": {"x": True}}, "stream_options must be"),
        ({"prompt": "1", "presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
        ({"prompt": "1", "beams": 2}, "beams=2 is not supported"),
        ({"prompt": "1", "model": "gpt"}, "is not served"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_served_are_400_with_the_reason(server, body, message):
    status, answer = ask(server, body)
    assert status == 400 and message in json.loads(answer)["error"]["message"]


PAGES = {
    "a form": ({"Content-Type": "text/plain"}, 400),
    "a form with a key": ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
    "no type": ({"Content-Type": ""}, 400),
    "a script": ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
    "a file": ({"Content-Type": "application/json", "Origin": "null"}, 403),
    "another port": ({"Content-Type": "application/json", "Origin": "http://127.0.0.1:1"}, 403),
    "a name that leads here": ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
    "such a name and a port": ({"Content-Type": "application/json", "Host": "localhost.evil.example:80"}, 403),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_web_page_gets_no_answer(server, page):
    headers, status = PAGES[page]
    for method, path in (("POST", "/v1/completions"), ("POST", LOADS), ("GET", "/v1/models"), ("GET", "/metrics")):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request(method, path, b'{"prompt": "1"}' if method == "POST" else None, headers)
        reply = connection.getresponse()
        answer, simple = reply.read(), status == 400 and method == "GET"  # a GET without an Origin shows a page nothing
        assert (reply.status == 200) if simple else (reply.status == status and b'"error"' in answer), (path, answer)
        assert not any(name.lower().startswith("access-control") for name in reply.headers)
        connection.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BROKEN = {
    "a body of another encoding": (
        HEAD + b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff",
        400,
    ),
    "200 MB in 200 kB": (
        HEAD
        + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(BOMB := gzip.compress(b" " * 2**27)), BOMB),
        413,
    ),
    "two hosts": (HEAD + b"Host: evil.example\r\n\r\n", 400),
    "two types": (HEAD + b"Content-Type: text/plain\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "20,000 headers": (HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n", 400),
    "another address in the first line": (b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    "a host with a user": (b"GET /metrics HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", 403),
    "6,000 digits": (HEAD + b"Content-Length: 6014\r\n\r\n" + b'{"prompt":"1' + b"1" * 6000 + b'"}', 400),
    "UTF-16": (HEAD + b"Content-Length: 32\r\n\r\n" + '{"prompt": "1"}'.encode("utf-16"), 200),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_request_of_ours_is_answered_without_a_traceback(server, caplog, capfd, kind):
    content, status = BROKEN[kind]
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(content)
        assert int(connection.recv(1000).split()[1]) == status
    assert not [record for record in caplog.records if record.exc_info] and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "127.1.2.3", "[::1]:80"])
def test_every_name_of_the_loopback_interface_is_answered(server, host):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_a_server_counts_completions_and_not_requests(server, until, monkeypatch):
    """A few streams of many completions that nobody reads leave no place, and the next client hears it at once."""
    go, original = threading.Event(), server._rollout.engine.prefill
    monkeypatch.setattr(server._rollout.engine, "prefill", lambda **given: go.wait(30) and original(**given))
    assert ask(server, {"prompt": "1", "n": 7})[0] == 429
    held = http.client.HTTPConnection("127.0.0.1", server.http_port)
    body = json.dumps({"prompt": "1", "n": 6, "max_tokens": 24, "stream": True, "stop_token_ids": []})
    held.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    until(lambda: server._admission._completions == 6)
    assert ask(server, {"prompt": "1"})[0] == 429
    held.close()
    go.set()
    until(lambda: not server._admission.active and not server._admission._completions)
    assert ask(server, {"prompt": ["1", "2"], "n": 3})[0] == 200


def test_a_body_that_does_not_come_is_408_and_its_place_is_free_again(server, monkeypatch):
    monkeypatch.setattr("rpg_jax.rollout.serving.http.STALL_SECONDS", 0.2)
    head = {"Content-Type": "application/json", "Content-Length": "100"}
    idle = [http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20) for _ in range(6)]
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
    callers = [threading.Thread(target=lambda: answers.append(ask(server, {"prompt": "1"})[0])) for _ in range(6)]
    for caller in callers:
        caller.start()
    deadline = time.monotonic() + 20
    while server._admission.active < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(server, {"prompt": "1"})[0] == 429
    go.set()
    for caller in callers:
        caller.join(timeout=30)
    assert answers == [200] * 6

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
        connection.putheader("Content-Type", "application/json")
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


LOADS = "/update_weights_from_disk"


class Stretched:
    """Weights in host memory: those of the model, times a number."""

    def __init__(self, number):
        self.number, self.nbytes = number, 100 * number


class Disk:
    """Folder "3" has the weights times 3. Reads and swaps take as long as `may_read` and `may_swap` say."""

    def __init__(self, sampler, params):
        self.sampler, self.params = sampler, params
        self.may_read, self.may_swap = threading.Event(), threading.Event()
        self.may_read.set()
        self.lock, self.live, self.most, self.reads, self.swaps = threading.Lock(), 0, 0, [], []

    @contextlib.contextmanager
    def one(self):
        with self.lock:
            self.live += 1
            self.most = max(self.most, self.live)
        yield
        with self.lock:
            self.live -= 1

    def read(self, folder):
        self.reads.append(folder)
        with self.one():
            assert self.may_read.wait(30)
        if folder == "gone":
            raise OSError("the disk has gone")
        if not folder.isdecimal():
            raise ValueError(f"{folder} has no weights")
        return Stretched(int(folder))

    def swap(self, weights):
        with self.one():
            assert self.may_swap.wait(30)
            version = self.sampler.weights.version + 1
            self.sampler.sync_weights(jax.tree.map(lambda x: x * weights.number, self.params), version)
            self.swaps.append(str(weights.number))
        return self.sampler.weights.checksum()


@pytest.fixture
def loading(build, letters, model):
    """A server whose weights clients replace, and its disk."""
    sampler = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    disk = Disk(sampler, model[1])
    made = Server(sampler, letters, Sampling(stop_token_ids=(5, 9)), http_port=0, disk=disk)
    yield made, disk
    disk.may_read.set()
    disk.may_swap.set()
    made.stop(grace=5)
    sampler.sync_weights(model[1], 0)


def load(server, folder, **fields):
    status, answer = ask(server, {"model_path": folder, **fields}, LOADS)
    return status, json.loads(answer)


def in_thread(call, *args, **fields):
    """The result of a call, which is under way."""
    found: Future = Future()
    threading.Thread(target=lambda: found.set_result(call(*args, **fields)), daemon=True).start()
    return found


def test_a_client_that_leaves_ends_no_load_and_nothing_is_served_before_its_end(loading, until):
    server, disk = loading
    left = http.client.HTTPConnection("127.0.0.1", server.http_port)
    left.request("POST", LOADS, json.dumps({"model_path": "4"}), {"Content-Type": "application/json"})
    until(lambda: disk.reads and disk.live)
    left.close()
    later = in_thread(load, server, "5")
    for _ in range(20):
        status, answer = ask(server, {"prompt": "1"})
        assert status == 503 and b"loads other weights" in answer
    assert disk.live == 1 and disk.swaps == []
    disk.may_swap.set()
    served = later.result(30)[1]["weights"]
    assert disk.swaps == ["4", "5"] and disk.most == 1
    assert served == f"{server._rollout.weights.checksum():016x}"
    answer = completion(server, prompt="1", counters=[1, 2, 3, 4])
    assert answer["weights"] == [served] and server._rollout.weights.version == 2


def test_loads_follow_each_other_and_each_answer_names_the_weights_that_it_left(loading):
    server, disk = loading
    disk.may_swap.set()
    folders = ("2", "3", "4", "none", "gone")
    found = {folder: in_thread(load, server, folder, weight_version=f"v{folder}") for folder in folders}
    found = {folder: answer.result(30) for folder, answer in found.items()}
    assert disk.most == 1 and sorted(disk.swaps) == ["2", "3", "4"]
    status, refusal = found.pop("none")
    assert status == 400 and "none has no weights" in refusal["error"]["message"]
    status, refusal = found.pop("gone")
    assert status == 500 and "gone was not read: the disk has gone" in refusal["error"]["message"]
    assert all(answer["weight_version"] == f"v{folder}" for folder, (_, answer) in found.items())
    assert len({answer["weights"] for _, answer in found.values()}) == 3
    assert found[disk.swaps[-1]][1]["weights"] == f"{server._rollout.weights.checksum():016x}"


def test_completions_go_on_while_a_folder_is_read_and_a_bad_folder_stops_none(loading, until):
    server, disk = loading
    disk.may_read.clear()
    disk.may_swap.set()
    before = f"{server._rollout.weights.checksum():016x}"
    for folder, status in (("none", 400), ("3", 200)):
        disk.may_read.clear()
        answer = in_thread(load, server, folder)
        until(lambda: disk.live)
        for _ in range(5):
            assert completion(server, prompt="1", counters=[1, 2, 3, 4])["weights"] == [before]
        disk.may_read.set()
        assert answer.result(30)[0] == status
    assert (
        completion(server, prompt="1", counters=[1, 2, 3, 4])["weights"] == [answer.result()[1]["weights"]] != [before]
    )


def test_a_load_waits_for_the_completions_under_way_and_they_keep_their_weights(loading, until, monkeypatch):
    server, disk = loading
    disk.may_swap.set()
    engine, original, go, begun = server._rollout.engine, server._rollout.engine.generate, threading.Event(), []

    def slow(*args, **options):
        begun.append(1)
        assert go.wait(30)
        return original(*args, **options)

    monkeypatch.setattr(engine, "generate", slow)
    before = f"{server._rollout.weights.checksum():016x}"
    drawn = in_thread(completion, server, prompt="1", counters=[1, 2, 3, 4])
    until(lambda: begun)
    loaded = in_thread(load, server, "3")
    until(lambda: disk.reads)
    until(lambda: ask(server, {"prompt": "1"})[0] == 503)
    assert not disk.swaps and not loaded.done()
    time.sleep(0.2)
    go.set()
    assert drawn.result(30)["weights"] == [before]
    seconds = loaded.result(30)[1]["seconds"]
    assert seconds["drain"] >= 0.2 and min(seconds.values()) >= 0 and loaded.result()[1]["bytes"] == 300


def test_weights_that_are_loaded_already_are_not_loaded_again_unless_they_have_changed(loading, model):
    server, disk = loading
    disk.may_swap.set()
    status, first = load(server, "3", weight_version="v")
    assert status == 200
    several = [in_thread(load, server, "3", weight_version="v") for _ in range(4)]
    assert [one.result(30) for one in several] == [(200, first)] * 4 and disk.swaps == ["3"]
    load(server, "3", weight_version="w")
    assert disk.swaps == ["3", "3"], "another label: the folder may have changed"
    for _ in range(2):
        load(server, "3")
    assert disk.swaps == ["3"] * 4, "without a label too"
    load(server, "3", weight_version="v")
    disk.sampler.sync_weights(model[1], disk.sampler.weights.version + 1)
    assert load(server, "3", weight_version="v")[1]["weights"] == first["weights"]
    assert disk.swaps == ["3"] * 6, "somebody else had replaced them"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_version": 3}, "model_path and weight_version must be texts"),
        ({"load_format": "pickle"}, "load_format"),
    ],
)
def test_a_wrong_field_of_a_load_is_named(loading, fields, message):
    server, disk = loading
    status, answer = load(server, "3", **fields)
    assert status == 400 and message in answer["error"]["message"] and not disk.reads


def test_a_completion_of_two_policies_names_both(loading, monkeypatch):
    server, disk = loading
    engine, original, dispatches = server._rollout.engine, server._rollout.engine.generate, []
    asked = {"prompt": "1", "max_tokens": 40, "counters": [1, 2, 3, 4], "stop_token_ids": []}
    [first] = completion(server, **asked)["weights"]

    def changing(*args, **options):
        dispatches.append(1)
        if len(dispatches) == 2:
            disk.sampler.sync_weights(jax.tree.map(lambda x: x * 2, disk.params), 2)
        return original(*args, **options)

    monkeypatch.setattr(engine, "generate", changing)
    named = completion(server, **asked)["weights"]
    assert named == [first, f"{server._rollout.weights.checksum():016x}"] and named[0] != named[1]
