"""A rollout whose completions come from JetStream's gRPC service.

JetStream's protocol has no fields for sampling parameters, random numbers and log-probabilities. So gRPC metadata carry
them. A request without these metadata gets the answer that JetStream's own clients expect: text or token ids, without
the stop token.
"""

import dataclasses
import math
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path
from typing import Any, NoReturn, Self

import grpc
import numpy as np

from rpg_jax.rollout.jetstream.adapter import unpack
from rpg_jax.rollout.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.rollout.request import Request
from rpg_jax.rollout.rollout import Rollout
from rpg_jax.rollout.serving.access import ApiKey, is_loopback
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion, Sampling

_PREFIX = "rpg-"
WEIGHTS = _PREFIX + "weights"
"""The trailing metadata of an answer: the checksum of the weights that drew it."""
_COUNTERS = ("seed", "step", "prompt-id", "index")


@dataclasses.dataclass(frozen=True)
class Terms:
    """How one request is sampled.

    Attributes:
      counters: (seed, step, prompt_id, index) of its random key.
      sampling: temperature, cuts, length and stop tokens.
      lanes: whether the answer has lanes of log-probability bits and tokens, see `adapter.pack`. These include the stop
        token.
    """

    counters: tuple[int, int, int, int]
    sampling: Sampling
    lanes: bool


def encode_terms(terms: Terms) -> tuple[tuple[str, str], ...]:
    """The gRPC metadata of terms. `max_tokens` is not among them: JetStream's request has a field for it."""
    s = terms.sampling
    values = dict(zip(_COUNTERS, terms.counters, strict=True)) | {
        "temperature": repr(s.temperature),
        "top-p": repr(s.top_p),
        "top-k": s.top_k,
        "min-p": repr(s.min_p),
        "stop": ",".join(map(str, s.stop_token_ids)),
        "lanes": int(terms.lanes),
    }
    return tuple((_PREFIX + name, str(value)) for name, value in values.items())


def decode_terms(metadata: Iterable[tuple[str, str]], max_tokens: int, defaults: Terms) -> Terms:
    """The terms of a request. A term that the metadata lack has its value in `defaults`.

    Raises:
      ValueError: an unknown name, or a value that does not parse or is out of range.
    """
    given = {name[len(_PREFIX) :]: value for name, value in metadata if name.startswith(_PREFIX)}
    s = defaults.sampling
    counters = [_number(given, name, int, d) for name, d in zip(_COUNTERS, defaults.counters, strict=True)]
    stop = given.pop("stop", None)
    if stop is not None and not all(part.strip().isdecimal() for part in stop.split(",") if part):
        raise ValueError(f"metadata rpg-stop must be token ids separated by commas, got {stop!r}")
    sampling = Sampling(
        temperature=_number(given, "temperature", float, s.temperature),
        top_p=_number(given, "top-p", float, s.top_p),
        top_k=_number(given, "top-k", int, s.top_k),
        max_tokens=max_tokens,
        min_p=_number(given, "min-p", float, s.min_p),
        stop_token_ids=s.stop_token_ids if stop is None else tuple(int(part) for part in stop.split(",") if part),
    )
    lanes = bool(_number(given, "lanes", int, int(defaults.lanes)))
    if given:
        raise ValueError(f"unknown metadata {sorted(_PREFIX + name for name in given)}")
    return Terms(tuple(counters), sampling, lanes)


def _number(given: dict[str, str], name: str, kind: type, default):
    text = given.pop(name, None)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"metadata {_PREFIX}{name} must be a {kind.__name__}, got {text!r}") from None
    if kind is float and not math.isfinite(value):
        raise ValueError(f"metadata {_PREFIX}{name} must be finite, got {text!r}")
    return value


_OF_THE_CALLER = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


class GrpcRollout(Rollout):
    """The weights are the server's, so the methods that replace weights refuse. Completions carry version 0.

    All completions are of the weights that drew the first: a later answer of other weights is an error.

    Args:
      address: host:port.
      credentials: TLS; None for plain text.
      key: the server's API key, if it has one.
      parallel: requests in flight.
      timeout: seconds for one completion, including its wait for a slot.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        key: ApiKey | None = None,
        parallel: int = 64,
        timeout: float = 600.0,
    ):
        self._address, self._timeout = address, timeout
        self._weights: str | None = None  # which drew the first answer
        self._metadata = () if key is None else (("authorization", key.header),)
        self._channel = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )
        self._stub = jetstream_pb2_grpc.OrchestratorStub(self._channel)
        self._pool = futures.ThreadPoolExecutor(parallel, thread_name_prefix="rpg-client")

    @classmethod
    def connect(cls, address: str, *, certificate: str | None, key: ApiKey | None, parallel: int) -> Self:
        """A client of the server at `address` (host:port), by TLS if `certificate` names the PEM file to trust.

        Raises:
          ValueError: the key would cross the network in plain text, or the file cannot be read.
        """
        if certificate is None:
            if key is not None and not is_loopback(address.rpartition(":")[0]):
                raise ValueError(f"the API key would go to {address} in plain text: pass --server_certificate=FILE")
            return cls(address, key=key, parallel=parallel)
        try:
            credentials = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
        except OSError as error:
            raise ValueError(f"the server's certificate {certificate}: {error.strerror}") from None
        return cls(address, credentials=credentials, key=key, parallel=parallel)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"the weights are those of the server at {self._address}: they cannot be read or replaced from here; to "
            "replace them, restart the server with another checkpoint"
        )

    stage_weights = sync_weights = verify_weights = _refuse

    def weights_checksum(self) -> int:
        """The checksum of the server's weights, which it says with a completion of one token.

        Raises ValueError if it does not say it.
        """
        self._one(np.zeros(1, np.int32), Terms((0, 0, 0, 0), Sampling(max_tokens=1), True))
        try:
            return int(self._weights or "", 16)
        except ValueError:
            raise ValueError(
                f"the server at {self._address} does not say which weights it has, so no score can name them: start it "
                "with python -m rpg_jax.serve of this version"
            ) from None

    def sample(self, request: Request) -> list[list[Completion]]:
        if request.environment is not None:
            raise ValueError(
                "a server's client cannot continue a completion after an environment's reply: choose another driver"
            )
        if request.enough is not None:
            raise ValueError(f"a server completes all groups: enough must be None, got {request.enough}")
        groups = [
            [
                self._pool.submit(self._one, prompt, Terms(request.counters(place, index), request.sampling, True))
                for index in range(request.group_size)
            ]
            for place, prompt in enumerate(request.prompts)
        ]
        try:
            made = []
            for place, group in enumerate(groups):
                made.append([future.result() for future in group])
                if request.on_group is not None:
                    request.on_group(place, made[-1])
            return made
        except BaseException:
            for future in (f for group in groups for f in group):
                future.cancel()
            raise

    def close(self) -> None:
        self._channel.close()  # ends the requests in flight, for which the pool waits
        self._pool.shutdown(cancel_futures=True)

    def _one(self, prompt: np.ndarray, terms: Terms) -> Completion:
        request = jetstream_pb2.DecodeRequest(
            token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=np.asarray(prompt).tolist()),
            max_tokens=terms.sampling.max_tokens,
        )
        try:
            replies = self._stub.Decode(
                request, timeout=self._timeout, metadata=(*self._metadata, *encode_terms(terms))
            )
            lanes = [lane for reply in replies for lane in reply.stream_content.samples[0].token_ids]
            weights = dict(replies.trailing_metadata() or ()).get(WEIGHTS)
        except grpc.RpcError as error:
            message = f"the server at {self._address} answered {error.code().name}: {error.details()}"
            kind = ValueError if error.code() in _OF_THE_CALLER else RolloutError
            raise kind(message) from error
        if (self._weights or weights) != weights:
            raise ValueError(
                f"the server at {self._address} had the weights {self._weights}, and now has {weights}: completions of "
                "both have no common score; give the same command again"
            )
        self._weights = weights
        tokens, logprobs = unpack(np.array(lanes, np.int32))
        stopped = int(tokens[-1]) in terms.sampling.stop_token_ids
        return Completion(tokens, logprobs, "stop" if stopped else "length", 0)
