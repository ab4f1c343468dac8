"""What an error of storage means: asked again, damage, or the end; and the exit codes that follow."""

import argparse
import errno
import json

import pytest

from rpg_jax.runs import cli
from rpg_jax.storage import errors, integrity
from rpg_jax.storage.errors import Kind, StorageFailure
from rpg_jax.storage.integrity import Damaged, Refused


def of_library(name, text="", **fields):
    """An error of a client that need not be installed, by the name of its class."""
    error = type(name, (Exception,), {})(text)
    error.__dict__.update(fields)
    return error


def tensorstore(status, code):
    return ValueError(
        f"{status}: All 3 retry attempts failed: x [http_response_code='{code}'] [tensorstore_spec='{{}}']"
    )


def caused(outer, cause):
    outer.__cause__ = cause
    return outer


KINDS = {
    Kind.TRANSIENT: [
        tensorstore("ABORTED", 503),
        tensorstore("PERMISSION_DENIED", 401),
        ValueError("UNAVAILABLE: connection lost"),
        *(of_library("HttpError", code=code) for code in (401, 408, 429, 500, 502, 503, 504)),
        of_library("ClientPayloadError", status=503),
        type("ClientOSError", (type("ClientError", (Exception,), {}),), {})(),
        of_library("HfHubHTTPError", response=argparse.Namespace(status_code=503)),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        OSError(errno.ESTALE, "stale"),
        TimeoutError(),
        caused(
            Exception("Encountered error while reading array index: (slice(0, 3, 1),)"), tensorstore("ABORTED", 429)
        ),
    ],
    Kind.PERMANENT: [
        tensorstore("PERMISSION_DENIED", 403),
        OSError("Forbidden: https://x"),
        of_library("HttpError", code=403),
        FileExistsError("gs://b/x"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        ValueError("RESOURCE_EXHAUSTED: Error writing local file: No space left on device"),
    ],
    Kind.DAMAGE: [
        ValueError("DATA_LOSS: Error opening: CRC-32C checksum verification failed"),
        ValueError("OUT_OF_RANGE: Requested byte range [0, 412) is not valid for value of size 206"),
        ValueError('FAILED_PRECONDITION: Error reading "w/0.0": Truncated Zstd-compressed stream; at byte 0'),
        FileNotFoundError(errno.ENOENT, "gone"),
        json.JSONDecodeError("Expecting value", "", 0),
        KeyError("key_type"),
    ],
    Kind.UNKNOWN: [ValueError("structures do not match"), RuntimeError("odd"), AttributeError("no attribute")],
}


@pytest.mark.parametrize(("kind", "error"), [(k, e) for k, found in KINDS.items() for e in found], ids=str)
def test_errors_are_told_apart_by_status_and_text(kind, error):
    assert errors.kind_of(error) is kind
    assert "\n" not in errors.one_line(error) and "tensorstore_spec" not in errors.one_line(error)


@pytest.fixture
def pauses(monkeypatch):
    slept = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    return slept


def failing(*raised):
    """A call that raises these one after another, then returns "done"."""
    left = list(raised)

    def call():
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_what_is_transient_is_tried_again_with_growing_pauses(pauses, capsys):
    busy = of_library("HttpError", "slow down", code=503)
    assert errors.retried(failing(busy, busy), "gs://b/x") == "done"
    assert len(pauses) == 2 and pauses[1] > pauses[0]
    assert "gs://b/x: HttpError: slow down; trying again in" in capsys.readouterr().err
    with pytest.raises(StorageFailure, match="gs://b/x: HttpError: slow down .*nothing was lost"):
        errors.retried(failing(*[busy] * 9), "gs://b/x")
    assert len(pauses) == 2 + len(errors.PAUSES)


@pytest.mark.parametrize("error", [KINDS[Kind.PERMANENT][1], KINDS[Kind.DAMAGE][0], KINDS[Kind.UNKNOWN][0]], ids=str)
def test_what_is_not_transient_is_not_tried_again(pauses, error):
    with pytest.raises((StorageFailure, type(error))):
        errors.retried(failing(error), "x")
    assert not pauses


@pytest.mark.parametrize(
    ("kind", "raised"), [*zip(KINDS, (StorageFailure, StorageFailure, Damaged, None), strict=True)]
)
def test_a_restore_calls_only_what_storage_answered_wrongly_damaged(kind, raised):
    for error in KINDS[kind]:
        wanted = raised or (Refused if isinstance(error, ValueError) else StorageFailure)
        with pytest.raises(wanted) as told, integrity.judged("c/3"):
            raise error
        assert type(told.value) is wanted and str(told.value).startswith("c/3: ")


def test_all_hosts_raise_what_one_host_met():
    for error in (Damaged("c/3", "bits"), Refused("c/3", "foreign"), StorageFailure("c/3", "busy", Kind.TRANSIENT)):
        with pytest.raises(type(error)) as told:
            integrity.by_all(failing(error))
        assert str(told.value) == str(error)


def in_open_run(error):
    try:
        with cli.run_is_open():
            raise error
    except Exception as ended:
        return ended


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("learning_rate is negative"), cli.USAGE_ERROR),
        (Refused("c/3", "foreign"), cli.USAGE_ERROR),
        (StorageFailure("c/3", "forbidden", Kind.PERMANENT), cli.FAILED),
        (StorageFailure("c/3", "busy", Kind.TRANSIENT), cli.FAILED),
        (tensorstore("ABORTED", 503), cli.FAILED),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), cli.FAILED),
        (in_open_run(ValueError("anything")), cli.FAILED),
        (in_open_run(StorageFailure("c/3", "forbidden", Kind.PERMANENT)), cli.FAILED),
        (in_open_run(cli.Ended("not finite", cli.GAVE_UP)), cli.GAVE_UP),
    ],
    ids=str,
)
def test_a_supervisor_starts_again_what_may_succeed(capsys, error, code):
    def command(options):
        raise error

    assert cli.run(command, cli.parser("x", "y"), []) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and cli.in_words(error) in said
