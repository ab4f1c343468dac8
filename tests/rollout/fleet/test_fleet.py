"""A trainer and its workers over gRPC on loopback: nothing is lost or doubled, and strangers are refused by name."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.fleet.hub import Hub
from rpg_jax.rollout.fleet.link import Link, Unreachable
from rpg_jax.rollout.fleet.post import Post
from rpg_jax.rollout.fleet.service import Service
from rpg_jax.rollout.fleet.shelf import Shelf
from rpg_jax.rollout.serving.access import Access, ApiKey

from .conftest import REQUEST, SPEC, group_of


def same(groups, request=REQUEST):
    for place, group in enumerate(groups):
        for one, expected in zip(group, group_of(request, place), strict=True):
            np.testing.assert_array_equal(one.tokens, expected.tokens)
            np.testing.assert_array_equal(one.logprobs, expected.logprobs)
            assert one.finish_reason == expected.finish_reason
    return True


def hello(**changes):
    return {"name": "h:1", "run": None, "versions": messages.versions(), **changes}


def test_workers_share_the_groups_and_read_the_weights_to_the_bit(make_fleet):
    fleet, told = make_fleet(), []
    engines = [fleet.start(str(i)) for i in range(3)]
    groups = fleet.rollout.generate(replace(REQUEST, on_group=lambda place, group: told.append(place)))
    assert same(groups) and sorted(told) == list(range(12))
    assert sorted(place for engine in engines for place in engine.places) == list(range(12))
    for tree in (tree for engine in engines for tree in engine.read):
        jax.tree.map(np.testing.assert_array_equal, tree, fleet.params)
    fleet.rollout.sync_weights(jax.tree.map(lambda x: x + 1, fleet.params), 7)
    assert fleet.rollout.generate(REQUEST)[0][0].weight_version == 7
    assert fleet.rollout.take_counts()["fleet/groups"] == 24
    fleet.rollout.dismiss()
    assert fleet.ended() == []


def test_groups_that_the_caller_has_are_not_sampled_and_enough_ends_the_request(make_fleet):
    fleet = make_fleet()
    engine = fleet.start()
    groups = fleet.rollout.generate(replace(REQUEST, done=frozenset(range(2, 12))))
    assert sorted(engine.places) == [0, 1] and groups[2:] == [[]] * 10
    some = fleet.rollout.generate(replace(REQUEST, step=7, enough=5))
    assert sum(map(bool, some)) == 5


def test_a_trainer_without_workers_waits_and_says_how_to_start_one(make_fleet, monkeypatch, capfd, until):
    monkeypatch.setattr("rpg_jax.rollout.fleet.fleet_rollout._SAY_AFTER", 0.0)
    monkeypatch.setattr("rpg_jax.rollout.fleet.fleet_rollout._LOOK", 0.01)
    fleet, made = make_fleet(), []
    thread = threading.Thread(target=lambda: made.append(fleet.rollout.generate(REQUEST)))
    thread.start()
    until(fleet.waited.is_set)
    fleet.start()
    thread.join(20)
    assert same(made[0])
    assert f"python -m rpg_jax.rollout.worker --trainer={fleet.address}" in capfd.readouterr().err


def test_a_worker_that_leaves_gives_its_groups_back(make_fleet):
    fleet, go, made = make_fleet(), threading.Event(), []
    slow = fleet.start("slow", go=go)
    thread = threading.Thread(target=lambda: made.append(fleet.rollout.generate(REQUEST)))
    thread.start()
    assert slow.begun.wait(20)
    fleet.workers[0].stop()
    fleet.start("other")
    thread.join(20)
    assert same(made[0]) and fleet.rollout.take_counts()["fleet/reassigned"] > 0
    go.set()


def test_a_worker_that_asks_before_the_trainers_know_each_other_hears_of_all_of_them():
    service, joined = Service(Hub(SPEC), Shelf(), Access()), []
    link = Link(f"127.0.0.1:{service.port}")
    thread = threading.Thread(target=lambda: joined.append(Post(link, "w", hello()).trainers))
    thread.start()
    thread.join(0.2)
    assert not joined
    service.start(["a:1", "b:2"])
    thread.join(20)
    assert joined == [["a:1", "b:2"]]
    link.close()
    service.stop()


def test_a_trainer_that_starts_again_is_joined_again_with_a_new_engine_for_another_config(make_fleet, until):
    fleet = make_fleet()
    engine = fleet.start()
    until(lambda: fleet.hub.alive == 1)
    fleet.service.session = "another"
    until(lambda: fleet.hub.alive == 2)  # the old membership is still young
    assert same(fleet.rollout.generate(REQUEST)) and engine.specs == [SPEC]
    fleet.hub.spec["capacity"] = 128
    fleet.service.session = "a third"
    until(lambda: fleet.hub.alive == 3)
    assert same(fleet.rollout.generate(REQUEST)) and engine.specs == [SPEC, {**SPEC, "capacity": 128}]


def test_a_worker_joins_a_trainer_again_that_is_elsewhere_now_and_leaves_all_its_processes(
    make_fleet, monkeypatch, until
):
    stuck = set()
    monkeypatch.setattr(Link, "_say", lambda self, *_: stuck.add(threading.get_ident()))
    monkeypatch.setattr("rpg_jax.rollout.fleet.working._BEAT", 0.05)
    fleet, second = make_fleet(), Service(Hub(SPEC), Shelf(), Access())
    fleet.service.trainers = [fleet.address, f"127.0.0.1:{second.port}"]
    second.start(fleet.service.trainers)
    fleet.start(connect=lambda address, stopped: Link(address, patience=600.0, stopped=stopped))
    until(lambda: second._hub.alive == 1)
    second.stop()
    until(lambda: len(stuck) == 3)  # two lanes, and the sign of life for the one that is gone
    third = Service(Hub(SPEC), Shelf(), Access())
    fleet.hub._members.clear()
    fleet.service.trainers, fleet.service.session = [fleet.address, f"127.0.0.1:{third.port}"], "another"
    third.start(fleet.service.trainers)
    until(lambda: third._hub.alive == 1)  # no call waits for the one that is gone
    fleet.rollout.dismiss()
    assert fleet.ended() == [] and third._hub.alive == 0
    third.stop()


def test_a_worker_whose_trainer_is_gone_says_so_and_ends_when_its_patience_does(make_fleet, monkeypatch, capfd, until):
    monkeypatch.setattr("rpg_jax.rollout.fleet.link._SAY_AFTER", 0.0)
    fleet = make_fleet()
    fleet.start(connect=lambda address, stopped: Link(address, patience=0.2, stopped=stopped))
    post = Post(fleet.connect(fleet.address), "w", hello())
    until(lambda: fleet.hub.alive == 2)
    fleet.service.stop()
    (error,) = fleet.ended()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        post.leave()
    assert time.monotonic() - began < 5, "a call that is repeated takes ten"
    assert f"the trainer at {fleet.address} does not answer: " in str(error) and "connect" in str(error)
    assert f"no answer from {fleet.address} since 0 s: " in capfd.readouterr().err


def test_a_group_that_fails_again_and_again_is_the_rollouts_fault(make_fleet):
    fleet = make_fleet()
    fleet.start("bad", fault=RolloutError("non-finite logits"))
    with pytest.raises(RolloutError, match=r"prompt 1\d\d of step 6 failed 2 times: bad: non-finite logits"):
        fleet.rollout.generate(REQUEST)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": {**messages.versions(), "jax": "0.0.1"}}, "another program: jax is '0.0.1'"),
        ({"run": "other"}, "trainer of run 'r', and the worker h:1 was started with --run=other"),
    ],
    ids=["program", "run"],
)
def test_a_worker_of_another_program_or_run_is_refused_by_name(make_fleet, changes, reason):
    fleet = make_fleet()
    with pytest.raises(ValueError, match=reason):
        Post(fleet.connect(fleet.address), "w", hello(**changes))


def test_without_the_key_nothing_is_served(make_fleet):
    fleet = make_fleet(key=ApiKey("a" * 32))
    assert Post(fleet.connect(fleet.address), "w", hello()).spec == SPEC
    for key in (None, ApiKey("b" * 32)):
        link = Link(fleet.address, key=key)
        with pytest.raises(ValueError, match="UNAUTHENTICATED"):
            Post(link, "w", hello())
        with pytest.raises(ValueError, match="UNAUTHENTICATED"):
            link.read("weights")


def test_a_secret_never_leaves_the_machine_in_plain_text():
    with pytest.raises(ValueError, match="10.0.0.1:9100 is not loopback: pass --certificate"):
        Link("10.0.0.1:9100", key=ApiKey("a" * 32))


def test_a_read_that_breaks_goes_on_where_it_broke(make_fleet, monkeypatch):
    import grpc

    from rpg_jax.rollout.fleet.shelf import Item

    fleet = make_fleet()
    content = np.random.default_rng(0).bytes(5 * messages.CHUNK + 17)
    fleet.shelf.put("x", Item({"a": 1}, [memoryview(content)[:1000], memoryview(content)[1000:]]))
    link, offsets = fleet.connect(fleet.address), []
    stream = link._stream

    class Broken(grpc.RpcError):
        code, details = (lambda self: grpc.StatusCode.UNAVAILABLE), (lambda self: "gone")

    def breaking(message, **options):
        offsets.append(messages.unpack(message)[0]["offset"])
        for count, reply in enumerate(stream(message, **options)):
            if count == 3 and len(offsets) < 3:
                raise Broken
            yield reply

    monkeypatch.setattr(link, "_stream", breaking)
    head, held = link.read("x")
    assert held == content and head["a"] == 1
    assert offsets == [0, messages.CHUNK + 1000, 3 * messages.CHUNK + 1000]


def test_readers_leave_threads_for_the_other_calls(make_fleet, monkeypatch):
    monkeypatch.setattr("rpg_jax.rollout.fleet.service._THREADS", 2)
    monkeypatch.setattr("rpg_jax.rollout.fleet.service._READS", 1)
    fleet, held, go = make_fleet(), threading.Event(), threading.Event()

    def chunks(offset):
        held.set()
        assert go.wait(20)
        yield b"ab"

    fleet.shelf.put("x", SimpleNamespace(head={}, size=2, chunks=chunks))
    found = []
    readers = [threading.Thread(target=lambda: found.append(fleet.connect(fleet.address).read("x"))) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert held.wait(20)
    assert Post(Link(fleet.address, patience=1.0), "w", hello()).spec == SPEC
    go.set()
    for reader in readers:
        reader.join(20)
    assert found == [({"size": 2}, b"ab")] * 3


def test_messages_that_are_none_are_errors_of_the_caller(make_fleet, monkeypatch):
    fleet = make_fleet()
    monkeypatch.setattr("rpg_jax.rollout.fleet.service._WAIT", 0.01)
    link = fleet.connect(fleet.address)
    for message in (b"", b"\xff\xff\xff\xff{}", b"\x02\0\0\0[]"):
        monkeypatch.setattr(messages, "pack", lambda *_, m=message: m)
        with pytest.raises(ValueError, match="INVALID_ARGUMENT: ValueError: no message of the fleet"):
            link.call("Join", {})
    monkeypatch.undo()
    Post(link, "w", hello())
    with pytest.raises(ValueError, match="INVALID_ARGUMENT: ValueError: invalid literal"):
        link.call("Lease", {"worker": "w", "room": "many", "progress": "some"})
