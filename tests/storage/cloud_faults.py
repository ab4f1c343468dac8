"""Reads and writes of a run in a bucket that fails by script; as a program it prints the table of docs/reliability.md.

python -m tests.storage.cloud_faults ["write run files" ...]
"""

import asyncio
import contextlib
import io
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rpg_jax import storage
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import cli
from rpg_jax.storage import errors
from rpg_jax.storage.checkpoints import Checkpoints, Snapshots
from tests.fake_gcs import FakeGcs
from tests.storage.test_checkpoints import like, tree

FAULTS = (429, 500, 503, 401, 403, 412, "reset", "slow", "lag")
HOME = "gs://bucket/runs/r"


def checkpoints() -> Checkpoints:
    return Checkpoints(storage.absolute(f"{HOME}/checkpoints"), keep=3, identity={"seed": 0})


def save(step: int) -> None:
    with contextlib.closing(checkpoints()) as kept:
        kept.save(step, tree(step, 300), {"at": step})
        kept.wait()


def newest() -> int:
    """The step of the newest checkpoint, whose state and record are checked."""
    with contextlib.closing(checkpoints()) as kept:
        step, state, record = kept.restore_last(like(tree(0, 300)))
    assert record == {"at": step} and weights_checksum(state) == weights_checksum(tree(step, 300))
    return step


def expect(found: object, wanted: object) -> None:
    assert found == wanted, f"found {found!r}, not {wanted!r}"


def push() -> None:
    with storage.Folder(HOME) as folder:
        (folder.files / "metrics.jsonl").write_text("line", encoding="utf-8")


def fetched() -> str:
    with storage.Folder(HOME) as folder:
        folder.fetch()
        return (folder.files / "metrics.jsonl").read_text(encoding="utf-8")


def snapshots() -> Snapshots:
    return Snapshots(storage.absolute(f"{HOME}/reference"))


def save_snapshot() -> None:
    kept = snapshots()
    kept.save(4, tree(4, 300))
    kept.wait()
    kept.close()


def snapshot() -> int:
    return weights_checksum(snapshots().restore(4, like(tree(0, 300))))


def weights() -> str:
    return (storage.local_copy("gs://bucket/qwen", ["*.safetensors"]) / "a.safetensors").read_text(encoding="utf-8")


def damage(gcs: FakeGcs) -> None:
    save(1), save(2)
    name = max((n for n in gcs.objects if "/2/state/" in n), key=lambda n: len(gcs.objects[n]))
    gcs.put(name, bytes(b ^ 1 for b in gcs.objects[name]))


# name: (what is there before, what is done under faults, what holds once the faults have ended and it is done again)
PATHS: dict[str, tuple[Callable, Callable[[], object], Callable[[], None]]] = {
    "write a checkpoint": (lambda gcs: save(1), lambda: save(2), lambda: expect(newest(), 2)),
    "read a checkpoint": (lambda gcs: (save(1), save(2)), lambda: expect(newest(), 2), lambda: expect(newest(), 2)),
    "pass over a damaged one": (damage, lambda: expect(newest(), 1), lambda: expect(newest(), 1)),
    "write a snapshot": (
        lambda gcs: None,
        save_snapshot,
        lambda: expect(snapshot(), weights_checksum(tree(4, 300))),
    ),
    "read a snapshot": (
        lambda gcs: save_snapshot(),
        lambda: expect(snapshot(), weights_checksum(tree(4, 300))),
        lambda: expect(snapshot(), weights_checksum(tree(4, 300))),
    ),
    "write run files": (lambda gcs: None, push, lambda: expect(fetched(), "line")),
    "read run files": (lambda gcs: push(), lambda: expect(fetched(), "line"), lambda: expect(fetched(), "line")),
    "read weights": (
        lambda gcs: gcs.put("qwen/a.safetensors", b"w"),
        lambda: expect(weights(), "w"),
        lambda: expect(weights(), "w"),
    ),
}


@contextlib.contextmanager
def quick_bucket() -> Iterator[FakeGcs]:
    """A bucket whose clients try again at once, TensorStore three times in place of 32, and keep nothing in memory."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch, FakeGcs("bucket") as gcs, tempfile.TemporaryDirectory() as cache:
        for name, value in (gcs.environment | {"XDG_CACHE_HOME": cache}).items():
            patch.setenv(name, value)
        import gcsfs  # it reads the environment once

        patch.setattr(sys, "unraisablehook", sys.unraisablehook)
        cli.prepare_libraries()  # as a command does: garbage of a read that failed says nothing

        patch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=at_once))
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            quick = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}
            patch.setitem(context, "gcs_request_retries", quick)
        patch.setattr(errors.time, "sleep", lambda seconds: None)
        yield gcs


def ended(call: Callable[[], object]) -> tuple[int, str]:
    """The exit code of a command that makes this call in an open run, and what it says as its last line."""

    def command(options: object) -> None:
        with cli.run_is_open():
            call()

    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.run(command, cli.parser("train", ""), [])
    return code, said.getvalue()


def outcome(path: str, kind: int | str, times: float) -> str:
    """What a path does under a fault; raises AssertionError where anything is lost, or an error is not one line."""
    before, call, after = PATHS[path]
    with quick_bucket() as gcs:
        before(gcs)
        there = {name: content for name, content in gcs.objects.items() if "tmp" not in name}
        fault = gcs.script(kind, times=times)
        code, said = ended(call)
        met, lines = fault.seen, said.strip().splitlines()
        gcs.faults.clear()
        if code:
            assert code == cli.FAILED and lines and lines[-1].startswith("error: "), said[-2000:]
            assert len(lines[-1]) < 700 and "Traceback" not in said, said[-2000:]
            if path != "pass over a damaged one":
                lost = [name for name, content in there.items() if gcs.objects.get(name) != content]
                assert not lost, f"lost: {lost}"
            assert not ended(call)[0], "the same command did not continue"
        after()
        return "not met" if not met else f"one line, exit code {code}" if code else "succeeds"


def table(paths: Sequence[str]) -> Iterator[str]:
    """The rows of the table, as they are measured."""
    yield "| path | fault | two requests fail | all fail until it ends |"
    yield "|---|---|---|---|"
    for path in paths:
        for kind in FAULTS:
            found = []
            for times in (2, float("inf")):
                try:
                    found.append(outcome(path, kind, times))
                except AssertionError as error:
                    found.append(f"FAILS: {str(error).splitlines()[0][:200]}")
            yield f"| {path} | {kind} | {found[0]} | {found[1]} |"


if __name__ == "__main__":
    cli.prepare_process()
    assert Path("tests").is_dir(), "run it at the root of the repository"
    for row in table(sys.argv[1:] or list(PATHS)):
        print(row, flush=True)
