"""Who may ask a server, by TLS and an API key; connections that stall; the file in which trainers find a server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import grpc
import pytest

from rpg_jax.rollout.jetstream.adapter import jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.servers.rollout import connect
from rpg_jax.rollout.serving import server as serving
from rpg_jax.rollout.serving.access import ENVIRONMENT, Access, ApiKey, address_of, announce, file_of, pem_file
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling
from tests.fake_gcs import FakeGcs

endpoint = pytest.importorskip("rpg_jax.rollout.serving.http")

KEY = ApiKey("f0" * 16)
PEM = {"certificate": "server.pem", "private_key": "private.pem"}
HELLO = jetstream_pb2.DecodeRequest(token_content={"token_ids": [1, 2]}, max_tokens=2)


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """The PEM files of a certificate for localhost, as arguments of `Access`."""
    folder = tmp_path_factory.mktemp("tls")
    files = {name: str(folder / file) for name, file in PEM.items()}
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    out = ["-out", files["certificate"], "-keyout", files["private_key"]]
    subprocess.run([*command.split(), *names, *out], check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def guarded(build, letters, pem):
    """A server with TLS and a key."""
    rollout = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    made = Server(rollout, letters, Sampling(), access=Access("127.0.0.1", **pem, key=KEY), http_port=0)
    yield made
    made.stop(grace=5)


@pytest.fixture
def ask(guarded, pem):
    """Status and body of a request by HTTPS."""

    def ask(method, path, authorization=None, body=None):
        tls = ssl.create_default_context(cafile=pem["certificate"])
        connection = http.client.HTTPSConnection("localhost", guarded.http_port, timeout=300, context=tls)
        headers = {"Content-Type": "application/json"} if body else {}
        headers |= {} if authorization is None else {"Authorization": authorization}
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()

    return ask


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"host": "0.0.0.0"}, "host 0.0.0.0 is not loopback: it needs TLS"),
        ({"host": "::", "key": KEY}, "needs TLS"),
        ({"host": "192.168.0.7", **PEM}, "needs an API key, --api_key_file or RPG_JAX_API_KEY"),
        ({"certificate": "server.pem"}, "both --certificate and --private_key"),
        ({"host": "::", **PEM, "key": KEY}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
    ],
    ids=["plain", "no TLS", "no key", "half a certificate", "all", "loopback in IPv6", "loopback by name"],
)
def test_other_machines_are_served_with_tls_and_a_key_only(asked, message):
    if message is None:
        Access(**asked)
        return
    with pytest.raises(ValueError, match=message):
        Access(**asked)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_server_listens_on_an_address_of_ipv6(build, letters, host):
    access = Access(host)
    try:
        access.check_free("port", None)
    except ValueError:
        pytest.skip("this machine has no IPv6")
    sampler = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    made = Server(sampler, letters, Sampling(), access=access, http_port=0)
    try:
        with grpc.insecure_channel(f"[::1]:{made.port}") as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            assert list(stub.Decode(HELLO, timeout=300))
        connection = http.client.HTTPConnection("::1", made.http_port, timeout=300)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
    finally:
        made.stop(grace=5)


def test_a_key_comes_from_a_file_or_the_environment_and_its_errors_name_the_source(tmp_path):
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n", encoding="utf-8")
    assert ApiKey.find(str(file), {}).header == "Bearer 0123456789abcdef"
    assert ApiKey.find(str(file), {ENVIRONMENT: "f" * 16}).header == "Bearer 0123456789abcdef"
    assert ApiKey.find(None, {ENVIRONMENT: "f" * 16}).opens("Bearer " + "f" * 16)
    assert ApiKey.find(None, {}) is None
    for text in ("", "short", "one two three four five", "é" * 20):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{file}: an API key has at least 16"):
            ApiKey.find(str(file), {})
        with pytest.raises(ValueError, match=f"environment variable {ENVIRONMENT}: an API key"):
            ApiKey.find(None, {ENVIRONMENT: text})
    with pytest.raises(ValueError, match="absent: No such file"):
        ApiKey.find(str(tmp_path / "absent"), {})


def test_the_pem_text_of_a_variable_is_in_no_folder(pem, monkeypatch):
    texts = {name: Path(file).read_text(encoding="utf-8") for name, file in pem.items()}
    files = {name: pem_file(None, name, texts) for name in texts}
    assert Access(**files).tls() is not None and serving._credentials(Access(**files)) is not None
    assert [Path(file).stat().st_nlink for file in files.values()] == [0, 0]
    assert pem_file("mine.pem", "certificate", texts) == "mine.pem" and pem_file(None, "other", texts) is None
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="private_key works on Linux only: put its text into a file"):
        pem_file(None, "private_key", texts)


def test_tls_from_a_broken_file_is_an_error_before_anything_starts(build, letters, tmp_path, pem):
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate", encoding="utf-8")
    access = Access(certificate=str(broken), private_key=pem["private_key"])
    with pytest.raises(ValueError, match="TLS with .*broken.pem"):
        Server(JetStreamRollout(build("orchestrator").engine), letters, Sampling(), access=access)


WRONG = [None, "", "Bearer", KEY.header[:-1], KEY.header + "0", KEY.header.lower(), "Basic " + KEY.header[7:], "\udcff"]


@pytest.mark.parametrize("wrong", WRONG, ids=ascii)
def test_http_without_the_key_gives_health_alone(ask, wrong):
    if wrong == "\udcff":
        assert not KEY.opens(wrong)  # a byte of no character, as aiohttp hands it over
        return
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")):
        status, answer = ask(method, path, wrong, b"{" if method == "POST" else None)
        assert status == 401 and json.loads(answer)["error"]["type"] == "authentication_error", path
    assert ask("GET", "/health", wrong) == (200, b'{"status": "ok"}')


def test_http_with_the_key_gives_completions_and_metrics(ask):
    assert ask("POST", "/v1/completions", KEY.header, b'{"prompt": "12", "max_tokens": 2}')[0] == 200
    assert ask("GET", "/v1/models", KEY.header)[0] == 200
    ask("GET", "/v1/models")
    status, page = ask("GET", "/metrics", KEY.header)
    assert status == 200 and b'rpg_requests_total{code="UNAUTHENTICATED"}' in page and b"rpg_tokens_total" in page
    status, answer = ask("GET", "/nowhere", KEY.header)
    assert status == 404 and json.loads(answer)["error"]["message"] == "GET /nowhere: Not Found"


def test_grpc_needs_the_key_for_all_but_health(guarded, pem):
    address = f"localhost:{guarded.port}"
    with open(pem["certificate"], "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    with grpc.secure_channel(address, credentials) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        for metadata in ((), (("authorization", "Bearer no"),)):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Decode(HELLO, metadata=metadata, timeout=30))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert list(stub.Decode(HELLO, metadata=(("authorization", KEY.header),), timeout=300))
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=30).is_live
        stalled = channel.stream_stream("/jetstream_proto.Orchestrator/Decode")(iter(threading.Event().wait, None))
        with pytest.raises(grpc.RpcError, match="valid one"):  # refused although its message never comes
            next(stalled)


def test_a_rollout_by_a_guarded_server_has_its_key_and_trusts_its_certificate(guarded, pem, work, tmp_path):
    sizes = {
        "parallel": 4,
        "capacity": guarded._rollout.engine.decoding.capacity,
        "vocab_size": guarded._rollout.engine.config.vocab_size,
    }
    url = f"https://localhost:{guarded.http_port}"
    few = connect(url, certificate=pem["certificate"], key=KEY, **sizes)
    assert few.generate(work)
    few.close()
    with pytest.raises(ValueError, match="answered 401"):
        connect(url, certificate=pem["certificate"], key=None, **sizes)
    with pytest.raises(ValueError, match="certificate verify failed"):
        connect(url, certificate=None, key=KEY, **sizes)
    with pytest.raises(ValueError, match="in plain text: give an https address"):
        connect("http://10.0.0.1:8000", certificate=None, key=KEY, **sizes)
    with pytest.raises(ValueError, match="absent: No such file"):
        connect("https://10.0.0.1:8000", certificate=str(tmp_path / "absent"), key=KEY, **sizes)


def test_a_connection_that_stalls_before_its_request_is_closed(build, letters, monkeypatch):
    monkeypatch.setattr(endpoint, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(serving, "STALL_SECONDS", 0.3)
    made = Server(JetStreamRollout(build("orchestrator").engine), letters, Sampling(), http_port=0)
    try:
        for port, start in (
            (made.http_port, b""),
            (made.http_port, b"POST /v1/completions HTTP/1.1\r\n"),
            (made.port, b""),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as stalled:
                stalled.sendall(start)
                began = time.monotonic()
                while stalled.recv(1000):
                    pass
                assert 0.2 < time.monotonic() - began < 10, (port, start)
    finally:
        made.stop(grace=0)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    class Full:
        aborted = False

        @property
        def transport(self):
            return self

        def abort(self):
            self.aborted = True

        async def write(self, data):
            await asyncio.sleep(60)

    monkeypatch.setattr(endpoint, "STALL_SECONDS", 0.05)
    client = Full()
    with pytest.raises(ConnectionResetError):
        asyncio.run(endpoint._send(client, client, "x"))
    assert client.aborted


def test_what_is_no_request_is_not_a_traceback(guarded, ask, caplog):
    for port in (guarded.http_port, guarded.port):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00", b"\0" * 100):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as loud:
                loud.sendall(noise)
    assert ask("GET", "/health")[0] == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("host", "tls", "address"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8000"),
        ("localhost", True, "https://localhost:8000"),
        ("::1", False, "http://[::1]:8000"),
        ("[fd00::7]", True, "https://[fd00::7]:8000"),
        ("server.internal", True, "https://server.internal:8000"),
    ],
)
def test_the_address_is_that_of_the_host_that_the_server_listens_on(host, tls, address):
    assert address_of(host, 8000, tls=tls) == address


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])
def test_a_server_that_listens_everywhere_is_reached_at_its_announced_address(host, family):
    try:
        listening = socket.create_server((host, 0), family=family)  # for ::, IPv6 alone, as aiohttp listens
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening:
        address = urllib.parse.urlsplit(address_of(host, listening.getsockname()[1], tls=True))
        assert address.scheme == "https" and address.hostname not in (None, host)
        socket.create_connection((address.hostname, address.port), timeout=5).close()


def test_a_file_has_one_line_while_its_server_serves_and_then_goes(tmp_path):
    file = file_of(str(tmp_path / "new" / "servers"), "w0", 8000)
    with announce(file, "http://10.0.0.5:8000"):
        assert [path.name for path in file.parent.iterdir()] == ["w0"]
        assert file.read_text(encoding="utf-8") == "http://10.0.0.5:8000\n"
    assert not file.exists()


def test_a_server_that_stops_leaves_the_file_of_the_server_that_replaced_it(tmp_path):
    file = file_of(str(tmp_path), "w0", 8000)
    with announce(file, "http://10.0.0.5:8000"):
        with announce(file, "http://10.0.0.6:8000"):  # it was started anew on another machine
            pass
        assert not file.exists()  # and has ended too: nothing is left to delete
    with announce(file, "http://10.0.0.5:8000"):
        file.write_text("http://10.0.0.6:8000\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == "http://10.0.0.6:8000\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-x", "a b", "a\nb"])
def test_a_name_is_one_file_of_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--announce_name=.*is no file name"):
        file_of(str(tmp_path), name, 8000)


def test_two_servers_of_one_host_have_two_files(tmp_path):
    files = {file_of(str(tmp_path), None, port).name for port in (8000, 8001)}
    assert files == {f"{socket.gethostname()}-8000", f"{socket.gethostname()}-8001"}


IN_A_BUCKET = """
from rpg_jax.rollout.serving.access import announce, file_of
with announce(file_of("gs://bucket/servers/r", "w0", 8000), "https://10.0.0.5:8000"):
    print(file_of("gs://bucket/servers/r", "w0", 8000).read_text(), end="")
"""


@pytest.mark.slow  # a process that starts JAX
def test_a_folder_may_be_in_a_bucket(tmp_path):
    pytest.importorskip("gcsfs")
    with FakeGcs("bucket") as gcs:
        env = os.environ | gcs.environment
        done = subprocess.run([sys.executable, "-c", IN_A_BUCKET], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "https://10.0.0.5:8000\n" and not gcs.objects
