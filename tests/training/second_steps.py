"""The steps of a run a second time, in NumPy and float64.

`Second` reads what a run wrote (its resolved config) and handed out (the records of its steps: groups, metrics, weights
after the step). It knows nothing of packing, micro-batches, devices, programs or passes. A completion is a row. The
policy is a plain decoder, written from the equations of Qwen3. The losses are those of `tests.losses.second_losses`,
with gradients by complex steps. JAX differentiates the plain decoder alone, in float64; the identity of
`test_second_steps` checks this derivative without JAX's. All else is NumPy. The second computation takes every step
from the weights that the run had at the beginning of the step, with optimizer slots of its own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tests.losses import second_losses

# Weights are {path: f64[...]}, layers stacked.


def flat(tree, path=""):
    """{path: f64} of a tree of weights."""
    if not isinstance(tree, Mapping):
        return {path: np.asarray(tree, np.float64)}
    return {k: v for name, part in tree.items() for k, v in flat(part, f"{path}/{name}").items()}


def normed(x, weight):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x, theta=10_000.0):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    turn, (a, b) = jnp.exp(1j * angles)[:, None], (x[..., :half], x[..., half:])
    turned = (a + 1j * b) * turn
    return jnp.concatenate([turned.real, turned.imag], -1)


def decoder(weights, tokens, temperature):
    """Log-probs f64[N, L, V] of the token after each of `tokens` i32[N, L]."""
    x, causal = weights["/embed"][tokens], np.tri(tokens.shape[1], dtype=bool)
    for i in range(len(weights["/layers/attention/q"])):
        own = {k.removeprefix("/layers/"): v[i] for k, v in weights.items() if k.startswith("/layers/")}
        h = normed(x, own["attention_norm"])
        q, k, v = (jnp.einsum("nld,dah->nlah", h, own[f"attention/{name}"]) for name in "qkv")
        q, k = (rotated(normed(y, own[f"attention/{name}_norm"])) for name, y in (("q", q), ("k", k)))
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
        scores = jnp.where(causal, jnp.einsum("nqah,nkah->naqk", q, k) / np.sqrt(q.shape[-1]), -jnp.inf)
        mixed = jnp.einsum("naqk,nkah->nqah", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("nqah,ahd->nqd", mixed, own["attention/o"])
        h = normed(x, own["mlp_norm"])
        gate = h @ own["mlp/gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ own["mlp/up"])) @ own["mlp/down"]
    return jax.nn.log_softmax(normed(x, weights["/final_norm"]) @ weights["/embed"].T / temperature)


@jax.jit
def _all_logprobs(weights, tokens, temperature):
    return decoder(weights, tokens, temperature)


@jax.jit
def _pulled_back(weights, tokens, temperature, cotangent):
    return jax.vjp(lambda w: decoder(w, tokens, temperature), weights)[1](cotangent)[0]


def advantages(name, rewards, lengths, parts=None, part_weights=None):
    """f64[P, G] of rewards [P, G]. `lengths` are numbers of trained tokens, `parts` [P, G, n] those of the rewards."""
    out = np.zeros(rewards.shape)

    def standardised(x):
        return (x - x.mean()) / (x.std(ddof=1) + 1e-6)

    if name.startswith("whitened"):
        x = rewards if name == "whitened_returns" else advantages("group_mean", rewards, lengths)
        center = (lengths * x).sum() / lengths.sum()
        return (x - center) / np.sqrt((lengths * (x - center) ** 2).sum() / (lengths.sum() - 1) + 1e-8)
    if name == "batch_mean":
        return rewards - rewards.mean()
    for p, r in enumerate(rewards):
        if name == "gdpo":
            out[p] = sum(weight * standardised(parts[p, :, i]) for i, weight in enumerate(part_weights))
        elif name == "leave_one_out":
            out[p] = [x - np.delete(r, i).mean() for i, x in enumerate(r)]
        elif name == "group_standardised":
            out[p] = standardised(r)
        elif name == "maxrl":
            out[p] = (r - r.mean()) / (r.mean() - r.min()) if np.ptp(r) else 0
        else:
            assert name == "group_mean"
            out[p] = r - r.mean()
    return standardised(out) if name == "gdpo" else out


def kl_baseline(log_ratios, divergence, kl_coef):
    """f64[P, G] of log π_old/π_ref of completions: β (a times the mean of the group's others, plus b - c)."""
    a, b, c = second_losses.COEFFICIENTS[divergence]
    others = (log_ratios.sum(1, keepdims=True) - log_ratios) / (log_ratios.shape[1] - 1)
    return kl_coef * (a * others + b - c)


def learning_rate(o, update, per_step, steps):
    """Of update number `update`, from 0."""
    number, unit = o["warmup"].split()
    warm = int(number) * (per_step if "step" in unit else 1)
    rate = o["learning_rate"]
    if update < warm:
        whole_steps = update // per_step * per_step
        rate *= whole_steps / warm if "step" in unit else (update + 1) / warm
    if o["schedule"] == "constant":
        return rate
    number, unit = (o["decay_until"] or f"{steps} steps").split()
    last = int(number) * (per_step if "step" in unit else 1)
    done = np.clip((update - warm) / (last - warm), 0, 1)
    left = 1 - done if o["schedule"] == "linear" else (1 + np.cos(np.pi * done)) / 2
    return rate * (o["final_rate"] + (1 - o["final_rate"]) * left)


class Optimizer:
    """SGD with momentum, or AdamW."""

    def __init__(self, fields):
        self.o, self.count, self.first, self.second = fields, 0, {}, {}

    @property
    def slots(self):
        return [self.first, self.second] if self.o["name"] == "adamw" else [self.first]

    def moved(self, weights, gradient, rate):
        o, new = self.o, {}
        self.count += 1
        for path, g in gradient.items():
            if o["name"] == "sgd":
                way = self.first[path] = g + o["b1"] * self.first.get(path, 0)
            else:
                self.first[path] = m = o["b1"] * self.first.get(path, 0) + (1 - o["b1"]) * g
                self.second[path] = v = o["b2"] * self.second.get(path, 0) + (1 - o["b2"]) * g**2
                way = m / (1 - o["b1"] ** self.count) / (np.sqrt(v / (1 - o["b2"] ** self.count)) + o["eps"])
            decays = o["decayed"] == "all" or "norm" not in path
            new[path] = weights[path] - rate * (way + o["weight_decay"] * decays * weights[path])
        return new


@dataclass
class Batch:
    """The P groups of a step, a completion a row. Rows beyond P·G are empty: all batches of a run have one shape.

    Attributes:
      tokens: i32[N, L], prompt and completion.
      starts, lengths: i64[N], of the completion in `tokens`.
      sampler, versions: [N, T], log π_s of the completion's tokens, and the updates of the weights that drew them.
      exists: bool[N, T], whether the completion has the token.
    """

    groups: list
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sampler: np.ndarray
    versions: np.ndarray
    exists: np.ndarray

    @classmethod
    def of(cls, groups, rows, most_prompt, most):
        every = [(g, c) for g in groups for c in g.completions]
        assert len(every) <= rows
        tokens = np.zeros((rows, most_prompt + most), np.int32)
        sampler, versions, exists = np.zeros((rows, most)), np.full((rows, most), -1), np.zeros((rows, most), bool)
        starts, lengths = np.ones(rows, int), np.zeros(rows, int)
        for i, (group, completion) in enumerate(every):
            p, n = len(group.prompt), len(completion.tokens)
            tokens[i, :p], tokens[i, p : p + n] = group.prompt, completion.tokens
            sampler[i, :n], versions[i, :n], exists[i, :n] = completion.logprobs, completion.token_versions, True
            starts[i], lengths[i] = p, n
        return cls(list(groups), tokens, starts, lengths, sampler, versions, exists)

    @property
    def shape(self):
        return len(self.groups), len(self.groups[0].completions)

    def by_completion(self, values):
        """[P, G] of numbers of rows [N]."""
        return values[: np.prod(self.shape)].reshape(self.shape)

    def by_token(self, values):
        """[N, T] of numbers of completions [P, G]."""
        rows = np.zeros(len(self.tokens), values.dtype)
        rows[: values.size] = values.ravel()
        return np.broadcast_to(rows[:, None], self.exists.shape)

    def of_rows(self, chosen):
        """bool[N, T], the tokens of the groups `chosen`."""
        return self.by_token(np.repeat(np.isin(np.arange(self.shape[0]), chosen)[:, None], self.shape[1], 1))

    def taken(self, logprobs):
        """[N, T, V] of [N, L, V]: the distributions of the completions' tokens."""
        where = self.starts[:, None] - 1 + np.arange(self.exists.shape[1])
        return np.take_along_axis(logprobs, np.minimum(where, logprobs.shape[1] - 1)[..., None], 1)

    def put(self, values):
        """[N, L, V] of [N, T, V], 0 elsewhere: undoes `taken`."""
        whole = np.zeros((*self.tokens.shape, values.shape[-1]))
        for i, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True)):
            whole[i, start - 1 : start - 1 + n] = values[i, :n]
        return whole

    @property
    def targets(self):
        where = self.starts[:, None] + np.arange(self.exists.shape[1])
        return np.take_along_axis(self.tokens, np.minimum(where, self.tokens.shape[1] - 1), 1)[..., None]

    def picked(self, distributions):
        """[N, T] of [N, T, V]: the numbers of the tokens that were drawn."""
        return np.take_along_axis(distributions, self.targets, -1)[..., 0]


class Second:
    """The second computation of a run. `config` is the resolved config that the run wrote, with `part_weights`. `start`
    are the weights {path: f64} before the run.

    After `step`, `found` has what the step should be: `weights`, `updates` (the metrics of each), `metrics`, `columns`
    [N, T], and the `batch`. `is_ambiguous` says that a token is so near to the bound of a clip or a correction that
    rounding to f32 decides. `rounding` is how far each update's loss moves with its log-probs, by 4e-5 nats.
    """

    def __init__(self, config, start):
        self.config, self.start = config, start
        self.optimizer, (self.loss, self.hyperparameters) = Optimizer(config["optimizer"]), loss_of(config)
        self.by_version, self.updates, self.number = {0: start}, 0, 0
        self.reference, self.reference_update = start, 0
        self.kl_average, self.kl_count, self.pending = 0.0, 0, []

    def distributions(self, weights, batch):
        with jax.enable_x64(True):
            found = _all_logprobs(weights, batch.tokens, self.config["rollout"]["temperature"])
        return batch.taken(np.asarray(found))

    def logprobs(self, weights, batch):
        return batch.picked(self.distributions(weights, batch))

    def gradient(self, weights, batch, of_distributions):
        """{path: f64}, pulled back from a gradient [N, T, V] in the log-probs of all tokens."""
        with jax.enable_x64(True):
            temperature = self.config["rollout"]["temperature"]
            found = _pulled_back(weights, batch.tokens, temperature, batch.put(of_distributions))
        return {path: np.asarray(g) for path, g in found.items()}

    def trained_groups(self, generated):
        """The groups that the step trains. With dynamic sampling, other informative groups wait for the next step."""
        dynamic, most = self.config["dynamic_sampling"], self.config["rollout"]["prompts_per_step"]
        if not dynamic["enabled"]:
            return list(generated)
        kept = [*self.pending, *(g for g in generated if np.ptp(g.unshaped))]
        self.pending = kept[most : 2 * most] if dynamic["surplus"] == "carry" else []
        return kept[:most]

    def step(self, generated):
        """Computes the step after the last one, of the groups that the run generated for it."""
        c, r = self.config, self.config["rollout"]
        self.number += 1
        groups = self.trained_groups(generated)
        most = r["prompts_per_step"] * r["group_size"], c["task"]["max_prompt_tokens"], r["max_tokens"]
        batch = Batch.of(groups, *most)
        mask = batch.exists
        if c["rewards"]["overlong_masking"]:
            ended = [[x.finish_reason != "length" for x in g.completions] for g in groups]
            mask = mask & batch.by_token(np.array(ended))
        policy = self.distributions(self.start, batch)
        of_reference = None
        if c["reference"]["rule"] != "behaviour":
            of_reference = self.distributions(self.reference, batch)
        self.found = {"updates": [], "rounding": [], "is_ambiguous": False, "batch": batch}
        columns = self.found["columns"] = self.columns(batch, mask, batch.picked(policy), of_reference)
        self.found["metrics"] = {"entropy": mean(-(np.exp(policy) * policy).sum(-1)[mask])}
        if not c["dynamic_sampling"]["enabled"]:
            self.found["metrics"]["reward"] = np.mean([g.rewards for g in generated])
        if lags(c):
            ages = self.updates - batch.versions[batch.exists]
            self.found["metrics"] |= {"staleness_updates": ages.mean(), "staleness_updates_max": ages.max()}
        minibatches = min(c["train"]["updates_per_step"], len(groups))
        passes = [*range(minibatches)] * c["train"]["epochs"]
        theta, sums, moving = self.start, np.zeros(2), self.last_move(len(passes))
        for u in passes:
            own = mask & batch.of_rows(range(u, len(groups), minibatches))
            theta, pair = self.update(theta, batch, own, columns, of_reference)
            sums += pair
            if self.updates == moving:
                self.move(theta)
        if c["reference"]["rule"] == "kl":
            self.watch(theta, [update["kl"] for update in self.found["updates"]])
        self.found["weights"] = theta
        moved = {"reference_update": self.reference_update, "reference_kl_average": self.kl_average}
        self.found["metrics"] |= {"loss": sums[0] / max(sums[1], 1e-9)} | moved

    def columns(self, batch, mask, present, of_reference):
        """{name: [N, T]} of what the updates of a step read, and `sampled_by`: log-probs of the weights that drew."""
        c, loss = self.config, self.config["loss"]
        sampled_by = np.zeros(mask.shape)
        for version in {*batch.versions[batch.exists]}:
            own = batch.versions == version
            sampled_by[own] = self.logprobs(self.by_version[version], batch)[own]
        carries = lags(c) and loss["sampler_correction"] in ("truncate", "mask", "sequence")
        stale = present if carries else batch.sampler if lags(c) else sampled_by
        old = np.where(batch.versions == self.updates, present, stale)
        ref = old if of_reference is None else batch.picked(of_reference)
        rewards, parts = (np.stack([getattr(g, name) for g in batch.groups]) for name in ("rewards", "parts"))
        of_parts = {"parts": parts.astype(float), "part_weights": c["part_weights"]}
        lengths = batch.by_completion(mask.sum(1))
        advantage = advantages(loss["advantage"], rewards.astype(float), lengths, **of_parts)
        baseline = np.zeros(batch.shape)
        if self.hyperparameters.get("level") == "sequence":
            sums = batch.by_completion(np.where(batch.exists, old - ref, 0).sum(1))
            baseline = kl_baseline(sums, self.hyperparameters["divergence"], self.hyperparameters["kl_coef"])
        columns = {"advantages": batch.by_token(advantage + baseline), "kl_baseline": batch.by_token(baseline)}
        columns |= {"behaviour_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": batch.sampler}
        return columns | {"sampled_by": sampled_by}

    def update(self, theta, batch, mask, columns, of_reference):
        """(the weights after an update on the tokens of `mask`, the sum and the weight of its loss)."""
        c, loss = self.config, self.config["loss"]
        policy = self.distributions(theta, batch)
        now, p, kls, of_kls = batch.picked(policy), np.exp(policy), None, []
        if self.hyperparameters.get("estimator") == "exact":
            q, log_r = np.exp(of_reference), policy - of_reference
            kls, of_kls = ((p * log_r).sum(-1), -(q * log_r).sum(-1)), [p * (log_r + 1), -q]
        names = "aggregate", "constant_length", "sampler_correction", "sampler_low", "sampler_high"
        given = {name: loss[name] for name in names} | self.hyperparameters | {"mask": mask, "prefix_kl": kls}
        given |= {name: columns[name] for name in columns if name not in ("kl_baseline", "sampled_by")}

        def policy_loss(now, **changed):
            return second_losses.policy_loss(self.loss, **given | {"logprobs": now} | changed)

        total, weight, gradients = policy_loss(now)
        weight = max(weight, 1e-9)
        near = [policy_loss(now + x, sampler_logprobs=columns["sampler_logprobs"] - x) for x in (2e-5, -2e-5)]
        self.found["rounding"].append(abs(near[0][0] - near[1][0]) / weight)
        self.found["is_ambiguous"] |= np.abs(near[0][2] - near[1][2]).max() > 0.01 * np.abs(gradients).max()
        of_tokens = np.zeros_like(policy)
        np.put_along_axis(of_tokens, batch.targets, gradients[0][..., None], -1)
        for g, own in zip(gradients[1:], of_kls, strict=True):
            of_tokens += g[..., None] * own
        if bonus := loss["entropy_coef"]:
            means = loss["aggregate"] == "sequence_mean_token_mean"
            shares = bonus * np.where(mask, 1 / second_losses.Rows(mask).length() if means else 1.0, 0)
            total += (shares * (p * policy).sum(-1)).sum()
            of_tokens += shares[..., None] * p * (policy + 1)
        gradient = {path: g / weight for path, g in self.gradient(theta, batch, of_tokens).items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        metrics = {"loss": total / weight, "grad_norm": norm} | token_metrics(now[mask], columns, mask)
        if kls is not None:
            metrics["kl_exact"] = mean(kls[0][mask])
        elif self.hyperparameters.get("kl_coef"):
            of_rewards = columns["advantages"] - columns["kl_baseline"]
            of_kl = gradients - policy_loss(now, advantages=of_rewards, kl_coef=0.0)[2]
            metrics["kl_gradient_share"] = np.linalg.norm(of_kl) / max(np.linalg.norm(gradients), 1e-30)
        self.found["updates"].append(metrics)
        shrunk = min(1.0, c["optimizer"]["max_grad_norm"] / max(norm, 1e-30))
        per_step = c["train"]["updates_per_step"] * c["train"]["epochs"]
        rate = learning_rate(c["optimizer"], self.updates, per_step, c["train"]["steps"])
        self.updates += 1
        self.found |= {"learning_rate": rate, "of_tokens": of_tokens / weight}
        return self.optimizer.moved(theta, {path: g * shrunk for path, g in gradient.items()}, rate), (total, weight)

    def last_move(self, updates):
        """The number of the update of this step after which a reference of rule `every` moves."""
        if self.config["reference"]["rule"] != "every":
            return None
        number, unit = self.config["reference"]["every"].split()
        if unit.startswith("step"):
            return self.updates + updates if self.number % int(number) == 0 else None
        return (self.updates + updates) // int(number) * int(number)

    def watch(self, theta, kls):
        """Moves a reference of rule `kl` after a step whose updates have these mean KLs of a token."""
        passed = False
        for kl in kls:
            self.kl_average, self.kl_count = 0.9 * self.kl_average + 0.1 * kl, self.kl_count + 1
            passed |= self.kl_average / (1 - 0.9**self.kl_count) > self.config["reference"]["kl_threshold"]
        if passed:
            self.move(theta)

    def move(self, theta):
        self.reference, self.reference_update, self.kl_average, self.kl_count = theta, self.updates, 0.0, 0

    def after(self, weights):
        """Goes on from `weights`, those of the run after the step."""
        self.start = self.by_version[self.updates] = weights
        if self.reference_update == self.updates:
            self.reference = weights


def lags(config):
    """Whether a step may train tokens of earlier weights, beside those of groups that are carried over."""
    return bool(config["rollout"]["max_staleness"] or config["rollout"]["partial_tokens"])


def mean(values):
    return values.sum() / max(len(values), 1)


def token_metrics(now, columns, mask):
    """The metrics of an update whose trained tokens have the log-probs `now` [n]."""
    old, ref, sampler = (columns[f"{name}_logprobs"][mask] for name in ("behaviour", "ref", "sampler"))
    log_w, log_r = now - old, now - ref
    w, rho, u = np.exp(log_w), np.exp(ref - old), np.exp(old - sampler)
    values = {
        "importance_ratio": w,
        "kl": w * log_r - w + rho,
        "kl_k1": log_r,
        "kl_k2": log_r**2 / 2,
        "kl_k3": np.exp(-log_r) - 1 + log_r,
        "behaviour_forward_kl_k1": -log_w,
        "behaviour_forward_kl_k3": w - 1 - log_w,
        "sampler_ratio": u,
        "sampler_ratio_squared": u**2,
    }
    return {name: mean(x) for name, x in values.items()} | {"log_ratio_max": np.abs(log_w).max(initial=0.0)}


def loss_of(config):
    """(name, hyperparameters) of the loss of a resolved config."""
    functions = [own for own, _ in second_losses.LOSSES.values()]
    functions += [second_losses.rpg_tokens, second_losses.rpg_completions, second_losses.bounds_of]
    names = {name for function in functions for name in inspect.signature(function).parameters}
    own = {name: value for name, value in config["loss"].items() if name in names and value is not None}
    return config["loss"]["name"], own | json.loads(config["loss"]["arguments"] or "{}")
