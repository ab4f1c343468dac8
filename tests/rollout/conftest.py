from __future__ import annotations

import time

import numpy as np
import pytest

from rpg_jax import models, rollout
from rpg_jax.rollout import Decoding, Request
from rpg_jax.types import Sampling
from tests.rollout.simple import SimpleRollout

CONFIG = models.DecoderConfig(
    vocab_size=50, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=48
)
CAPACITY = rollout.capacity(max_prompt_tokens=24, max_tokens=24)


class Letters:
    """Token i is the character 48 + i."""

    def encode(self, text):
        return [ord(c) - 48 for c in text]

    def decode(self, ids):
        return "".join(chr(48 + i) for i in ids)


@pytest.fixture(scope="session")
def letters():
    """A tokenizer, for the servers."""
    return Letters()


@pytest.fixture(scope="session")
def model():
    """(graphdef, params) of a model of random weights, sharp enough for tokens to differ in probability."""
    graphdef, params = models.init(CONFIG, seed=3)
    return graphdef, {**params, "embed": params["embed"] * 2}


@pytest.fixture(scope="session")
def model_config():
    return CONFIG


@pytest.fixture(scope="session")
def make():
    """A new rollout over a model's graphdef and params, by driver name; the oracle is called "simple"."""

    def make(driver: str, graphdef, params, **options):
        decoding = Decoding(capacity=CAPACITY, **options)
        if driver == "simple":
            return SimpleRollout(graphdef, params, decoding)
        return rollout.make_rollout(driver, CONFIG, graphdef, params, decoding)

    return make


@pytest.fixture(scope="session")
def build(model, make):
    """A rollout over the model, by driver name; engines of the same size are compiled once."""
    built = {}

    def get(driver: str, slots: int = 8, **options):
        key = (driver, slots, *sorted(options.items()))
        if key not in built:
            built[key] = make(driver, *model, slots=slots, **options)
        return built[key]

    yield get
    for made in built.values():
        made.close()


@pytest.fixture(scope="session")
def work():
    """A request: 10 prompts of 1 to 20 tokens, 4 completions each, most ended by a stop token."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (3, 20, 1, 16, 17, 8, 5, 5, 12, 2)]
    return Request(
        prompts,
        prompt_ids=[100 + 7 * i for i in range(len(prompts))],
        group_size=4,
        sampling=Sampling(temperature=0.8, max_tokens=24, stop_token_ids=(5, 9)),
        seed=11,
        step=3,
    )


def same(a, b, atol=1e-5) -> bool:
    """Whether two results of `generate` hold the same tokens, and the same log-probs up to f32 rounding."""
    assert [len(group) for group in a] == [len(group) for group in b]
    pairs = [(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)]
    return all(
        np.array_equal(x.tokens, y.tokens)
        and x.finish_reason == y.finish_reason
        # Sums of f32 in another order: up to 5.3e-6 on some processors, where a log-prob is -4.
        and np.allclose(x.logprobs, y.logprobs, rtol=0, atol=atol)
        for x, y in pairs
    )


@pytest.fixture(scope="session")
def expected(build, work):
    return build("simple").generate(work)


@pytest.fixture(scope="session")
def is_same():
    return same


@pytest.fixture
def until():
    def until(condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return until
