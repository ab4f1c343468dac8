"""The gRPC server on loopback: JetStream's protocol, the in-process tokens, and a clear status for what it refuses."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import jax
import numpy as np
import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.jetstream.adapter import JetstreamMetricsCollector, jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.servers import rollout as servers_rollout
from rpg_jax.rollout.servers.rollout import connect
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling


@pytest.fixture(scope="module")
def server(build, letters):
    made = Server(
        JetStreamRollout(build("orchestrator").engine, keep_state=True, metrics_collector=JetstreamMetricsCollector()),
        letters,
        Sampling(temperature=0.0, stop_token_ids=(5, 9)),
        max_active=60,
        http_port=0,
    )
    yield made
    made.stop(grace=5)


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


def rollout_by(server, parallel):
    """The rollout of a client that asks the server over HTTP."""
    own = server._rollout.engine
    sizes = {"capacity": own.decoding.capacity, "vocab_size": own.config.vocab_size}
    url = f"http://127.0.0.1:{server.http_port}"
    return connect(url, certificate=None, key=None, parallel=parallel, **sizes)


def ask(tokens=(1, 2, 3), max_tokens=4, text=None):
    if text is not None:
        content = {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=text)}
    else:
        content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)}
    return jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **content)


def test_completions_from_the_server_are_those_in_process(server, work, expected, is_same):
    client = rollout_by(server, 40)
    assert is_same(client.generate(work), expected)
    with pytest.raises(ValueError, match="does not fit"):
        client.generate(replace(work, prompts=[np.ones(40, np.int32)], prompt_ids=[0]))
    client.close()


def test_a_server_names_its_weights_and_other_weights_give_no_common_score(build, letters, work, monkeypatch):
    monkeypatch.setattr(servers_rollout, "_PATIENCE", 1.0)  # other weights are waited out, as those of a sync under way
    rollout = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    made = Server(rollout, letters, Sampling(), http_port=0)
    client = rollout_by(made, 4)
    try:
        assert client.weights.checksum() == (before := rollout.weights.checksum())
        assert client.generate(work)
        own = rollout.weights._synced
        rollout.sync_weights(jax.tree.map(lambda x: 2 * x, own), 1)
        with pytest.raises(
            ValueError, match=f"has the weights .*{rollout.weights.checksum():016x}.*, and the trainer {before:016x}"
        ):
            client.generate(work)
        rollout.sync_weights(own, 0)  # of an engine that other tests use
    finally:
        client.close()
        made.stop(grace=5)


@pytest.fixture(scope="module")
def long_tail(work, build):
    """64 prompts x 16 completions of 1 to 24 tokens, and the oracle's answer."""
    prompts = [work.prompts[i % 10] for i in range(64)]
    asked = replace(work, prompts=prompts, prompt_ids=range(64), group_size=16)
    return asked, build("simple").generate(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "slots", [pytest.param(8, marks=pytest.mark.soak), 32, pytest.param(128, marks=pytest.mark.soak)]
)
def test_a_thousand_completions_are_the_same_from_every_driver_and_number_of_slots(
    build, long_tail, is_same, slots, letters
):
    asked, expected = long_tail
    for driver in ("orchestrator", "lockstep"):
        assert is_same(build(driver, slots).generate(asked), expected, atol=2e-5)  # the largest error of 20,000
    engine = build("orchestrator", slots).engine
    made = Server(JetStreamRollout(engine, keep_state=True), letters, Sampling(), max_active=2000, http_port=0)
    client = rollout_by(made, 2 * slots)
    try:
        assert is_same(client.generate(asked), expected, atol=2e-5)
    finally:
        client.close()
        made.stop(grace=5)


def test_plain_jetstream_requests_get_text_or_token_ids_without_the_stop_token(stub, letters):
    ids = [t for r in stub.Decode(ask(max_tokens=20)) for t in r.stream_content.samples[0].token_ids]
    words = [r.stream_content.samples[0].text for r in stub.Decode(ask(text="123", max_tokens=20))]
    assert 0 < len(ids) <= 20 and not {5, 9} & set(ids)
    assert "".join(words) == letters.decode(ids)
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (jetstream_pb2.DecodeRequest(max_tokens=3), "neither text_content nor token_content"),
        (ask(tokens=()), "at least one token"),
        (ask(text=""), "at least one token"),
        (ask(tokens=[1] * 60), "does not fit"),
        (ask(tokens=[1, 999]), "vocabulary"),
        (ask(tokens=[-5]), "vocabulary"),
        (ask(max_tokens=0), "max_tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_invalid_arguments(stub, request_, message):
    with pytest.raises(grpc.RpcError, match=message) as caught:
        list(stub.Decode(request_))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_flood_is_refused_beyond_capacity_and_the_rest_is_served(server, stub, monkeypatch):
    """150 requests while the engine stands still, to a server of 60."""
    go, original = threading.Event(), server._rollout.engine.prefill

    def held(**arguments):
        assert go.wait(30)
        return original(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(server._rollout.engine, "prefill", held)
        calls = [stub.Decode(ask(max_tokens=24)) for _ in range(150)]
        deadline = time.monotonic() + 20
        while sum(call.done() for call in calls) < 90:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        go.set()
        codes = []
        for call in calls:
            try:
                assert list(call)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
    assert codes.count(grpc.StatusCode.OK) == 60
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 90


@pytest.mark.slow
def test_memory_stays_flat_under_requests_of_every_kind(server, stub):
    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def load(rounds):
        for number in range(rounds):
            stub.Decode(ask(max_tokens=24)).cancel()
            for bad in (ask(tokens=()), ask(tokens=[1] * 60), ask(tokens=[1, 999])):
                with pytest.raises(grpc.RpcError):
                    list(stub.Decode(bad))
            assert list(stub.Decode(ask(tokens=(1 + number % 40, 2), max_tokens=8)))

    load(100)
    before = resident()
    load(400)
    assert resident() - before < 8 * 2**20  # 2,000 requests: 4 KiB each would be a leak
    deadline = time.monotonic() + 20
    while server._admission.active or server._rollout.driver()._channels:
        assert time.monotonic() < deadline, "a request outlives its caller"
        time.sleep(0.01)


def test_abandoned_requests_give_their_slots_back(server, stub, work, expected, is_same):
    for _ in range(40):
        stub.Decode(ask(max_tokens=24)).cancel()
    client = rollout_by(server, 8)
    assert is_same(client.generate(work), expected)
    client.close()


def test_a_fault_is_an_internal_error_and_the_next_request_is_served(server, stub, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("device fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(server._rollout.engine, "prefill", broken)
        with pytest.raises(grpc.RpcError, match="fell off the bus") as caught:
            list(stub.Decode(ask()))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert list(stub.Decode(ask()))


def test_metrics_count_requests_and_tokens(server, stub):
    list(stub.Decode(ask()))
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=10).read().decode()
    assert 'rpg_requests_total{code="OK"}' in page and "rpg_tokens_total" in page
    assert "jetstream_slots_available_percentage" in page


def test_a_shutdown_ends_what_runs_and_refuses_what_comes(build, letters, monkeypatch):
    sampler = JetStreamRollout(build("orchestrator").engine)
    made = Server(sampler, letters, Sampling())
    done, begun, original = [], threading.Event(), sampler.engine.prefill
    with grpc.insecure_channel(f"127.0.0.1:{made.port}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        list(stub.Decode(ask()))
        monkeypatch.setattr(sampler.engine, "prefill", lambda **asked: begun.set() or original(**asked))
        running = threading.Thread(target=lambda: done.append(len(list(stub.Decode(ask(max_tokens=24))))))
        running.start()
        assert begun.wait(60)
        made.stop()
        running.join(timeout=20)
        assert done and done[0] > 0
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Decode(ask(), timeout=5))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_taken_port_is_a_clear_error(build, server, letters):
    sampler = JetStreamRollout(build("orchestrator").engine)
    with pytest.raises(ValueError, match="cannot serve on"):
        Server(sampler, letters, Sampling(), port=server.port)


def test_a_client_that_is_closed_does_not_wait_for_a_server_that_is_silent(server, work, monkeypatch):
    asked, over = threading.Event(), threading.Event()
    client, original = rollout_by(server, 2), server._rollout.engine.prefill

    def held(**arguments):
        asked.set()
        assert over.wait(60)
        return original(**arguments)

    monkeypatch.setattr(server._rollout.engine, "prefill", held)
    fails = ((RolloutError, futures.CancelledError), client.generate, work)
    threading.Thread(target=pytest.raises, args=fails, daemon=True).start()
    assert asked.wait(20)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(timeout=20)
    waits = closing.is_alive()
    over.set()
    assert not waits


def test_a_server_that_is_not_there_is_one_line():
    with pytest.raises(ValueError, match="http://127.0.0.1:1/v1/completions: Connection refused"):
        connect("http://127.0.0.1:1", certificate=None, key=None, parallel=2, capacity=8, vocab_size=8)
