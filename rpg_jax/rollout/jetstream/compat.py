"""Imports JetStream 0.2.2 without TensorFlow, and undoes what the import does to the process.

The wheel is installed without its dependencies, because its tokenizers pull in TensorFlow. So this module stubs `seqio`
and `tiktoken` if they are absent. Token ids go in and out of our engine, so neither tokenizer is ever constructed.
No other file patches JetStream; import `orchestrator`, `engine_api` and the rest from here.
"""

import importlib.util
import logging
import sys
import threading
import types

from rpg_jax.rollout.jetstream import INSTALL

if importlib.util.find_spec("jetstream") is None:
    raise ModuleNotFoundError(f"JetStream is not installed: {INSTALL}", name="jetstream")


def _stub(package: str, submodule: str, **attributes) -> None:
    if importlib.util.find_spec(package) is not None:
        return
    for name in (package, f"{package}.{submodule}"):
        sys.modules[name] = types.ModuleType(name)
    for name, value in attributes.items():
        setattr(sys.modules[f"{package}.{submodule}"], name, value)


def _tokenizer_absent(*_args, **_kwargs):
    raise ImportError("this tokenizer needs seqio or tiktoken; the rollout engine brings its own tokenizer")


_stub(
    "seqio",
    "vocabularies",
    Vocabulary=type("Vocabulary", (), {}),
    SentencePieceVocabulary=type("SentencePieceVocabulary", (), {"__init__": _tokenizer_absent}),
)
_stub("tiktoken", "load", load_tiktoken_bpe=_tokenizer_absent)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

from jetstream.core import orchestrator  # noqa: E402
from jetstream.core.metrics.prometheus import JetstreamMetricsCollector as JetstreamMetricsCollector  # noqa: E402
from jetstream.core.proto import jetstream_pb2 as jetstream_pb2  # noqa: E402
from jetstream.core.proto import jetstream_pb2_grpc as jetstream_pb2_grpc  # noqa: E402
from jetstream.engine import engine_api as engine_api  # noqa: E402
from jetstream.engine import token_utils  # noqa: E402
from jetstream.engine import tokenizer_pb2 as tokenizer_pb2  # noqa: E402

_root.handlers[:] = _handlers
_root.setLevel(_level)

# JetStream logs a record per request and decode step, at INFO on the root logger: a logger of its own can be silenced.
logger = logging.getLogger("jetstream")
logger.setLevel(logging.WARNING)
orchestrator.logging = logger
token_utils.logging = logger


class GuardedThread(threading.Thread):
    """A driver thread whose failure reaches `driver.on_fault` instead of killing the process.

    JetStream's own thread sends SIGKILL to the process on any exception. Its detokenize thread is no daemon, so it
    keeps an interpreter alive that did not stop its driver.
    """

    def __init__(self, *, target, name: str, daemon: bool = True):
        super().__init__(target=target, name=name, daemon=True)
        self._driver = target.func.__self__

    def run(self):
        try:
            super().run()
        except BaseException as fault:
            self._driver.on_fault(self.name, fault)


# The original deletes arrays that the completions of a prompt share (and calls `jax.tree_map`, which is gone).
# Reference counts free them as well.
orchestrator.delete_pytree = lambda tree: None
orchestrator.JetThread = GuardedThread
