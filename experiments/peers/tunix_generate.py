"""Generates the same completions by Tunix's own sampler, in an interpreter that has google-tunix.

The first line of stdin is one JSON object with the sizes. For every further line this program generates once and prints
one JSON object: `seconds` and `tokens`. Weights are N(0, 0.02), in f32. The cache has no position more than needed.
Sampling has temperature 1, without top-k or top-p. Neither log-probs nor logits are asked for.
"""

import json
import sys
import time

import jax
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3

_NO_TOKEN = -1


class _TokenIds:
    """The tokenizer that the sampler wants: a text is token ids with spaces between them, and no token ends it."""

    def encode(self, text):
        return [int(token) for token in text.split()]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def bos_id(self):
        return None

    def eos_id(self):
        return _NO_TOKEN

    def pad_id(self):
        return _NO_TOKEN


def main():
    asked = json.loads(sys.stdin.readline())
    m = asked["model"]
    config = ModelConfig(
        num_layers=m["num_layers"],
        vocab_size=m["vocab_size"],
        embed_dim=m["embed_dim"],
        hidden_dim=m["hidden_dim"],
        num_heads=m["num_heads"],
        head_dim=m["head_dim"],
        num_kv_heads=m["num_kv_heads"],
        rope_theta=int(m["rope"]["theta"]),
        norm_eps=m["rms_norm_eps"],
        use_tied_embedding=m["tie_embeddings"],
    )
    model = Qwen3(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jax.numpy.asarray(random.normal(0, 0.02, x.shape), x.dtype), nnx.state(model))
    nnx.update(model, weights)
    length, new = asked["prompt_tokens"], asked["new_tokens"]
    sampler = Sampler(model, _TokenIds(), CacheConfig(length + new, m["num_layers"], m["num_kv_heads"], m["head_dim"]))
    prompts = random.integers(0, m["vocab_size"], (asked["prompts"], length))
    texts = [_TokenIds().decode(prompt) for prompt in prompts for _ in range(asked["group_size"])]
    for seed, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        out = sampler(texts, new, max_prompt_length=length, temperature=1.0, top_p=1.0, seed=seed)
        seconds, tokens = time.perf_counter() - began, sum(map(len, out.tokens))
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


main()
