"""Decoders a second time, in float64: dense ones, mixtures of experts, those with adapters, and a critic's trunk.

Written from the equations of Qwen3 and docs/lora.md. JAX differentiates the decoder with respect to whole matrices, in
float64. The gradients of adapters are NumPy, from those of the matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

# Weights are {path: f64[...]}, layers stacked.


def flat(tree, path=""):
    """{path: f64} of a tree of weights."""
    if not isinstance(tree, Mapping):
        return {path: np.asarray(tree, np.float64)}
    return {k: v for name, part in tree.items() for k, v in flat(part, f"{path}/{name}").items()}


def normed(x, weight):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x, theta):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    turn, (a, b) = jnp.exp(1j * angles)[:, None], (x[..., :half], x[..., half:])
    turned = (a + 1j * b) * turn
    return jnp.concatenate([turned.real, turned.imag], -1)


def swiglu(x, gate, up, down):
    gated = x @ gate
    return (gated / (1 + jnp.exp(-gated)) * (x @ up)) @ down


def mixed(x, own, per_token, recorded):
    """(the mixture of x [N, L, D], the experts [N, L, k], how far from the next one the last of them is [N, L]).
    `recorded` [N, L, k] replaces the choice of experts; their weights are the router's."""
    p = jax.nn.softmax(x @ own["mlp/router"])
    experts = jnp.argsort(-p, stable=True)[..., :per_token] if recorded is None else recorded
    chosen = jax.nn.one_hot(experts, p.shape[-1]).sum(-2)
    weights = p * chosen / (p * chosen).sum(-1, keepdims=True)
    matrices = [[own[f"mlp/{name}"][e] for name in ("gate", "up", "down")] for e in range(p.shape[-1])]
    every = jnp.stack([swiglu(x, *of_expert) for of_expert in matrices])
    margin = jnp.where(chosen > 0, p, 2).min(-1) - jnp.where(chosen > 0, -1, p).max(-1)
    return jnp.einsum("enld,nle->nld", every, weights), experts, margin


def decoder(weights, tokens, theta=10_000.0, per_token=0, recorded=None):
    """Hidden states f64[N, L, D] of `tokens` i32[N, L]; the experts i64[N, L, layers, k] and the least margin [N, L] of
    a choice in a mixture, in which `per_token` experts serve a token."""
    x, causal, experts, margins = weights["/embed"][tokens], np.tri(tokens.shape[1], dtype=bool), [], []
    for i in range(len(weights["/layers/attention/q"])):
        own = {k.removeprefix("/layers/"): v[i] for k, v in weights.items() if k.startswith("/layers/")}
        h = normed(x, own["attention_norm"])
        q, k, v = (
            jnp.einsum("nld,dah->nlah", h, own[f"attention/{name}"]) + own.get(f"attention/{name}_bias", 0.0)
            for name in "qkv"
        )
        q, k = (normed(y, own[w]) if (w := f"attention/{name}_norm") in own else y for name, y in (("q", q), ("k", k)))
        q, k = rotated(q, theta), rotated(k, theta)
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
        scores = jnp.where(causal, jnp.einsum("nqah,nkah->naqk", q, k) / np.sqrt(q.shape[-1]), -jnp.inf)
        attended = jnp.einsum("naqk,nkah->nqah", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("nqah,ahd->nqd", attended, own["attention/o"])
        h = normed(x, own["mlp_norm"])
        if per_token:
            out, *chosen = mixed(h, own, per_token, None if recorded is None else recorded[:, :, i])
            experts.append(chosen[0])
            margins.append(chosen[1])
        else:
            out = swiglu(h, own["mlp/gate"], own["mlp/up"], own["mlp/down"])
        x = x + out
    x = normed(x, weights["/final_norm"])
    return (x, jnp.stack(experts, 2), jnp.stack(margins).min(0)) if per_token else (x, None, None)


def _logprobs(weights, tokens, temperature, theta, per_token, recorded):
    x, *routing = decoder(weights, tokens, theta, per_token, recorded)
    return jax.nn.log_softmax(x @ weights.get("/lm_head", weights["/embed"]).T / temperature), routing


def _values(weights, tokens, temperature, theta, per_token, recorded):
    x, *routing = decoder(weights, tokens, theta, per_token)
    return x @ weights["/value/weight"] + weights["/value/bias"], routing


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _found(what, weights, tokens, temperature, theta, per_token, recorded):
    return what(weights, tokens, temperature, theta, per_token, recorded)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _pulled_back(what, weights, tokens, temperature, theta, per_token, recorded, cotangent):
    def found(weights):
        return what(weights, tokens, temperature, theta, per_token, recorded)[0]

    return jax.vjp(found, weights)[1](cotangent)[0]


@dataclass
class Model:
    """A decoder, whose weights may be adapters {path/a: A, path/b: B} beside the frozen `base`: W + `scale` A B.
    `margin` is the least one of any choice of experts so far. A `critic` has values in the place of log-probs."""

    temperature: float
    theta: float = 10_000.0
    per_token: int = 0
    base: dict | None = None
    scale: float = 1.0
    critic: bool = False
    margin: float = field(default=np.inf, init=False)

    def whole(self, weights):
        if self.base is None:
            return weights
        found = dict(self.base)
        for path, a, b in self.pairs(weights):
            found[path] = found[path] + self.scale * (a @ b).reshape(found[path].shape)
        return found

    def pairs(self, adapters):
        """(path, A [S, n, r], B [S, r, m]) of each adapted matrix W: S stacked ones of n inputs and m outputs."""
        for path in sorted({path.rpartition("/")[0] for path in adapters}):
            a, b, dimensions = adapters[f"{path}/a"], adapters[f"{path}/b"], self.base[path].ndim
            count = int(np.prod(a.shape[: a.ndim + b.ndim - 2 - dimensions]))
            yield path, a.reshape(count, -1, a.shape[-1]), b.reshape(count, a.shape[-1], -1)

    def outputs(self, weights, batch, recorded=None):
        """([N, L, V] log-probs, or [N, L] values of a critic; the experts)."""
        with jax.enable_x64(True):
            what = _values if self.critic else _logprobs
            how = batch.tokens, self.temperature, self.theta, self.per_token, recorded
            found, (experts, margin) = _found(what, self.whole(weights), *how)
        if recorded is None and self.per_token:
            self.margin = min(self.margin, np.asarray(margin)[batch.is_read].min())
        return np.asarray(found), None if experts is None else np.asarray(experts)

    def gradient(self, weights, batch, cotangent, recorded=None):
        """{path: f64} of the weights, pulled back from that of the outputs."""
        with jax.enable_x64(True):
            what = _values if self.critic else _logprobs
            how = batch.tokens, self.temperature, self.theta, self.per_token, recorded
            found = _pulled_back(what, self.whole(weights), *how, cotangent)
        found = {path: np.asarray(g) for path, g in found.items()}
        if self.base is None:
            return found
        of_adapters = {}
        for path, a, b in self.pairs(weights):
            g = self.scale * found[path].reshape(len(a), a.shape[1], b.shape[2])
            of_adapters[f"{path}/a"] = (g @ b.swapaxes(1, 2)).reshape(weights[f"{path}/a"].shape)
            of_adapters[f"{path}/b"] = (a.swapaxes(1, 2) @ g).reshape(weights[f"{path}/b"].shape)
        return of_adapters
