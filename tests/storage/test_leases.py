"""One process at a time writes a run: a second is refused by name, an owner that is gone is replaced."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading

import pytest
from etils import epath

from rpg_jax.storage import leases
from rpg_jax.storage.leases import Lease, Owner
from tests.storage.test_files import gcs  # noqa: F401

QUICK = {"beat_seconds": 0.01, "stale_seconds": 0.1}
ELSEWHERE = dataclasses.replace(Owner.this_process(), host="far", process=7, space="another machine", token="theirs")


@pytest.fixture(params=["local", pytest.param("bucket", marks=pytest.mark.slow)])  # imports google.cloud.storage
def home(request, tmp_path):
    if request.param == "local":
        return epath.Path(tmp_path / "r")
    request.getfixturevalue("gcs")
    return epath.Path("gs://bucket/runs/r")


def cell(home):
    return leases._cell(home.parent / ".owners" / "r.json")


def write(home, owner):
    """Writes `owner` over whatever is there."""
    assert cell(home).swap(json.dumps(dataclasses.asdict(owner)).encode(), cell(home).read()[1]) is not None


def write_if_present(home, beat=0):
    content = json.dumps(dataclasses.asdict(dataclasses.replace(ELSEWHERE, beat=beat))).encode()
    cell(home).swap(content, cell(home).read()[1])


def full():
    raise OSError("full")


def never(reason):
    raise AssertionError(reason)


def test_a_lease_is_held_until_its_end(home):
    patient = {"beat_seconds": 0.01, "stale_seconds": 60}  # a busy machine may stand still for a moment
    second, message = Lease(home, never, **patient), rf"r is being written by process {os.getpid()} on "
    with Lease(home, never, **patient), pytest.raises(ValueError, match=message):
        second.__enter__()
    assert cell(home).read() == (None, None)
    with Lease(home, never, **QUICK):
        pass


def test_a_lease_that_was_written_and_whose_answer_was_lost_is_the_writers(home, monkeypatch):
    lease = Lease(home, never, beat_seconds=0.01, stale_seconds=60)
    swap = lease._cell.swap

    def lost(content, version):
        monkeypatch.setattr(lease._cell, "swap", swap)
        swap(content, version)

    monkeypatch.setattr(lease._cell, "swap", lost)
    with lease, pytest.raises(ValueError, match="is being written by"):
        Lease(home, never, beat_seconds=0.01, stale_seconds=60).__enter__()
    assert cell(home).read() == (None, None)


def test_an_owner_that_was_killed_on_this_machine_is_replaced_at_once(home, capsys):
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = dataclasses.replace(Owner.this_process(), process=killed.pid, started=leases._started(killed.pid))
    write(home, owner)
    slow = {"beat_seconds": 0.01, "stale_seconds": 1e6}
    with pytest.raises(ValueError, match="is being written by"):
        Lease(home, never, **slow).__enter__()
    killed.kill()
    while leases._started(killed.pid):  # the kernel has not ended it yet; it stays as a zombie
        pass
    with Lease(home, never, **slow):
        assert f"taken over from process {killed.pid}" in capsys.readouterr().err
    killed.communicate()


def test_a_process_that_proc_hides_may_live(monkeypatch):
    """As under hidepid=2: /proc shows no process of another user, and a signal to it is not permitted."""
    hidden = dataclasses.replace(Owner.this_process(), process=2**22 + 1)
    assert hidden.ended is True

    def refuse(process, number):
        raise PermissionError

    monkeypatch.setattr(leases.os, "kill", refuse)
    assert hidden.ended is None


def test_an_owner_in_another_time_namespace_may_live(monkeypatch):
    """There /proc tells another start of the same process."""
    owner, readlink = Owner.this_process(), os.readlink
    assert owner.ended is False
    monkeypatch.setattr(
        leases.os, "readlink", lambda path: "time:[1]" if str(path).endswith("time") else readlink(path)
    )
    assert dataclasses.replace(owner, started="1").ended is None


def test_a_later_process_of_the_same_number_is_not_the_owner():
    owner = dataclasses.replace(Owner.this_process(), started="1")
    assert owner.ended and not Owner.this_process().ended and ELSEWHERE.ended is None


def test_an_owner_elsewhere_without_a_beat_is_replaced(home, capsys):
    write(home, ELSEWHERE)
    with Lease(home, never, **QUICK):
        errors = capsys.readouterr().err
    assert "is held by process 7 on far" in errors and "taken over from process 7 on far" in errors


def test_an_owner_elsewhere_that_beats_is_not_replaced_and_one_that_ends_is_awaited(home):
    write(home, ELSEWHERE)
    times = {"beat_seconds": 0.1, "stale_seconds": 1.0} if str(home).startswith("gs:") else QUICK
    ended = threading.Event()

    def beats():
        for beat in itertools.count(1):
            if ended.wait(times["beat_seconds"]):
                return
            write_if_present(home, beat)

    thread = threading.Thread(target=beats)
    thread.start()
    with pytest.raises(ValueError, match="is being written by process 7 on far"):
        Lease(home, never, **times).__enter__()
    threading.Timer(times["beat_seconds"], ended.set).start()
    with Lease(home, never, **times):
        thread.join()


def test_of_many_that_take_a_stale_lease_one_has_it(tmp_path):
    home = epath.Path(tmp_path / "r")
    write(home, ELSEWHERE)
    entered, refused, everybody = [], [], threading.Barrier(8)

    def take():
        lease = Lease(home, never, **QUICK)
        everybody.wait()
        try:
            lease.__enter__()
            entered.append(lease)
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == 1 and len(refused) == 7
    entered[0].__exit__()


def test_an_owner_that_was_replaced_is_told(home):
    told = threading.Event()
    with Lease(home, lambda reason: told.set() if "taken over by process 7 on far" in reason else None, **QUICK):
        while not told.is_set():
            write_if_present(home)
    assert json.loads(cell(home).read()[0])["token"] == "theirs", "the end of the first leaves the lease to the second"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"host": "x"}', b"[" * 10**5])
def test_a_file_that_is_no_lease_holds_nobody_back(tmp_path, content):
    home = epath.Path(tmp_path / "r")
    cell(home).swap(content, None)
    with Lease(home, never, **QUICK):
        assert b"token" in cell(home).read()[0]


@pytest.mark.parametrize("process", ["7", -7, 0.5, 10**30, True, None])
def test_a_lease_of_no_process_holds_nobody_back(tmp_path, process):
    home = epath.Path(tmp_path / "r")
    content = dataclasses.asdict(Owner.this_process()) | {"process": process}
    cell(home).swap(json.dumps(content).encode(), None)
    with Lease(home, never, beat_seconds=10.0, stale_seconds=30.0):  # at once, not after a time of silence
        assert json.loads(cell(home).read()[0])["process"] == os.getpid()


def test_a_pipe_in_the_place_of_a_lease_is_named_and_not_waited_for(tmp_path):
    (tmp_path / ".owners").mkdir()
    os.mkfifo(tmp_path / ".owners" / "r.json")
    with (
        pytest.raises(ValueError, match=r"r\.json is no file, and is not replaced"),
        Lease(epath.Path(tmp_path / "r"), never),
    ):
        pass


def test_a_beat_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    failed = threading.Event()
    with Lease(epath.Path(tmp_path / "r"), never, **QUICK):
        original = leases.write_atomically
        monkeypatch.setattr(leases, "write_atomically", lambda *_: failed.set() or full())
        assert failed.wait(5)
        monkeypatch.setattr(leases, "write_atomically", original)
        before = json.loads((tmp_path / ".owners" / "r.json").read_text(encoding="utf-8"))["beat"]
        while json.loads((tmp_path / ".owners" / "r.json").read_text(encoding="utf-8"))["beat"] == before:
            pass
    assert "got no sign of life from this process: full" in capsys.readouterr().err
