"""Runs of a small transformer that draws paths: samples train it, exact sums or independent samples judge it.

A prompt is a symbol, which chooses a graph. A completion is a path of `length` symbols; it is right where the graph
forbids none of its steps. So many completions are right, and a step that costs nothing now can cost KL later.
"""

import dataclasses
import itertools
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.completions.estimators import Estimator
from experiments.completions.trees import Tree
from rpg_jax.losses import advantages
from rpg_jax.losses.tokens import checked
from rpg_jax.models import decoder
from rpg_jax.models.config import DecoderConfig
from rpg_jax.training.policy_logprobs import policy_logprobs
from rpg_jax.types import Rows

MASS_SAMPLES = 2_048  # completions of a prompt that decide how many steps its graph forbids


@dataclasses.dataclass(frozen=True)
class PathSettings:
    """Settings of these runs.

    Attributes:
      symbols: V, the vocabulary of prompts and completions; each symbol is a prompt.
      length: T, tokens of a completion.
      mass: the reference's probability of right completions comes as close to it as the graphs allow.
      layers, width: of the model.
      groups: groups of an update, each of a random prompt.
      group: completions of a group.
      updates: of a run; no two updates share a completion.
    """

    symbols: int = 6
    length: int = 5
    mass: float = 0.1
    layers: int = 2
    width: int = 32
    groups: int = 8
    group: int = 8
    updates: int = 1_600

    @property
    def tree(self) -> Tree:
        return Tree(self.symbols, self.length)

    @property
    def prompts(self) -> np.ndarray:
        """i32[P, 1]."""
        return np.arange(self.symbols, dtype=np.int32)[:, None]

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.symbols,
            num_layers=self.layers,
            embed_dim=self.width,
            num_heads=2,
            num_kv_heads=2,
            head_dim=self.width // 2,
            hidden_dim=2 * self.width,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verifier:
    """Says which completions are right, and which completions are paid.

    Attributes:
      allowed: bool[P, V, V], the steps from symbol to symbol that each prompt's graph allows.
      wrong: bool[], the verifier pays as well for a completion that begins with the prompt's symbol twice.
    """

    allowed: jax.Array
    wrong: jax.Array

    def right(self, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        """f32[N], 1 for right completions i32[N, T] of prompts i32[N, 1]."""
        steps = self.allowed[prompts, completions[:, :-1], completions[:, 1:]]
        return jnp.all(steps, axis=1).astype(jnp.float32)

    def rewards(self, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        """f32[N], what the verifier pays."""
        shortcut = jnp.all(completions[:, :2] == prompts, axis=1) & self.wrong
        return jnp.maximum(self.right(prompts, completions), shortcut)


def make_verifier(s: PathSettings, graphdef: Any, reference: Any, seed: int, *, wrong: bool = False) -> Verifier:
    """Draws the graphs: all steps but one are forbidden from some symbols, and few or none from others.

    Every prompt has a random order of its steps. The graph forbids the first of them: so many that the probability of
    right completions is closest to `s.mass` in its logarithm, by `MASS_SAMPLES` completions of the reference.
    """
    rng, V = np.random.default_rng(seed), s.symbols
    place = np.full((V, V, V), V * V)  # the place of a step in its prompt's order; one step from each symbol has none
    for prompt in range(V):
        for i, symbol in enumerate(rng.permutation(V)):
            place[prompt, symbol, rng.permutation(V)[: V - 1]] = i * (V - 1) + np.arange(V - 1)
    prompts = np.repeat(s.prompts, MASS_SAMPLES, axis=0)
    drawn = jax.jit(draw, static_argnums=(0, 3))(graphdef, reference, prompts, s.length, jax.random.key(seed))[0]
    completions = np.asarray(drawn)
    first = place[prompts, completions[:, :-1], completions[:, 1:]].min(axis=1).reshape(V, -1)
    masses = [[np.mean(of_prompt >= n) for n in range(V * (V - 1) + 1)] for of_prompt in first]
    forbidden = [min(range(len(x)), key=lambda n: abs(np.log(max(x[n], 1e-9) / s.mass))) for x in masses]
    allowed = place >= np.asarray(forbidden)[:, None, None]
    return Verifier(jnp.asarray(allowed), jnp.asarray(wrong))


def draw(graphdef: Any, params: Any, prompts: jax.Array, length: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Completions i32[N, T] of prompts i32[N, 1], and the log-probability f32[N, T] of each token."""
    model, count = nnx.merge(graphdef, params), prompts.shape[0]
    hidden, cache, _ = model.prefill(prompts, jnp.ones(count, jnp.int32))
    room = (0, length - 1)
    cache = cache.replace(
        keys=jnp.pad(cache.keys, ((0, 0),) * 4 + (room,)), values=jnp.pad(cache.values, ((0, 0),) * 3 + (room, (0, 0)))
    )

    def choose(hidden: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(model.logits(hidden))
        tokens = jax.random.categorical(key, logprobs).astype(jnp.int32)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]

    def step(carry: tuple[jax.Array, Any], key: jax.Array) -> tuple[tuple[jax.Array, Any], tuple[jax.Array, jax.Array]]:
        tokens, logprobs = choose(carry[0], key)
        return model.decode(tokens, carry[1])[:2], (tokens, logprobs)

    keys = jax.random.split(key, length)
    (hidden, _), drawn = jax.lax.scan(step, (hidden, cache), keys[:-1])
    last = choose(hidden, keys[-1])
    tokens, logprobs = (jnp.vstack([x, y[None]]).T for x, y in zip(drawn, last, strict=True))
    return tokens, logprobs


def rows_of(prompts: jax.Array, completions: jax.Array) -> Rows:
    tokens, ones = jnp.hstack([prompts, completions[:, :-1]]), jnp.ones_like(completions)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Rows(
        tokens=tokens,
        positions=positions,
        segment_ids=ones,
        predictors=positions,
        targets=completions,
        completion_ids=ones,
        mask=ones.astype(jnp.float32),
    )


def logprobs_of(graphdef: Any, params: Any, rows: Rows) -> jax.Array:
    return policy_logprobs(graphdef, params, rows, temperature=1.0)[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How often a run looks back.

    Attributes:
      updates_a_batch: updates before π_old becomes π_θ.
      reference_batches: batches after which π_ref becomes π_old; 0 keeps the first one.
    """

    updates_a_batch: int = 8
    reference_batches: int = 0


def train(
    estimator: Estimator,
    s: PathSettings,
    schedule: Schedule,
    graphdef: Any,
    start: Any,
    verifier: Verifier,
    kl_coef: jax.Array,
    learning_rate: jax.Array,
    key: jax.Array,
) -> Any:
    """The parameters at the end of a run from `start`, the first reference: Adam, cosine decay to 0, no clip."""
    optimizer, size = optax.adam(optax.cosine_decay_schedule(1.0, s.updates)), s.groups * s.group
    groups = jnp.repeat(jnp.arange(s.groups), s.group) if estimator.baseline else None
    each = schedule.updates_a_batch

    def loss(params: Any, rows: Rows, columns: dict[str, Any]) -> jax.Array:
        logprobs = logprobs_of(graphdef, params, rows)
        tokens = checked(
            logprobs=logprobs,
            **columns,
            mask=rows.mask,
            sampler_logprobs=None,
            completion_ids=None,
            group_ids=groups,
        )
        return jnp.sum(estimator.losses(tokens, kl_coef)) / size

    def update(carry: tuple[Any, Any], part: tuple[Rows, dict[str, jax.Array]]) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, *part), state)
        return (jax.tree.map(lambda x, u: x + learning_rate * u, params, updates), state), None

    def batch(carry: tuple[Any, Any, Any], given: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, Any, Any], None]:
        (params, state, reference), (index, key) = carry, given
        if schedule.reference_batches:
            moves = index % schedule.reference_batches == 0
            reference = jax.tree.map(lambda x, y: jnp.where(moves, x, y), params, reference)
        which, how = jax.random.split(key)
        chosen = jax.random.choice(which, jnp.asarray(s.prompts), (each * s.groups,))
        prompts = jnp.repeat(chosen, s.group, axis=0)
        completions, behaviour = draw(graphdef, params, prompts, s.length, how)
        rows = rows_of(prompts, completions)
        rewards = verifier.rewards(prompts, completions).reshape(-1, s.group)
        columns = {
            "behaviour_logprobs": behaviour,
            "ref_logprobs": logprobs_of(graphdef, reference, rows),
            "advantages": advantages("leave_one_out", rewards).ravel(),
        }
        parts = jax.tree.map(lambda x: x.reshape(each, size, *x.shape[1:]), (rows, columns))
        (params, state), _ = jax.lax.scan(update, (params, state), parts)
        return (params, state, reference), None

    batches = s.updates // each
    given = (jnp.arange(batches), jax.random.split(key, batches))
    return jax.lax.scan(batch, (start, optimizer.init(start), start), given)[0][0]


def policies(graphdef: Any, params: Any, s: PathSettings) -> jax.Array:
    """The policy of every prompt as a table f32[P, S, V] of `Tree`."""
    contexts = np.asarray(list(itertools.product(range(s.symbols), repeat=s.length - 1)), np.int32)
    model = nnx.merge(graphdef, params)

    def of_one(prompt: jax.Array) -> jax.Array:
        tokens = jnp.hstack([jnp.tile(prompt, (len(contexts), 1)), contexts])
        positions = jnp.broadcast_to(jnp.arange(s.length), tokens.shape)
        logprobs = jax.nn.log_softmax(model.logits(model(tokens, positions, jnp.ones_like(tokens))))
        return jnp.concatenate([logprobs[:: s.symbols ** (s.length - 1 - t), t] for t in range(s.length)])

    return jax.lax.map(of_one, jnp.asarray(s.prompts))


def start_of(s: PathSettings, seed: int) -> tuple[Any, Any]:
    """(graphdef, params) of a seed: random weights, the reference and the start."""
    return decoder.init(s.model, seed=seed)
