"""What a run does in a bucket that fails by script; `cloud_faults` prints all of it as a table."""

import pytest
import tensorstore

from rpg_jax.storage import errors
from rpg_jax.storage.errors import Kind
from tests.fake_gcs import FakeGcs
from tests.storage.cloud_faults import FAULTS, PATHS, outcome

ANSWERS = {  # a fault that lasts: what it means
    429: Kind.TRANSIENT,
    500: Kind.TRANSIENT,
    503: Kind.TRANSIENT,
    401: Kind.TRANSIENT,
    403: Kind.PERMANENT,
    "reset": Kind.TRANSIENT,
}


@pytest.fixture
def kvstore(monkeypatch):
    """(bucket, TensorStore's key-value store in it), which tries three times within milliseconds."""
    with FakeGcs("bucket") as gcs:
        for name, value in gcs.environment.items():
            monkeypatch.setenv(name, value)
        quick = {"gcs_request_retries": {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"}}
        spec = {"driver": "gcs", "bucket": "bucket", "path": "a/", "context": quick}
        yield gcs, tensorstore.KvStore.open(spec).result()


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_tensorstore_says_of_a_bucket_that_fails_is_understood(kvstore, monkeypatch, kind):
    gcs, store = kvstore
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    gcs.put("a/x", b"content")
    gcs.script(kind, methods="GET")
    with pytest.raises(errors.StorageFailure) as told:
        errors.retried(lambda: store.read("x").result(), "gs://bucket/a/x")
    assert told.value.kind is ANSWERS[kind] and "\n" not in str(told.value)
    gcs.faults.clear()
    gcs.script(kind, methods="GET", times=1 if ANSWERS[kind] is Kind.TRANSIENT else 0)
    assert errors.retried(lambda: store.read("x").result().value, "gs://bucket/a/x") == b"content"


CHECKPOINTS = ("write a checkpoint", "read a checkpoint", "pass over a damaged one")  # one to two seconds each
ALIKE = (500, 503, "slow")  # a program meets them as it meets 429 and "lag"


@pytest.mark.slow  # imports gcsfs, and writes checkpoints
@pytest.mark.parametrize("times", [2, float("inf")], ids=["twice", "until it ends"])
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param(path, kind, marks=[pytest.mark.soak] * (path in CHECKPOINTS and kind in ALIKE))
        for path in PATHS
        for kind in FAULTS
    ],
)
def test_a_path_under_a_fault_succeeds_or_says_one_line_and_nothing_is_lost(path, kind, times):
    pytest.importorskip("gcsfs")
    found = outcome(path, kind, times)
    assert found in ("succeeds", "one line, exit code 1", "not met")
    if kind in (429, 500, 503, "reset", "slow", "lag") and times == 2:
        assert found in ("succeeds", "not met"), "the clients or this program try again"
