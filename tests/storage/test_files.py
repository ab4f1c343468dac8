"""Where runs lie: addresses that are none are refused, and a bucket has what the local folder has."""

import contextlib
import os
import pathlib
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rpg_jax import storage
from rpg_jax.rollout import weights_checksum
from rpg_jax.storage.checkpoints import Checkpoints, Snapshots
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion
from tests.fake_gcs import bucket_of
from tests.storage.test_checkpoints import like, tree


@pytest.mark.parametrize("address", ["s3://bucket/runs", "gs:/bucket/runs", "gs://", "file:///tmp/x", "gs://B!/runs"])
def test_an_address_that_is_neither_local_nor_a_bucket_is_refused(address):
    with pytest.raises(ValueError, match="is neither a local path nor gs://BUCKET/FOLDER"):
        storage.absolute(address)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(storage.files, "_installed", lambda module: module != "gcsfs")
    with pytest.raises(ValueError, match="gs://bucket/runs needs the package gcsfs: pip install"):
        storage.absolute("gs://bucket/runs")


def test_a_local_folder_is_used_in_place(tmp_path):
    with storage.Folder(tmp_path / "r") as folder:
        folder.fetch()
        assert folder.files == tmp_path / "r" and str(folder.home) == str(tmp_path / "r")
        assert folder.shown("see x") == "see x"


def test_a_folder_has_one_lease_and_one_lock_whatever_its_name(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "s").symlink_to(tmp_path / "r")
    assert storage.Folder(tmp_path / "elsewhere" / "s").home == storage.Folder(tmp_path / "r").home
    command = [sys.executable, "-c", LOCKS, str(tmp_path / "elsewhere" / "s")]
    with storage.files.locked(tmp_path / "r"):
        assert "is being written by another process" in subprocess.run(command, capture_output=True, text=True).stderr
    assert subprocess.run(command).returncode == 0


LOCKS = """
import sys
from pathlib import Path
from rpg_jax import storage
storage.files.locked(Path(sys.argv[1])).__enter__()
"""


def test_a_push_that_comes_after_the_end_leaves_the_bucket_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.files, "in_bucket", lambda path: True)  # a local folder stands in for the bucket
    with storage.Folder(tmp_path / "r") as folder:
        folder.home.mkdir()
        (folder.files / "metrics.jsonl").write_text("all of them", encoding="utf-8")
    folder.push()
    assert (tmp_path / "r" / "metrics.jsonl").read_text(encoding="utf-8") == "all of them" and not folder.files.exists()


def test_a_file_that_another_program_deletes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.files, "in_bucket", lambda path: True)
    real = storage.files._version

    def version(file):
        if file.name == "a.tmp":
            file.unlink()
        return real(file)

    monkeypatch.setattr(storage.files, "_version", version)
    with storage.Folder(tmp_path / "r") as folder:
        folder.home.mkdir()
        for name in ("a.tmp", "b"):
            (folder.files / name).write_text(name, encoding="utf-8")
        folder.push()
        assert [path.name for path in folder.home.iterdir()] == ["b"]


def test_the_end_waits_for_a_copy_that_is_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.files, "in_bucket", lambda path: True)
    monkeypatch.setattr(storage.files, "_COPY_SECONDS", 0.0)
    began, copied = threading.Event(), []
    push = storage.Folder.push

    def slow_push(self):
        if threading.current_thread().name == "bucket" and not began.is_set():
            began.set()
            time.sleep(0.2)
            copied.append(self.files.exists())
        push(self)

    monkeypatch.setattr(storage.Folder, "push", slow_push)
    with storage.Folder(tmp_path / "r") as folder:
        folder.home.mkdir()
        (folder.files / "metrics.jsonl").write_text("all of them", encoding="utf-8")
        assert began.wait(10)
    assert copied == [True], "the copier found the local folder as it was"
    assert (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.parametrize("address", ["gs://bucket/out", "gs:/bucket/out", "s3://bucket/out"])
def test_an_address_where_a_local_folder_is_asked_for_is_refused(address):
    with pytest.raises(ValueError, match="is no local folder: give one here"):
        storage.local(address)


@pytest.mark.parametrize("content", ["new", b"new", lambda file: file.write(b"new")], ids=["text", "bytes", "writer"])
def test_atomic_writing_leaves_only_the_file(tmp_path, content):
    path = tmp_path / "summary.md"
    path.write_text("old", encoding="utf-8")
    storage.write_atomically(path, content)
    assert path.read_text(encoding="utf-8") == "new" and list(tmp_path.iterdir()) == [path]


def test_first_calls_at_the_same_time_find_one_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write, barrier = storage.files.write_atomically, threading.Barrier(2)

    def late(*arguments, **options):
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.2)  # until both write, if both do
        write(*arguments, **options)

    monkeypatch.setattr(storage.files, "write_atomically", late)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: storage.files.secret(), range(2))
    assert first == second and len(first) == 32


def test_writers_of_one_file_in_several_threads_leave_one_content(tmp_path):
    contents = [bytes([number]) * 5000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: storage.files.write_atomically(tmp_path / "a", content), contents * 40))
    assert (tmp_path / "a").read_bytes() in contents and [*tmp_path.iterdir()] == [tmp_path / "a"]


def test_the_secret_is_this_users_alone_from_its_first_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    modes = []

    def replace(partial, target):
        modes.append(stat.S_IMODE(partial.stat().st_mode))
        os.replace(partial, target)

    monkeypatch.setattr(pathlib.Path, "replace", replace)
    umask = os.umask(0)
    try:
        first = storage.files.secret()
    finally:
        os.umask(umask)
    assert modes == [0o600] and len(first) == 32 and storage.files.secret() == first
    assert stat.S_IMODE((tmp_path / "rpg_jax" / "secret").stat().st_mode) == 0o600
    # The file in the making is opened with this mode, so there is no moment before a chmod.
    storage.files.write_atomically(
        tmp_path / "a", lambda file: modes.append(os.fstat(file.fileno()).st_mode), mode=0o600
    )
    assert stat.S_IMODE(modes[-1]) == 0o600


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    def fail(file):
        file.write(b"half")
        assert path.read_text(encoding="utf-8") == "old"
        raise OSError("disk full")

    path = tmp_path / "summary.md"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(OSError, match="disk full"):
        storage.write_atomically(path, fail)
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def gcs(monkeypatch):
    with bucket_of("bucket") as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        yield served


@pytest.mark.slow  # imports gcsfs
def test_a_bucket_has_what_the_local_folder_has_and_gives_it_back(gcs):
    pytest.importorskip("gcsfs")
    gcs.put("runs/r/checkpoints/3/state/d", b"large")
    gcs.put("runs/r/journal/3/0-1.groups", b"large")
    gcs.put("runs/r/base/00000000/d", b"large")
    with storage.Folder("gs://bucket/runs/r") as first:
        (first.files / "rollouts").mkdir()
        for name in ("metrics.jsonl", "rollouts/1.npz", "rollouts/2.npz", ".half.partial"):
            (first.files / name).write_text(name, encoding="utf-8")
        first.push()
        before = dict(gcs.generations)
        (first.files / "rollouts" / "2.npz").unlink()
        with (first.files / "metrics.jsonl").open("a") as file:
            file.write(" and more")
        assert first.shown(f"{first.files}/a") == "gs://bucket/runs/r/a"
    kept = {
        "runs/r/metrics.jsonl",
        "runs/r/rollouts/1.npz",
        "runs/r/checkpoints/3/state/d",
        "runs/r/journal/3/0-1.groups",
        "runs/r/base/00000000/d",
    }
    assert set(gcs.objects) == kept and not first.files.exists()
    assert gcs.generations["runs/r/rollouts/1.npz"] == before["runs/r/rollouts/1.npz"], "unchanged, not copied again"
    with storage.Folder("gs://bucket/runs/r") as second:
        second.fetch()
        files = {
            str(f.relative_to(second.files)): f.read_text(encoding="utf-8")
            for f in second.files.rglob("*")
            if f.is_file()
        }
        assert files == {"metrics.jsonl": "metrics.jsonl and more", "rollouts/1.npz": "rollouts/1.npz"}
        second.set_aside()
    assert {name.removeprefix("runs/replaced/r-0/") for name in gcs.objects} == {
        n.removeprefix("runs/r/") for n in kept
    }


@pytest.mark.slow  # imports gcsfs
def test_damaged_checkpoints_in_a_bucket_are_refused_moved_and_written_again(gcs, capsys):
    pytest.importorskip("gcsfs")
    home = storage.absolute("gs://bucket/runs/r")
    options = {"keep": 2, "permanent_every": 4, "identity": {"seed": 0}}
    checkpoints = Checkpoints(home / "checkpoints", **options)
    for step in (1, 2, 3, 4, 5, 6):
        checkpoints.save(step, tree(step, 3000), {"at": step})
    checkpoints.close()
    at = "runs/r/checkpoints"
    assert {int(name.split("/")[3]) for name in gcs.objects} == {4, 5, 6}
    arrays = max((name for name in gcs.objects if f"{at}/6/state" in name), key=lambda name: len(gcs.objects[name]))
    content = bytearray(gcs.objects[arrays])
    content[len(content) // 2] ^= 1
    gcs.put(arrays, bytes(content))
    del gcs.objects[f"{at}/5/commit_success.txt"]
    left = {name.removeprefix(at) for name in gcs.objects if name.startswith(f"{at}/6/")}

    checkpoints = Checkpoints(home / "checkpoints", **options)
    step, state, record = checkpoints.restore_last(like(tree(0, 3000)))
    assert (step, record) == (4, {"at": 4}) and weights_checksum(state) == weights_checksum(tree(4, 3000))
    errors = capsys.readouterr().err
    assert "gs://bucket/runs/r/checkpoints/5 is half-written" in errors
    assert "refused: gs://bucket/runs/r/checkpoints/6/state" in errors
    assert {name.removeprefix(f"{at}/refused") for name in gcs.objects if "refused" in name} == left
    for step in (5, 6, 7):
        checkpoints.save(step, tree(step, 3000), {"at": step})
        checkpoints.wait()
        assert weights_checksum(checkpoints.restore(step, like(tree(0, 3000)))) == weights_checksum(tree(step, 3000))
    assert checkpoints.steps() == [4, 6, 7]
    checkpoints.close()


@pytest.mark.slow  # imports gcsfs
def test_snapshots_in_a_bucket_are_replaced_pruned_and_moved_aside(gcs):
    pytest.importorskip("gcsfs")
    snapshots = Snapshots(storage.absolute("gs://bucket/runs/r/reference"))
    for number, seed in ((0, 1), (0, 2), (8, 3)):
        snapshots.save(number, tree(seed))
    assert weights_checksum(snapshots.restore(0, like(tree(0)))) == weights_checksum(tree(2))
    snapshots.keep_only([8])
    assert not snapshots.exists(0) and snapshots.exists(8)
    assert str(snapshots.move_aside(8)).endswith("reference/refused-00000008") and not snapshots.exists(8)
    snapshots.close()


@pytest.mark.slow  # imports gcsfs
def test_a_journal_in_a_bucket_is_found_by_the_next_process_and_pruned(gcs):
    pytest.importorskip("gcsfs")
    key = {"step": 3, "prompt_id": 0, "version": 1}
    completions = [Completion(np.arange(5, dtype=np.int32), np.full(5, -0.1, np.float32), "stop", 1)]
    for prompt_id in (0, 1):
        journal = Journal("gs://bucket/runs/r/journal", max_bytes=1 << 20)
        for step in (3, 4):
            journal.add({**key, "step": step, "prompt_id": prompt_id}, completions)
        journal.close()
    assert len(gcs.objects) == 4, "an object a step and process"
    journal = Journal("gs://bucket/runs/r/journal", max_bytes=1 << 20)
    found = journal.find([{**key, "prompt_id": prompt_id} for prompt_id in (0, 1, 2)])
    assert sorted(found) == [0, 1] and found[1][0].tokens.tolist() == [0, 1, 2, 3, 4]
    journal.prune(4)
    journal.close()
    assert {name.split("/")[3] for name in gcs.objects} == {"4"}
