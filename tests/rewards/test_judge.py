"""A judge over HTTP: many requests at once, retries, a deadline, a cache; a failure is a verdict error of its kind."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from rpg_jax.rewards import verifiers
from rpg_jax.rewards.judge import Judge, Server
from rpg_jax.rewards.scorer import Scorer


@pytest.fixture
def served():
    """Starts servers whose `answer(body, n)` returns a status and a reply to the n-th request, from 0."""
    started = []

    def serve(answer):
        bodies, lock = [], threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(bodies)
                    bodies.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
                status, reply = answer(body, number)
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the judge has given up
                    self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}", bodies

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def chat(text):
    return {"choices": [{"message": {"content": text}}]}


def judged(url, items, **fields):
    judge = Judge(Server(url=url, **fields), sleep=lambda seconds: asyncio.sleep(0))
    try:
        return [(v.score, v.error) for v in judge.run(items)]
    finally:
        judge.close()


def items(count):
    return [(f"c{i}", f"a{i}", f"p{i}") for i in range(count)]


def test_a_chat_judge_reads_question_reference_and_completion_and_answers_at_temperature_0(served, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    url, bodies = served(lambda body, n: (200, chat("Fine.\nScore (0-10): 7/10")))
    assert judged(f"{url}/v1", [("{answer}", "42", "six times seven?")], model="m") == [(0.7, None)]
    [body] = bodies
    assert (body["path"], body["model"], body["temperature"], body["key"]) == (
        "/v1/chat/completions",
        "m",
        0,
        "Bearer secret",
    )
    text = body["messages"][0]["content"]
    assert "six times seven?" in text and "\n42\n" in text and "{answer}" in text, "the completion's braces stay"


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("8", (0.8, None)), ("<think>9</think>\n3.5", (0.35, None)), ("1\n\n0\n", (0.0, None)),
        ("Grade (0 to 10) - 8", (0.8, None)), ("8 (scale: 0 to 10)", (0.8, None)), ("Score (0-10): 8", (0.8, None)),
        ("Score: (8 out of 10)", (0.8, None)),
        ("Grade: (8)", (0.8, None)), ("(8.5/10)", (0.85, None)), ("I give none (0 to 10)", (None, "value")),
        ("no grade", (None, "value")), ("11", (None, "value")), ("", (None, "value")), (None, (None, "value")),
    ],
)  # fmt: skip
def test_the_number_in_the_last_line_is_the_grade(reply, found):
    [verdict] = Server(url="http://x").verdicts(chat(reply), 1)
    assert (verdict.score, verdict.error) == found


def test_a_long_last_line_is_graded_in_linear_time():
    began = time.process_time()  # where the time is quadratic: 17 seconds
    [verdict] = Server(url="http://x").verdicts(chat("(" + "1-" * 60_000), 1)
    assert verdict.score == 0.1 and time.process_time() - began < 2


def test_a_scoring_endpoint_gets_batches_and_equal_completions_are_asked_once(served):
    url, bodies = served(lambda body, n: (200, {"scores": [float(c[1:]) for c in body["completions"]]}))
    judge = Judge(Server(url=url, kind="score", batch=3))
    twice = [*items(7), *items(7)[::-1]]
    assert [v.score for v in judge.run(twice)] == [*range(7), *reversed(range(7))]
    assert sorted(len(body["prompts"]) for body in bodies) == [1, 3, 3]
    assert [v.score for v in judge.run(items(7))] == [*range(7)] and len(bodies) == 3
    judge.close()


@pytest.mark.parametrize(
    ("kind", "address", "asked"),
    [
        ("chat", "/v1/", "/v1/chat/completions"),
        ("chat", "/v1/chat/completions", "/v1/chat/completions"),
        ("chat", "/v1?version=1", "/v1/chat/completions?version=1"),
        ("chat", "/m/chat/completions/?version=1", "/m/chat/completions?version=1"),
        ("score", "/score/", "/score/"),
    ],
)
def test_a_query_stays_behind_the_path_and_a_scoring_endpoint_gets_its_whole_address(served, kind, address, asked):
    url, bodies = served(lambda body, n: (200, chat("5") | {"scores": [0.5]}))
    assert judged(f"{url}{address}", items(1), kind=kind) == [(0.5, None)]
    assert bodies[0]["path"] == asked


def test_requests_are_under_way_together(served):
    together = threading.Barrier(8, timeout=5)
    url, _ = served(lambda body, n: (together.wait() >= 0 and 200, chat("5")))
    assert judged(url, items(8), parallel=8) == [(0.5, None)] * 8


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(served):
    url, bodies = served(lambda body, n: (503, {}) if n < 2 else (200, chat("10")))
    assert judged(url, items(1)) == [(1.0, None)] and len(bodies) == 3
    url, bodies = served(lambda body, n: (503, {}))
    assert judged(url, items(1)) == [(None, "status")] and len(bodies) == 4
    url, bodies = served(lambda body, n: (401, {}))
    assert judged(url, items(1)) == [(None, "status")] and len(bodies) == 1
    assert judged("http://127.0.0.1:9", items(1)) == [(None, "unreachable")]


def test_the_key_goes_to_no_other_host_and_into_no_message(served, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret\n")
    other, _ = served(lambda body, n: (200, chat("5")))
    url, bodies = served(lambda body, n: (302, {}))
    judge = Judge(Server(url=url))
    monkeypatch.setattr(BaseHTTPRequestHandler, "end_headers", with_location(f"{other}/x"))
    [verdict] = judge.run(items(1))
    assert (verdict.error, verdict.detail) == ("status", "HTTP 302: {}"), "not what the other host says"
    assert bodies[0]["key"] == "Bearer secret"
    judge.close()
    url, _ = served(lambda body, n: (401, {"message": "Bearer secret is wrong"}))
    judge = Judge(Server(url=url))
    [verdict] = judge.run(items(1))
    assert verdict.detail == 'HTTP 401: {"message": "Bearer … is wrong"}'
    judge.close()


def with_location(url, end_headers=BaseHTTPRequestHandler.end_headers):
    def ended(self):
        self.send_header("Location", url)
        end_headers(self)

    return ended


@pytest.mark.parametrize(
    ("begins", "dripped", "error"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 99\r\n\r\n", b"", "status"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 99\r\n\r\n", b"x", "status"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b"x", "timeout"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x", "timeout"),
    ],
    ids=["no text", "text of an error", "body", "head"],
)
def test_a_deadline_holds_for_a_server_that_sends_byte_after_byte(begins, dripped, error):
    with socket.create_server(("127.0.0.1", 0)) as server:
        given_up = threading.Event()

        def answer():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # the judge has given up
                connection.recv(2**16)
                connection.sendall(begins)
                while not given_up.wait(0.05):
                    connection.sendall(dripped)

        threading.Thread(target=answer, daemon=True).start()
        limit = threading.Timer(20.0, given_up.set)  # on busy cores too the judge has given up long before
        limit.start()
        found = judged(f"http://127.0.0.1:{server.getsockname()[1]}", items(1), deadline_seconds=0.2)
        in_time = not given_up.is_set()
        limit.cancel()
        given_up.set()
    assert found == [(None, error)] and in_time


@pytest.mark.parametrize("reply", [b"{", b"[" * 100_000, {"scores": [1.0]}, {"scores": [1, "x"]}, {"other": 1}])
def test_a_reply_of_another_form_is_the_servers_failure_and_a_score_that_is_none_is_a_value(served, reply):
    url, _ = served(lambda body, n: (200, reply))
    found = [error for _, error in judged(url, items(2), kind="score")]
    assert found == (["status"] * 2 if reply != {"scores": [1, "x"]} else [None, "value"])


def test_a_deadline_holds_for_a_server_that_is_slow(served):
    url, _ = served(lambda body, n: (time.sleep(1), (200, chat("1")))[1])
    began = time.monotonic()
    assert judged(url, items(1), deadline_seconds=0.2) == [(None, "timeout")]
    assert time.monotonic() - began < 0.9


def score(scorer, texts, answer="1"):
    problems = [SimpleNamespace(prompt=f"p{i}", answer=answer, source="s") for i in range(len(texts))]
    with scorer:
        return scorer(problems, texts, [1] * len(texts))


def test_a_judge_rewards_while_another_part_decides_accuracy(served):
    url, _ = served(
        lambda body, n: (200, chat("6") if "grade:\nbad" not in body["messages"][0]["content"] else chat("?"))
    )
    options = {"judge": {"url": url}}
    weights = {"judge": 1.0, "exact": 0.0}
    scores = score(Scorer(weights, options=options, accuracy="exact"), ["1", "2", "bad"])
    assert scores.rewards.tolist() == pytest.approx([0.6, 0.6, 0.0]) and scores.accuracy.tolist() == [1, 0, 0]
    assert scores.errors == {"value": 1} and scores.failures == [None, None, None]
    assert score(Scorer("judge", options=options, right_above=0.5), ["1", "2"]).accuracy.tolist() == [1, 1]
    assert score(Scorer("judge", options=options, right_above=0.6), ["1", "2"]).accuracy.tolist() == [0, 0]
    assert not verifiers.needs_answers({"judge": 1.0}) and verifiers.needs_answers(weights)


@pytest.mark.parametrize("weights", [{"judge": 1.0}, {"judge": 0.5, "exact": 0.5}])
def test_a_judge_decides_accuracy_only_from_a_grade_on_that_somebody_names(weights):
    options = {"judge": {"url": "http://x"}}
    with pytest.raises(ValueError, match="reward 'judge' decides accuracy, and grades: add --config.rewards.right_abo"):
        verifiers.check(weights, options)
    verifiers.check(weights, options, right_above=0.0)
    verifiers.check({"exact": 1.0, **weights}, options)
    verifiers.check({**weights, "exact": 0.0}, options, accuracy="exact")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "needs judge.url=http"),
        ({"url": "localhost:1"}, "needs judge.url"),
        ({"url": "http://[x"}, "needs judge.url"),
        ({"url": "http://host:port/v1"}, "needs judge.url"),
        ({"url": "http:///v1"}, "needs judge.url"),
        ({"url": "http://x", "prompt": "a"}, "{comp"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_runs(fields, reason):
    with pytest.raises(ValueError, match=reason):
        verifiers.check({"judge": 1.0}, {"judge": fields})


@pytest.mark.parametrize("url", ["http://x", "HTTPS://a-b.c_d:8000/v1/", "http://[::1]:80/score?model=m", "http://x?a"])
def test_an_address_of_every_form_is_taken(url):
    assert Server(url=url).url == url


def test_accuracy_is_decided_by_a_verifier():
    with pytest.raises(ValueError, match=r"rewards\.accuracy='format' must be a verifier among"):
        Scorer({"exact": 1.0, "format": 1.0}, accuracy="format")
