"""The messages between trainer and workers: a JSON head with raw arrays behind it. Nothing in them is executed.

    length   u32, little-endian: bytes of the head
    head     JSON object
    body     raw arrays, little-endian; what they are is said in the head

gRPC carries them as bytes, so there is no generated code.
"""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rpg_jax.rollout.interface import Request
from rpg_jax.types import Sampling

PROTOCOL = 1
SERVICE = "rpg_jax.Fleet"
UNARY = ("Join", "Leave", "Beat", "Lease", "Complete", "Release")
LARGEST = 1 << 28  # bytes of one message
CHUNK = 1 << 20  # bytes of one message of a stream

_LENGTH = struct.Struct("<I")
_COMPUTING = ("rollout", "models", "parallel")  # the packages on which completions depend

Head = dict[str, Any]


def pack(head: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
    """The bytes of a message."""
    text = json.dumps(head).encode()
    return b"".join((_LENGTH.pack(len(text)), text, body))


def unpack(message: bytes) -> tuple[Head, memoryview]:
    """The head and the body of a message. Raises ValueError for bytes that are none."""
    view = memoryview(message)
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        head = json.loads(bytes(view[_LENGTH.size : end]))
    except (struct.error, ValueError) as error:
        raise ValueError(f"no message of the fleet: {error}") from None
    if not isinstance(head, dict) or end > len(view):
        raise ValueError("no message of the fleet: its head is no JSON object, or is cut short")
    return head, view[end:]


def request_to_wire(request: Request) -> tuple[Head, bytes]:
    """A request without what belongs to its caller: `enough`, `done` and `on_group`."""
    head = {
        "prompt_ids": [int(i) for i in request.prompt_ids],
        "lengths": [len(prompt) for prompt in request.prompts],
        "group_size": request.group_size,
        "sampling": dataclasses.asdict(request.sampling),
        "seed": request.seed,
        "step": request.step,
    }
    return head, np.concatenate([np.asarray(prompt, "<i4") for prompt in request.prompts]).tobytes()


def request_from_wire(head: Head, body: memoryview) -> Request:
    """The request of `request_to_wire`. Raises ValueError if sizes contradict each other."""
    tokens, lengths = np.frombuffer(body, "<i4").astype(np.int32), head["lengths"]
    if sum(lengths) != len(tokens):
        raise ValueError(f"a request of {sum(lengths)} prompt tokens came with {len(tokens)}")
    sampling = {**head["sampling"], "stop_token_ids": tuple(head["sampling"]["stop_token_ids"])}
    return Request(
        np.split(tokens, np.cumsum(lengths)[:-1]),
        head["prompt_ids"],
        head["group_size"],
        Sampling(**sampling),
        head["seed"],
        head["step"],
    )


def versions() -> dict[str, str]:
    """What trainer and workers must have in common: the protocol, the code that samples, and JAX."""
    import jax

    return {"protocol": str(PROTOCOL), "jax": jax.__version__, "code": _digest_of_code()}


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The entries in which two mappings differ, with both values; "" if there are none."""
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return "; ".join(f"{n} is {theirs.get(n)!r}, and {ours.get(n)!r} at the trainer" for n in names)


def _digest_of_code() -> str:
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for package in _COMPUTING:
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]
