"""The file in which trainers find a server: what it says, where it lies, and when it goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from rpg_jax.rollout.serving.access import address_of, announce, file_of
from tests.fake_gcs import FakeGcs


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


def test_a_server_that_listens_everywhere_is_reached_at_its_announced_address():
    with socket.create_server(("0.0.0.0", 0)) as listening:
        host, port = address_of("0.0.0.0", listening.getsockname()[1], tls=True).removeprefix("https://").split(":")
        assert host != "0.0.0.0"
        socket.create_connection((host, int(port)), timeout=5).close()


def test_a_file_has_one_line_while_its_server_serves_and_then_goes(tmp_path):
    file = file_of(str(tmp_path / "new" / "servers"), "w0", 8000)
    with announce(file, "http://10.0.0.5:8000"):
        assert [path.name for path in file.parent.iterdir()] == ["w0"]
        assert file.read_text() == "http://10.0.0.5:8000\n"
    assert not file.exists()


def test_a_server_that_stops_leaves_the_file_of_the_server_that_replaced_it(tmp_path):
    file = file_of(str(tmp_path), "w0", 8000)
    with announce(file, "http://10.0.0.5:8000"):
        with announce(file, "http://10.0.0.6:8000"):  # it was started anew on another machine
            pass
        assert not file.exists()  # and has ended too: nothing is left to delete
    with announce(file, "http://10.0.0.5:8000"):
        file.write_text("http://10.0.0.6:8000\n")
    assert file.read_text() == "http://10.0.0.6:8000\n"


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
