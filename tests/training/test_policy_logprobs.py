"""Log-probs of completions that share their prompt, and hidden states that no trained token needs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rpg_jax.training.policy_logprobs as module
from rpg_jax import losses, models
from rpg_jax.data import RowShape, pack
from rpg_jax.training.policy_logprobs import completion_hidden, policy_logprobs
from rpg_jax.types import Completion, Rows


@pytest.mark.parametrize("broken", (np.nan, np.inf))
def test_a_broken_hidden_state_under_the_mask_reaches_no_gradient_of_the_head(broken):
    """Its cotangent is 0, and 0 · NaN would be NaN in every entry of the head."""
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 4, 8), (5, 8)))
    ids = jnp.zeros((2, 3), jnp.int32)
    mask = jnp.asarray([[1, 1, 0], [1, 0, 0]], jnp.float32)
    predictors = jnp.asarray([[0, 1, 2], [0, 3, 3]])
    rows = Rows(*[jnp.zeros((2, 4), jnp.int32)] * 3, predictors, ids, ids, mask)
    bad = hidden.at[0, 2].set(broken).at[1, 3].set(broken)

    def loss(hidden, head):
        found = completion_hidden(lambda *_, **__: hidden, rows)
        return jnp.sum(losses.token_logprobs(found, head, rows.targets)[0] * mask)

    clean, got = (jax.grad(loss, argnums=(0, 1))(x, head) for x in (hidden, bad))
    jax.tree.map(np.testing.assert_array_equal, got, clean)


class Prompted(NamedTuple):
    prompt: np.ndarray
    completions: list[Completion]
    counted: list[bool]


def prompted(rng, prompt, lengths):
    drawn = [rng.integers(1, 50, n).astype(np.int32) for n in lengths]
    completions = [Completion(x, np.zeros(len(x), np.float32), "stop", 0) for x in drawn]
    return Prompted(rng.integers(1, 50, prompt).astype(np.int32), completions, [True] * len(lengths))


@pytest.mark.slow  # compiles, or waits, for seconds
@pytest.mark.parametrize("logits", [1 << 22, 1], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", [{"qkv_bias": True}, {"qk_norm": True}], ids=["biases", "norms"])
def test_completions_that_share_a_prompt_have_the_logprobs_and_the_gradients_of_completions_apart(
    family, logits, monkeypatch
):
    """In chunks of 8 tokens the head also skips the columns that no completion fills."""
    monkeypatch.setattr(module, "_LOGITS", logits)
    monkeypatch.setattr(module, "_CHUNK", 16)
    config = models.DecoderConfig(
        vocab_size=64,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_dim=48,
        **family,
        tie_embeddings=True,
    )
    graphdef, params = models.init(config, seed=3)
    rng = np.random.default_rng(0)
    groups = [prompted(rng, 11, (5, 1, 7, 3)), prompted(rng, 1, (4, 4)), prompted(rng, 6, (9,))]
    weights = [[rng.normal(size=len(c.tokens)).astype(np.float32) for c in g.completions] for g in groups]

    def found(shape):
        batch = pack(groups, shape)
        scattered = batch.scatter(weights)

        def logprobs(params):
            return [policy_logprobs(graphdef, params, b.rows, temperature=0.7)[0] for b in batch.batches]

        def loss(params):
            own = zip(logprobs(params), scattered, batch.batches, strict=True)
            return sum(jnp.sum(jnp.where(b.mask > 0, w * x, 0)) for x, w, b in own)

        values = batch.gather([np.asarray(x) for x in logprobs(params)])
        tokens = sum(int((b.rows.segment_ids > 0).sum()) for b in batch.batches)
        return np.concatenate([x for own in values for x in own]), jax.grad(loss)(params), tokens

    apart, expected, most = found(RowShape(7, 20, 10))
    for shape in (RowShape(2, 40, 40, packed=True, shared=True), RowShape(3, 20, 20, packed=True, shared=True)):
        logprobs, gradient, tokens = found(shape)
        assert tokens < most
        np.testing.assert_allclose(logprobs, apart, rtol=0, atol=2e-6)  # f32; the order of sums differs
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))
