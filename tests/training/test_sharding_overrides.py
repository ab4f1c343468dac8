"""Overrides of the sharding rules: one that is accepted gives the numbers of one device, any other is refused by name.

The numbers are log-probabilities, entropies and values of a head on the hidden states, and the gradient through all
three. Training, supervised training, `Policy.logprobs` and critics compute nothing else on a mesh.
"""

import functools
import itertools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax import losses, models, parallel
from rpg_jax.models.lora import adapter_axes, init_adapters
from rpg_jax.models.projections import lookup
from rpg_jax.training.policy_logprobs import completion_hidden, head_arguments
from rpg_jax.types import Rows

DIMENSIONS = dict(
    vocab_size=32, num_layers=4, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, hidden_dim=16
)  # every dimension divides by four devices
DENSE = models.DecoderConfig(**DIMENSIONS, tie_embeddings=False)
TIED = models.DecoderConfig(**DIMENSIONS, tie_embeddings=True)
MOE = models.DecoderConfig(**DIMENSIONS, tie_embeddings=True, experts=models.Experts(4, 2, 16, renormalise=True))
MODELS = {"dense": DENSE, "tied": TIED, "moe": MOE}
LORA = models.Lora(rank=2, alpha=2.0)
B, T, C = 8, 8, 4
PARAMETERS = ("layers", "vocab", "embed", "heads", "kv_heads", "hidden", "experts", "router", "norm")


def random_rows():
    """Rows of two segments; the four completion tokens are the last ones."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (B, T + 1)).astype(np.int32)
    positions, segments = (np.tile(np.array(x, np.int32), (B, 1)) for x in ([0, 1, 2, *range(5)], [1] * 3 + [2] * 5))
    predictors = np.tile(np.arange(C, T, dtype=np.int32), (B, 1))
    ids = np.tile(np.arange(B, dtype=np.int32)[:, None], (1, C))
    return Rows(tokens[:, :-1], positions, segments, predictors, tokens[:, C + 1 :], ids, np.ones((B, C), np.float32))


ROWS = random_rows()


def mesh_of(*axes):
    """Two devices for each of the mesh axes."""
    return parallel.make_mesh(dict.fromkeys(axes, 2), jax.devices()[: 2 ** len(axes)])


@functools.cache
def model_of(name, lora=False):
    """The graph, the frozen weights beside adapters, and what is trained: the weights or adapters, and a value head."""
    graphdef, params = models.init(MODELS[name], seed=1)
    value = {"weight": jnp.sin(jnp.arange(16.0)), "bias": jnp.float32(0.1)}
    if not lora:
        return graphdef, None, (params, {"value": value})
    adapters = jax.tree.map(lambda x: x + 0.1, init_adapters(MODELS[name], LORA, seed=2))
    return graphdef, models.Base(params, LORA.scale), (adapters, {"value": value})


def program(graphdef, base, trained, rows):
    """Log-probs, entropies and values f32[B, C], and the gradient of a function of all three."""

    def loss(trained):
        params, head = trained
        model = nnx.merge(graphdef, models.policy_params(base, params))
        hidden = completion_hidden(model, rows)
        values = jnp.einsum("bcd,d->bc", hidden.astype(jnp.float32), head["value"]["weight"]) + head["value"]["bias"]
        inputs, how = head_arguments(model, hidden, rows)
        found = *losses.token_logprobs(*inputs, temperature=0.8, entropy=True, **how), values
        return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(found)), found

    gradient, found = jax.grad(loss, has_aux=True)(trained)
    return found, gradient


@functools.cache
def of_one_device(name, lora=False):
    graphdef, base, trained = model_of(name, lora)
    return jax.device_get(jax.jit(functools.partial(program, graphdef))(base, trained, ROWS))


def on_mesh(name, overrides, axes, lora=False):
    """The numbers of `program` on `mesh_of(*axes)`."""
    graphdef, base, (params, head) = model_of(name, lora)
    mesh, rules = mesh_of(*axes), parallel.override(overrides)

    def place(names, tree):
        return jax.device_put(tree, parallel.shardings(names, tree, mesh, rules))

    names = models.logical_axes(MODELS[name])
    if base is not None:
        base, names = models.Base(place(names, base.weights), base.scale), adapter_axes(MODELS[name], LORA)
    trained = place(names, params), jax.device_put(head, NamedSharding(mesh, PartitionSpec()))
    rows = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec(rules["batch"])))
    with parallel.activate(mesh, rules):
        return jax.device_get(jax.jit(functools.partial(program, graphdef))(base, trained, rows))


def distance(got, expected):
    """The largest difference of the outputs, and of a gradient relative to the largest entry of its array."""
    outputs = max(float(np.abs(a - b).max()) for a, b in zip(got[0], expected[0], strict=True))
    leaves = zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True)
    return outputs, max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in leaves)


def assert_of_one_device(name, overrides, axes, lora=False):
    outputs, gradients = distance(on_mesh(name, overrides, axes, lora), of_one_device(name, lora))
    # float32 sums in another order: 2e-5 nats and 2e-5 of a gradient were seen. Wrong rules are off by nats.
    assert outputs < 1e-4 and gradients < 1e-4, (overrides, axes, outputs, gradients)


def unset(*names):
    return dict.fromkeys(names, ())


TENSOR = unset("vocab", "heads", "kv_heads", "hidden")
RIGHT = {
    "the config's example": (("context", "tensor"), {"embed": ("fsdp", "context"), "kv_heads": ()}),
    "weights over rows and positions": (("fsdp", "context"), {"embed": ("fsdp", "context")}),
    "model dimension over copies of the rows": (("replica", "fsdp"), {"embed": ("replica",)}),
    "model dimension over tensor, then rows": (("fsdp", "tensor"), {"embed": ("tensor", "fsdp"), **TENSOR}),
    "fewer key-value heads": (("fsdp", "tensor"), {"kv_heads": ()}),
    "no rows on fsdp": (("fsdp", "tensor"), {"batch": (), "slots": (), "vocab": ("fsdp", "tensor"), "embed": ()}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_accepted_override_gives_the_numbers_of_one_device(name):
    axes, overrides = RIGHT[name]
    assert_of_one_device("dense", overrides, axes)


@pytest.mark.slow  # compilations
@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("model", ["tied", "moe"])
@pytest.mark.parametrize("name", RIGHT)
def test_an_accepted_override_gives_them_for_tied_embeddings_experts_and_adapters(name, model, lora):
    axes, overrides = RIGHT[name]
    assert_of_one_device(model, overrides, axes, lora)


WRONG = {
    "vocab=tensor+context,kv_heads=": ("vocab and length both fall on mesh axis 'context'", ("context", "tensor")),
    "vocab=fsdp,embed=": ("vocab and batch both fall on mesh axis 'fsdp'", ("fsdp",)),
    "hidden=fsdp,embed=": ("hidden and batch both fall on mesh axis 'fsdp'", ("fsdp",)),
    "heads=fsdp,kv_heads=,embed=": ("heads and batch both fall on mesh axis 'fsdp'", ("fsdp",)),
    "batch=replica+tensor": ("vocab and batch both fall on mesh axis 'tensor'", ("tensor",)),
    "length=tensor": ("vocab and length both fall on mesh axis 'tensor'", ("tensor",)),
    "length=fsdp,embed=": ("batch and length both fall on mesh axis 'fsdp'", ("fsdp",)),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_override_that_would_add_up_different_tokens_is_refused_by_name(text):
    message, axes = WRONG[text]
    mesh, rules = mesh_of(*axes), parallel.parse_rules(text)
    for enter in (lambda: parallel.activate(mesh, rules).__enter__(), lambda: parallel.shardings((), {}, mesh, rules)):
        with pytest.raises(ValueError, match=message):
            enter()
    parallel.rules.check(parallel.parse_rules(text), mesh_of().shape)  # no mesh axis has a second device


def is_wrong(name, overrides, axes, monkeypatch):
    """Whether the rules, unchecked, give other numbers than one device, or stop the trace."""
    with monkeypatch.context() as patch:
        patch.setattr("rpg_jax.parallel.rules.check", lambda rules, sizes: None)
        try:
            return max(distance(on_mesh(name, overrides, axes), of_one_device(name))) > 0.1
        except ValueError as error:
            assert "mesh axis" in str(error), error
            return True


@pytest.mark.parametrize("text", [text for text in WRONG if text.startswith(("vocab", "hidden"))])
def test_a_refused_override_would_give_wrong_numbers(text, monkeypatch):
    rules, axes = parallel.parse_rules(text), WRONG[text][1]
    assert is_wrong("dense", {k: v for k, v in rules.items() if v != parallel.RULES[k]}, axes, monkeypatch)


def test_a_vocabulary_over_the_slots_of_a_decode_step_would_too(monkeypatch):
    mesh, rules = mesh_of("fsdp"), parallel.parse_rules("vocab=fsdp,embed=,batch=")
    with pytest.raises(ValueError, match="vocab and slots both fall on mesh axis 'fsdp'"):
        parallel.shardings((), {}, mesh, rules)
    monkeypatch.setattr("rpg_jax.parallel.rules.check", lambda rules, sizes: None)
    table, tokens = jnp.arange(64.0).reshape(16, 4), jnp.arange(3, 11)[:, None]
    with parallel.activate(mesh, rules):
        got = jax.jit(lambda *x: lookup(*x, ("slots", None), jnp.float32))(table, tokens)
    assert not np.array_equal(got, table[tokens])


def test_key_value_heads_that_are_not_where_their_queries_are_are_refused():
    """XLA's attention would move them. The TPU's kernel reads those of its own device: tests/models/test_ragged.py."""
    mesh = mesh_of("tensor", "context")
    for text in ("heads=", "heads=tensor+context,length="):
        with pytest.raises(ValueError, match="kv_heads fall on tensor and heads on"):
            parallel.shardings((), {}, mesh, parallel.parse_rules(text))


def choices(axes):
    """Each logical axis on no mesh axis, on each, and on both in both orders; alone where the table stands against it.

    A rule of heads is one of key-value heads as well. Rules that are the same on this mesh come once.
    """
    mesh = mesh_of(*axes)
    found = {}
    for name, where in itertools.product((*PARAMETERS, "batch", "length"), ((), *zip(axes), axes, axes[::-1])):
        one = {name: where} | ({"kv_heads": where} if name == "heads" else {})
        for overrides in (one, unset(*PARAMETERS) | one):
            rules = parallel.override(overrides)
            wide = tuple((name, tuple(axis for axis in on if mesh.shape[axis] > 1)) for name, on in rules.items())
            try:
                parallel.shardings(models.logical_axes(DENSE), models.abstract(DENSE)[1], mesh, rules)
            except ValueError as error:
                found.setdefault(wide, (overrides, str(error)))
            else:
                found.setdefault(wide, (overrides, None))
                break
    return found.values()


@pytest.mark.soak  # hundreds of compilations
@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("fsdp", "context")], ids="+".join)
def test_every_override_is_right_or_refused(axes, monkeypatch):
    """Refused rules are wrong, except where other programs than these are: of decode slots, of a TPU's kernel."""
    accepted = refused = 0
    for overrides, error in choices(axes):
        if error is None:
            assert_of_one_device("dense", overrides, axes)
            accepted += 1
        elif error.startswith("sharding: ") and "slots" not in error and "kv_heads fall" not in error:
            assert is_wrong("dense", overrides, axes, monkeypatch), (overrides, error)
            refused += 1
    assert accepted > 20 and refused > 5


def test_a_jitted_function_is_traced_anew_under_other_rules():
    traced = []

    @jax.jit
    def shards(x):
        traced.append(models.logical.shards("embed"))
        return x * traced[-1]

    mesh, rules = mesh_of("fsdp", "replica"), parallel.RULES
    for own in (rules, parallel.override({"embed": ()}), rules, parallel.override({"embed": ("fsdp", "replica")})):
        with parallel.activate(mesh, own):
            assert int(shards(1)) == parallel.shards("embed", mesh.shape, own)
    assert traced == [2, 1, 4]  # the first rules come twice


def test_good_rules_after_bad_ones_give_the_good_numbers(monkeypatch):
    """One jitted program, whose first trace adds up different tokens."""
    mesh = mesh_of("fsdp")
    table, tokens = jnp.arange(64.0).reshape(16, 4), jnp.arange(3, 11)[:, None]
    looked_up = jax.jit(lambda *x: lookup(*x, ("batch", None), jnp.float32))
    with monkeypatch.context() as patch:
        patch.setattr("rpg_jax.parallel.rules.check", lambda rules, sizes: None)
        with parallel.activate(mesh, parallel.parse_rules("vocab=fsdp,embed=")):
            assert not np.array_equal(looked_up(table, tokens), table[tokens])
    with parallel.activate(mesh):
        np.testing.assert_array_equal(looked_up(table, tokens), table[tokens])
