"""FLOPs from the model's shapes equal those of its matrix products, one by one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import qwen3_30b_a3b
from rpg_jax import losses, models
from rpg_jax.models.lora import adapter_shapes
from rpg_jax.planning import compiling
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.resolve import resolve

DENSE = models.DecoderConfig(
    vocab_size=40, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, hidden_dim=20
)
ROWS, LENGTH, PREDICTED = 2, 8, 5


def products(jaxpr):
    """FLOPs of every dot_general, as often as its scan runs; of a cond, such as one by platform, the dearest branch."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = functools.reduce(lambda n, d: n * shape[d], contracted, 1)
            total += 2 * equation.outvars[0].aval.size * depth
        if equation.primitive.name == "cond":
            total += max(products(branch.jaxpr) for branch in equation.params["branches"])
            continue
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += times * products(inner)
    return total


def loss(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden = model(tokens, positions, jnp.ones_like(tokens))[:, :PREDICTED]
    return losses.token_logprobs(hidden, model.head(), tokens[:, :PREDICTED], chunk_size=PREDICTED)[0].sum()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_model_flops_are_those_of_its_matrix_products(remat):
    graphdef, params = models.abstract(DENSE, jnp.float32, remat=remat)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    sizes = {"rows": ROWS, "length": LENGTH, "predicted": PREDICTED}
    # the plain attention of this backend computes all scores where the count takes the causal half
    half = ROWS * LENGTH * DENSE.num_layers * 2 * 2 * DENSE.num_heads * DENSE.head_dim * LENGTH / 2
    forward = products(jax.make_jaxpr(functools.partial(loss, graphdef))(params, tokens).jaxpr)
    assert compiling.forward_flops(DENSE, **sizes) + half == forward
    both = products(jax.make_jaxpr(jax.grad(functools.partial(loss, graphdef)))(params, tokens).jaxpr)
    # plain attention computes the other half of the scores too, in every pass; of a backward pass it keeps them, where
    # the kernel that is counted multiplies queries and keys again, a half of what a pass does
    passes = 4 - 0.5 if remat == "full" else 3
    assert both == compiling.training_flops(DENSE, **sizes, remat=remat) + passes * half


def test_frozen_weights_beside_adapters_have_no_gradient():
    graphdef, params = models.abstract(DENSE, jnp.float32)
    tokens, shapes = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32), adapter_shapes(DENSE, models.Lora(2, 2.0))
    half = ROWS * LENGTH * DENSE.num_layers * 2 * 2 * DENSE.num_heads * DENSE.head_dim * LENGTH / 2
    own = 3 * 2 * ROWS * LENGTH * sum(x.size for x in jax.tree.leaves(shapes))  # forward, and two products backward

    def total(adapters, params, tokens):
        return loss(graphdef, models.Base(params, 1.0).policy(adapters), tokens)

    both = products(jax.make_jaxpr(jax.grad(total))(shapes, params, tokens).jaxpr)
    sizes = {"rows": ROWS, "length": LENGTH, "predicted": PREDICTED}
    head = 2 * ROWS * PREDICTED * DENSE.embed_dim * DENSE.vocab_size  # its gradient, which nobody reads
    assert both == compiling.training_flops(DENSE, **sizes, frozen=True) + 3 * half + own + head


def test_a_micro_batch_of_a_mixture_that_replays_has_the_experts_of_every_token():
    config = resolve(qwen3_30b_a3b.get_config())
    for replays in (True, False):
        config.model.replay_experts = replays
        layout = make_layout(config, None)
        rows = compiling.batch_of(layout).rows
        assert (rows.experts is not None) == replays
        if replays:
            assert rows.experts.shape == (*rows.tokens.shape, layout.model.num_layers, 8)
            assert rows.experts.dtype == jnp.uint8


def test_a_mixture_counts_the_experts_that_a_token_sees():
    moe = models.size("Qwen3-30B-A3B")
    per_token = compiling.forward_flops(moe, rows=1, length=1, predicted=1)
    attention = moe.num_layers * 2 * moe.num_heads * moe.head_dim
    embedding, norms = moe.vocab_size * moe.embed_dim, moe.embed_dim * (2 * moe.num_layers + 1)
    norms += moe.num_layers * 2 * moe.head_dim
    unseen = moe.num_layers * (moe.experts.count - moe.experts.per_token) * 3 * moe.embed_dim * moe.experts.hidden_dim
    active = models.parameter_count(moe) - unseen
    assert per_token - attention == 2 * (active - embedding - norms)


def test_decoding_reads_the_whole_cache_for_every_slot():
    few, many = (compiling.token_flops(DENSE, tokens=3, attended=n, predicted=3) for n in (0, 10))
    assert many - few == 3 * DENSE.num_layers * 2 * 2 * DENSE.num_heads * DENSE.head_dim * 10
