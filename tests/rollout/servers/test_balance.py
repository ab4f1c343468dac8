"""Servers that are silent, full, dead, or behind a bad network: what is asked of whom, and when a run ends."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.servers import balance, client, protocol
from rpg_jax.rollout.servers.client import Caller, Client, Unavailable, source
from rpg_jax.rollout.servers.server import KINDS, Server
from rpg_jax.rollout.serving.access import ApiKey

from .conftest import REQUEST, first_of
from .proxy import FAULTS, Proxy
from .test_rollout import COMPLETIONS, ONE, same

MANY = replace(REQUEST, group_size=5)  # 40 completions


@pytest.fixture
def silent():
    """The address of a server that never answers: it accepts connections, or its queue of connections is full."""
    opened = []

    def make(accepts):
        listener = socket.socket()
        opened.append(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128 if accepts else 0)
        while not accepts:
            one = socket.socket()
            opened.append(one)
            one.settimeout(0.2)
            try:
                one.connect(listener.getsockname())
            except TimeoutError:
                break
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    for one in opened:
        one.close()


def seconds_for(rollout, request):
    """The time of a request, whose completions are the right ones."""
    begun = time.monotonic()
    assert same(rollout.generate(request), request)
    return time.monotonic() - begun


def test_two_silent_servers_of_eight_cost_no_request_more_than_the_time_to_connect(stand_in, served, silent):
    urls = [silent(accepts=True), silent(accepts=False)]
    servers = [stand_in(lambda path, body: time.sleep(0.02) if path == COMPLETIONS else None) for _ in range(6)]
    rollout = served(*urls, *(server.url for server in servers), timeout=600)
    assert seconds_for(rollout, MANY) < client.CONNECT_SECONDS
    counts = rollout.take_counts()
    assert counts["servers/answering"] == 6 and counts["servers/failures"] == 0


def test_a_server_that_falls_silent_midway_is_found_by_its_health_and_its_calls_go_to_the_others(
    stand_in, served, monkeypatch, until
):
    monkeypatch.setattr(balance, "_QUIET_SECONDS", 0.3)
    silent, go = threading.Event(), threading.Event()

    def hangs(path, body):
        if silent.is_set():
            go.wait(20)

    first, second = stand_in(hangs), stand_in()
    rollout = served(first.url, second.url, timeout=600)
    assert same(rollout.generate(REQUEST))
    silent.set()
    assert seconds_for(rollout, replace(MANY, step=7)) < 10
    assert rollout.take_counts()["servers/answering"] == 1
    silent.clear()
    go.set()
    until(lambda: not first_of(rollout).resting)


def test_a_server_that_is_started_anew_while_nothing_is_asked_loads_the_weights(stand_in, served, monkeypatch, until):
    monkeypatch.setattr(balance, "_QUIET_SECONDS", 0.3)
    before = stand_in()
    rollout = served(before.url)
    assert same(rollout.generate(REQUEST))
    before.end()
    until(lambda: first_of(rollout).resting)
    anew = stand_in(port=before.server_address[1])
    assert same(rollout.generate(REQUEST))
    assert anew.paths().index("/collective_rpc") < anew.paths().index(COMPLETIONS)


async def posted(url, health=False):
    client = Client(timeout=0.5)
    try:
        await (Caller(url, client).look(0.5) if health else Caller(url, client).post("/", {}))
    finally:
        await client.close()


def admits(most, seconds):
    """A server that refuses what is more than so many completions at once."""
    lock, live = threading.Lock(), [0]

    def fault(path, body):
        if path != COMPLETIONS:
            return None
        with lock:
            if live[0] >= most:
                return 429, {}
            live[0] += 1
        time.sleep(seconds)
        with lock:
            live[0] -= 1
        return None

    return fault


@pytest.mark.slow  # compiles, or waits, for seconds
def test_a_server_that_admits_fewer_than_it_is_asked_for_is_kept_full(stand_in, served):
    known = served(stand_in(admits(16, 0.5)).url, parallel=16, rest=1.0)
    found = served(stand_in(admits(16, 0.5)).url, parallel=24, rest=1.0)
    # The limit falls by a quarter and then rises by one a round: 14 of 16 on average. Twice, for a busy machine.
    most = replace(REQUEST, group_size=16)
    assert seconds_for(found, most) < 2 * seconds_for(known, most)
    counts = found.take_counts()
    assert 0 < counts["servers/refused"] < 40 and counts["servers/failures"] == 0 and counts["servers/loads"] == 1


def test_too_many_open_files_of_this_process_are_no_failure_of_a_server(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Client, "request", refused)
    with pytest.raises(RolloutError, match="this process has too many open files to call http://a: .*ulimit -n"):
        asyncio.run(posted("http://a"))


FULL = Unavailable("full", status=429)


def test_a_rest_doubles_with_each_incident_and_is_never_longer_than_30_seconds():
    server, rests, incidents = Server(Caller("http://127.0.0.1:1", Client(timeout=1)), most=24, rest=1.0), [], 0
    for now in range(1, 1101):
        for _ in range(24):  # calls that were under way together
            incidents += server.note_failure(Unavailable("no"), now - 0.5, now)
        rests.append(server.until - now)
    assert rests[:6] == [1, 2, 4, 8, 16, 30] and max(rests) == 30 and incidents == server.failures == 1100
    server.note_answer()
    server.note_failure(Unavailable("no", after=500), 2000, 2000)
    assert server.failures == 1 and server.until == 2030


def test_refusals_of_calls_that_were_under_way_together_lower_the_limit_once():
    server = Server(Caller("http://127.0.0.1:1", Client(timeout=1)), most=24, rest=1.0)
    server.calls = 16
    for now in (1, 5):
        for _ in range(8):
            server.note_refusal(FULL, now - 0.5, now)
    assert server.limit == 24 * 0.75**2 and server.until == 5, "those under way will end: it need not pause"
    for _ in range(14):
        server.note_answer()
    assert abs(server.limit - 14.5) < 0.05, "a round of answers adds one"
    for now in range(10, 40):
        server.note_refusal(FULL, now - 0.5, now)
    assert server.limit == 1 and not server.failures
    server.calls = 0
    server.note_refusal(FULL, 50, 50)
    assert server.until == 51
    server.note_refusal(Unavailable("full", status=429, after=500), 60, 60)
    assert server.until == 90


def test_a_request_never_returns_to_a_server_that_failed_it_while_another_lives(stand_in, served):
    def fails(path, body):
        return (500, {}) if path == COMPLETIONS and len(body["prompt"]) == 5 else None

    def takes_time(path, body):
        if path == COMPLETIONS:
            time.sleep(0.25 if len(body["prompt"]) == 5 else 0.02)

    servers = [stand_in(fails), stand_in(takes_time)]
    rollout = served(*(server.url for server in servers), parallel=2, rest=0.01)
    assert same(rollout.generate(MANY), MANY)
    assert rollout.take_counts()["servers/longest_idle"] < 0.25, "all that waits has failed at the first"
    at_first = [body["seed"] for path, body in servers[0].calls if path == COMPLETIONS and len(body["prompt"]) == 5]
    assert at_first and len(at_first) == len(set(at_first))


def test_a_server_that_is_down_is_asked_for_its_health_alone(stand_in, served, until):
    down, asked = threading.Event(), []

    def fault(path, body):
        asked.append(path)
        return (503, {"status": "draining"}) if down.is_set() else None

    first, second = stand_in(fault), stand_in(lambda path, body: time.sleep(0.02))
    rollout = served(first.url, second.url)
    assert same(rollout.generate(REQUEST))
    down.set()
    rollout.generate(replace(MANY, step=7))
    asked.clear()
    rollout.generate(replace(MANY, step=8))
    assert set(asked) == {"/is_paused"}
    down.clear()
    until(lambda: not first_of(rollout).resting)
    asked.clear()
    rollout.generate(replace(MANY, step=9))
    assert asked.count("/collective_rpc") == 1 and COMPLETIONS in asked


def test_a_healthy_server_whose_calls_fail_three_times_in_a_row_is_named_once(stand_in, served, capsys):
    dead = stand_in(lambda path, body: (500, {"error": "EngineDeadError"}) if path == COMPLETIONS else None)
    alive = stand_in(lambda path, body: time.sleep(0.03) if path == COMPLETIONS else None)
    rollout = served(dead.url, alive.url)
    for step in (6, 7):
        request = replace(MANY, step=step)
        assert same(rollout.generate(request), request)
    assert rollout.take_counts()["servers/answering"] == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{dead.url} says that it is healthy, and its last 3 calls have failed") and "Dead" in line
    alive.end()
    rollout._balance._patience = 0.5
    with pytest.raises(RolloutError, match=f"no server has answered for 0.5 s .*{dead.url}.*EngineDeadError"):
        rollout.generate(ONE)


def test_what_fails_before_a_request_is_sent_is_no_fault_of_the_request(served, stand_in, silent, monkeypatch):
    closed = stand_in()
    closed.end()
    rollout, found = served(closed.url), []
    thread = threading.Thread(target=lambda: found.append(rollout.generate(ONE)))
    thread.start()
    time.sleep(0.5)  # fifty health calls
    stand_in(port=closed.server_address[1])
    thread.join(20)
    assert same(found[0], ONE)
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.2)
    for accepts, health in itertools.product((False, True), repeat=2):
        with pytest.raises(Unavailable) as failed:
            asyncio.run(posted(silent(accepts), health))
        assert failed.value.fault == (accepts and not health)
    failing = stand_in(lambda path, body: (500, {}))
    for health in (False, True):
        with pytest.raises(Unavailable, match="500") as failed:
            asyncio.run(posted(failing.url, health))
        assert failed.value.fault == (not health)


def test_the_bits_are_those_without_faults_behind_a_network_that_drops_loses_delays_and_cuts(stand_in, served):
    """Every twelfth connection to three servers has a fault, those of health and loads included."""
    proxies = []
    for first in range(3):
        faults = (fault for i in itertools.count(first) for fault in [*[None] * 11, FAULTS[i % len(FAULTS)]])
        proxies.append(Proxy(stand_in().server_address[1], faults))
    rollout, total = served(*(proxy.url for proxy in proxies), rest=0.02, timeout=5), Counter()
    for step in range(8):
        request = replace(MANY, step=step)
        assert same(rollout.generate(request), request)
        total.update(rollout.take_counts())
    met = Counter(fault for proxy in proxies for fault in proxy.met)
    assert met.keys() == {None, *FAULTS}
    assert total["servers/requests"] == 320 and total["servers/refused"] == met[429]
    assert total["servers/failures"] > 10 and total["servers/loads"] > 24
    for proxy in proxies:
        proxy.end()


def test_servers_of_a_file_or_a_folder_come_and_go_while_a_request_is_answered(
    stand_in, served, tmp_path, monkeypatch, until
):
    monkeypatch.setattr(balance, "_FOLLOW_SECONDS", 0.05)
    servers = [stand_in(lambda path, body: time.sleep(0.02) if path == COMPLETIONS else None) for _ in range(3)]
    first, second, third = (server.url for server in servers)
    folder = tmp_path / "servers"
    rollout = served(source(f"file:{folder}", Client(timeout=1).check), parallel=1, patience=20)
    found = []
    thread = threading.Thread(target=lambda: found.append(rollout.generate(replace(REQUEST, group_size=20))))
    thread.start()  # there is no folder yet
    time.sleep(0.3)
    folder.mkdir()
    (folder / "one").write_text(f"{first}  # spot\n", encoding="utf-8")
    until(lambda: COMPLETIONS in servers[0].paths())
    (folder / "two").write_text(f"# two of them\n{second}\n{third}/\n", encoding="utf-8")
    until(lambda: all(COMPLETIONS in server.paths() for server in servers))
    (folder / ".two.1.partial").write_text(first, encoding="utf-8")  # half-written by one that was killed
    (folder / "one").unlink()
    (folder / "two").write_text(f"no address\n{third}", encoding="utf-8")
    until(lambda: list(rollout._balance._servers) == [third])
    asked = [len(server.calls) for server in servers[:2]]
    thread.join(20)
    assert same(found[0], replace(REQUEST, group_size=20))
    assert all(len(server.calls) <= before + 1 for server, before in zip(servers[:2], asked, strict=True))
    assert rollout.take_counts()["servers/failures"] == 0


def test_a_machine_that_vanishes_with_its_address_keeps_no_call(stand_in, served, tmp_path, monkeypatch, until):
    """Nothing closes its connections, and the timeout of a call is long."""
    monkeypatch.setattr(balance, "_FOLLOW_SECONDS", 0.05)
    monkeypatch.setattr(balance, "_QUIET_SECONDS", 0.3)
    vanished, go = threading.Event(), threading.Event()

    def silent(path, body):
        if vanished.is_set() or path == COMPLETIONS:
            go.wait(20)

    vanishing = stand_in(silent)
    file = tmp_path / "servers"
    file.write_text(vanishing.url, encoding="utf-8")
    rollout, found = served(source(f"file:{file}", Client(timeout=1).check), timeout=600), []
    thread = threading.Thread(target=lambda: found.append(rollout.generate(REQUEST)))
    thread.start()
    until(lambda: COMPLETIONS in vanishing.paths())
    vanished.set()
    file.write_text(stand_in().url, encoding="utf-8")
    thread.join(10)
    assert found and same(found[0])
    go.set()


def test_a_balance_that_is_cancelled_at_the_end_of_a_look_ends():
    """`asyncio.wait_for` of Python 3.11 loses this cancellation, and the close of a rollout then waits for ever."""

    async def cancelled():
        async def look():
            running.cancel()
            return []

        made = balance.Balance(look, Client(timeout=1), KINDS["vllm"], parallel=1, patience=1)
        running = asyncio.create_task(made.run())
        await asyncio.wait([running], timeout=2)
        return running.cancelled()

    assert asyncio.run(asyncio.wait_for(cancelled(), 10))


def test_an_address_stays_while_the_client_of_a_bucket_raises_what_it_likes(stand_in, served, monkeypatch, until):
    monkeypatch.setattr(balance, "_FOLLOW_SECONDS", 0.02)
    looks, server = [], stand_in()

    async def look():
        looks.append(None)
        if len(looks) != 2:
            raise RuntimeError("503 of the bucket")
        return [server.url]

    rollout = served(look)
    assert same(rollout.generate(ONE), ONE)
    until(lambda: len(looks) > 4)
    assert same(rollout.generate(ONE), ONE) and not rollout._running.done()


def test_a_name_is_resolved_again_and_stands_for_all_its_addresses(stand_in, served, monkeypatch, until):
    monkeypatch.setattr(balance, "_FOLLOW_SECONDS", 0.05)
    known, port = [], stand_in(host="127.0.0.2").server_address[1]
    stand_in(host="127.0.0.3", port=port)

    async def getaddrinfo(loop, name, at, **options):
        if name != "servers.test":
            return await original(loop, name, at, **options)
        if not known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, at)) for host in known]

    original = asyncio.BaseEventLoop.getaddrinfo
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    rollout = served(source(f"dns://servers.test:{port}", Client(timeout=1).check), patience=0.5)
    with pytest.raises(RolloutError, match="no server has answered for 0.5 s .*Name or service not known"):
        rollout.generate(ONE)
    known[:] = ["127.0.0.2", "127.0.0.3"]
    assert same(rollout.generate(MANY), MANY)
    assert sorted(rollout._balance._servers) == [f"http://127.0.0.{i}:{port}" for i in (2, 3)]
    known.pop()
    until(lambda: len(rollout._balance._servers) == 1)
    assert same(rollout.generate(ONE), ONE)


@pytest.mark.parametrize("text", ["dns://servers", "dns://servers:x", "dns://:80", "dns://servers:80/path"])
def test_a_name_without_a_port_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form dns://NAME:PORT"):
        source(text, Client(timeout=1).check)


def test_a_name_that_is_not_found_is_said_so(monkeypatch):
    async def getaddrinfo(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    with pytest.raises(Unavailable, match="^http://servers.test:80/: Name or service not known$"):
        asyncio.run(posted("http://servers.test:80"))


@pytest.mark.parametrize("text", ["http://a..b:8000", "dns://a..b:8000", f"http://{'a' * 64}:8000"])
def test_a_name_that_cannot_be_looked_up_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form http://HOST:PORT"):
        source(text, Client(timeout=1).check)


def test_a_name_over_plain_text_gets_no_key():
    with pytest.raises(ValueError, match="would go to http://servers:80 in plain text"):
        source("dns://servers:80", Client(timeout=1, key=ApiKey("k" * 20)).check)
    assert callable(source("dns+https://servers:80", Client(timeout=1, key=ApiKey("k" * 20)).check))


def test_a_thousand_completions_wait_without_a_thread_each_and_one_that_is_given_up_leaves_no_call(
    stand_in, served, until
):
    server = stand_in(lambda path, body: time.sleep(0.05) if path == COMPLETIONS else None)
    rollout, before = served(server.url, parallel=8), threading.active_count()
    request, failed = replace(REQUEST, group_size=125), []

    def stops(place, group):
        failed.append(threading.active_count())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout.generate(replace(request, on_group=stops))
    assert failed[0] - before <= 10, "one a call in the stand-in"
    until(lambda: not first_of(rollout).calls and not rollout._balance._waiting)
    assert same(rollout.generate(ONE), ONE)


@pytest.mark.parametrize("place", ["_say", "_watch"])
def test_an_error_that_ends_the_balance_is_the_error_of_all_that_waits_and_comes(place, monkeypatch):
    def gone(*_):
        raise OSError("stderr is gone")

    async def gone_later(*_):
        gone()

    monkeypatch.setattr(balance.Balance, place, gone if place == "_say" else gone_later)

    async def ask():
        made = balance.Balance(["http://127.0.0.1:1"], Client(timeout=1), KINDS["vllm"], parallel=1, patience=60)
        made.use(protocol.Loadable("", "", 0))
        running = asyncio.create_task(made.run())
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="stderr is gone"):
                    await asyncio.wait_for(made.ask({}, dict), 2)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(ask())
