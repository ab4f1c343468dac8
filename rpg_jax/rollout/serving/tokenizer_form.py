"""The tokenizer over HTTP, in vLLM's form: clients that score texts by token ids need no tokenizer of their own."""

from typing import Any

from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.rollout.serving.body import Body

_UNUSED = {"model": None, "add_special_tokens": (False,)}  # `encode` adds none
INFO = {"tokenizer_class": "rpg_jax", "bos_token": None, "eos_token": None, "pad_token": None}
"""Special tokens are not named: completions end at them here, and their texts are not part of answers."""


async def tokenize(admission: Admission, body: Body) -> dict[str, Any]:
    """From `prompt`, a text, to its token ids. Raises ValueError for another field."""
    text = body.take("prompt")
    if not isinstance(text, str):
        raise ValueError("prompt must be a text")
    body.end(_UNUSED)
    tokens = await admission.encode(text)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": admission.capacity}


async def detokenize(admission: Admission, body: Body) -> dict[str, Any]:
    """From `tokens`, a list of token ids, to their text. Raises ValueError for an id outside the vocabulary."""
    ids = body.take("tokens")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < admission.vocab_size for token in ids):
        raise ValueError(f"tokens must be a list of token ids from 0 to {admission.vocab_size - 1}")
    body.end(_UNUSED)
    return {"prompt": admission.codec.decode(ids)}
