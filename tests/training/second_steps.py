"""The steps of a run a second time, in NumPy and float64.

`Second` reads what a run wrote (its resolved config) and handed out (the records of its steps: groups, metrics, weights
after the step). It knows nothing of packing, micro-batches, devices, programs or passes. A completion is a row. The
policy is a plain decoder of `second_models`. The losses are those of `tests.losses.second_losses`,
with gradients by complex steps. JAX differentiates the plain decoder alone, in float64; the identity of
`test_second_steps` checks this derivative without JAX's. All else is NumPy. The second computation takes every step
from the weights that the run had at the beginning of the step, with optimizer slots of its own.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass

import numpy as np

from tests.losses import second_losses
from tests.training.second_advantages import advantages, gae, kl_baseline, returns_to_go, turn_advantages, turns_of
from tests.training.second_models import Model
from tests.training.second_optimizers import Optimizer, learning_rate

# Weights are {path: f64[...]}, layers stacked.


def judged(group):
    return np.array([kind is None for kind in group.failed] or [True] * len(group.completions))


@dataclass
class Batch:
    """The P groups of a step, a completion a row. Rows beyond P·G are empty: all batches of a run have one shape.

    Attributes:
      tokens: i32[N, L], prompt and completion.
      starts, lengths: i64[N], of the completion in `tokens`.
      sampler, versions: [N, T], log π_s of the completion's tokens, and the updates of the weights that drew them.
      exists, sampled: bool[N, T], whether the completion has the token, and whether the policy wrote it.
      counted: bool[P, G], the completions with a verdict, unless a group has a single one.
      experts: i64[N, L, layers, k], those that the sampler chose for `tokens`; None if they were not kept.
    """

    groups: list
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sampler: np.ndarray
    versions: np.ndarray
    exists: np.ndarray
    sampled: np.ndarray
    counted: np.ndarray
    experts: np.ndarray | None

    @classmethod
    def of(cls, groups, rows, most_prompt, most):
        every = [(g, c) for g in groups for c in g.completions]
        assert len(every) <= rows
        tokens, experts = np.zeros((rows, most_prompt + most), np.int32), None
        sampler, versions, exists = np.zeros((rows, most)), np.full((rows, most), -1), np.zeros((rows, most), bool)
        starts, lengths, sampled = np.ones(rows, int), np.zeros(rows, int), exists.copy()
        if every[0][1].experts is not None:
            experts = np.zeros((*tokens.shape, *every[0][1].experts.shape[1:]), int)
        for i, (group, completion) in enumerate(every):
            p, n = len(group.prompt), len(completion.tokens)
            tokens[i, :p], tokens[i, p : p + n] = group.prompt, completion.tokens
            sampler[i, :n], versions[i, :n], exists[i, :n] = completion.logprobs, completion.token_versions, True
            starts[i], lengths[i], sampled[i, :n] = p, n, completion.sampled
            if experts is not None:
                experts[i, : p + n] = completion.experts
        counted = np.stack([judged(g) & (judged(g).sum() > 1) for g in groups])
        return cls(list(groups), tokens, starts, lengths, sampler, versions, exists, sampled, counted, experts)

    @property
    def shape(self):
        return len(self.groups), len(self.groups[0].completions)

    @property
    def is_read(self):
        """bool[N, L], the tokens before the last one of a completion."""
        return np.arange(self.tokens.shape[1]) < (self.starts + self.lengths - 1)[:, None]

    def by_completion(self, values):
        """[P, G] of numbers of rows [N]."""
        return values[: np.prod(self.shape)].reshape(self.shape)

    def by_token(self, values):
        """[N, T] of numbers of completions [P, G]."""
        rows = np.zeros(len(self.tokens), values.dtype)
        rows[: values.size] = values.ravel()
        return np.broadcast_to(rows[:, None], self.exists.shape)

    def of_counted(self, values):
        """[N, T] of numbers, or arrays [n], of the completions of each group that count."""
        found, rows = np.zeros(self.exists.shape), np.flatnonzero(self.counted)
        for row, own in zip(rows, [x for of_group in values for x in of_group], strict=True):
            found[row, : self.lengths[row]] = own
        return found

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
    are the weights {path: f64} before the run, `model` and `critic` the decoders, and `teacher` (its decoder, weights).

    After `step`, `found` has what the step should be: `weights`, `updates` (the metrics of each), `metrics`, `columns`
    [N, T], and the `batch`. `is_ambiguous` says that a token is so near to the bound of a clip, of a correction or of a
    choice of experts that rounding to f32 decides. `rounding` is how far each update's loss moves with its log-probs,
    by 4e-5 nats. A step that skips an update counts it in `taken`, not in `updates`.
    """

    def __init__(self, config, start, model=None, critic=None, teacher=None):
        self.config, self.start = config, start
        self.model, self.critic, self.teacher = model or Model(config["rollout"]["temperature"]), critic, teacher
        self.optimizer, (self.loss, self.hyperparameters) = Optimizer(config["optimizer"], start), loss_of(config)
        self.by_version, self.updates, self.taken, self.number = {0: start}, 0, 0, 0
        self.reference, self.reference_update = start, 0
        self.kl_average, self.kl_count, self.pending = 0.0, 0, []
        if critic is not None:
            head = {"/value/weight": 0 * start["/final_norm"], "/value/bias": np.zeros(())}
            self.critic_start = {path: x for path, x in start.items() if path != "/lm_head"} | head
            self.critic_optimizer = Optimizer(config["optimizer"], self.critic_start)

    def routed(self, weights, batch):
        """(the distributions [N, T, V], the experts [N, T, layers, k]) of the policy."""
        found, experts = self.model.outputs(weights, batch, batch.experts)
        where = np.minimum(batch.starts[:, None] - 1 + np.arange(batch.exists.shape[1]), batch.tokens.shape[1] - 1)
        return batch.taken(found), None if experts is None else experts[np.arange(len(where))[:, None], where]

    def distributions(self, weights, batch):
        return self.routed(weights, batch)[0]

    def logprobs(self, weights, batch):
        return batch.picked(self.distributions(weights, batch))

    def of_reference(self, batch):
        """The reference's distributions. One that is another policy than the present one chooses its own experts."""
        model, weights = self.teacher or (self.model, self.reference)
        own = batch.experts if self.teacher is None and self.reference_update == self.taken else None
        return batch.taken(model.outputs(weights, batch, own)[0])

    def trained_groups(self, generated):
        """The groups that the step trains. With dynamic sampling, other informative groups wait for the next step."""
        dynamic, most = self.config["dynamic_sampling"], self.config["rollout"]["prompts_per_step"]
        if not dynamic["enabled"]:
            return [g for g in generated if judged(g).sum() > 1]
        informative = [g for g in generated if judged(g).sum() > 1 and np.ptp(g.unshaped[judged(g)])]
        kept = [*self.pending, *informative]
        self.pending = kept[most : 2 * most] if dynamic["surplus"] == "carry" else []
        return kept[:most]

    @np.errstate(all="ignore")  # of updates that are skipped
    def step(self, generated):
        """Computes the step after the last one, of the groups that the run generated for it."""
        c, r = self.config, self.config["rollout"]
        self.number += 1
        groups = self.trained_groups(generated)
        most = r["prompts_per_step"] * r["group_size"], c["task"]["max_prompt_tokens"], r["max_tokens"]
        batch = Batch.of(groups, *most)
        mask = batch.sampled & batch.by_token(batch.counted)
        if c["rewards"]["overlong_masking"]:
            ended = [[x.finish_reason == "stop" for x in g.completions] for g in groups]
            mask = mask & batch.by_token(np.array(ended))
        deciding = [model for model in (self.model, self.critic) if model is not None]
        for model in deciding:
            model.margin = np.inf
        policy, experts = self.routed(self.start, batch)
        of_reference = None if c["reference"]["rule"] == "behaviour" else self.of_reference(batch)
        self.found = {"updates": [], "rounding": [], "is_ambiguous": False, "batch": batch}
        columns = self.found["columns"] = self.columns(batch, mask, batch.picked(policy), of_reference)
        self.found["metrics"] = metrics = {"entropy": mean(-(np.exp(policy) * policy).sum(-1)[mask])}
        if experts is not None:
            metrics |= load_of(experts[mask], self.model.whole(self.start)["/layers/mlp/router"].shape[-1])
        if not c["dynamic_sampling"]["enabled"]:
            metrics["reward"] = np.mean([g.rewards[judged(g)].mean() for g in generated if judged(g).any()])
        if lags(c):
            ages = self.updates - batch.versions[batch.sampled]
            metrics |= {"staleness_updates": ages.mean(), "staleness_updates_max": ages.max()}
        minibatches = min(c["train"]["updates_per_step"], len(groups))
        passes = [*range(minibatches)] * c["train"]["epochs"]
        self.theta, sums, moving = self.start, np.zeros(2), self.last_move(len(passes))
        self.phi = None if self.critic is None else self.critic_start
        for u in passes:
            own = mask & batch.of_rows(range(u, len(groups), minibatches))
            sums += self.update(batch, own, columns, of_reference)
            if self.taken == moving:
                self.move(self.theta)
        self.found["is_ambiguous"] |= min(model.margin for model in deciding) < 3e-5
        if c["reference"]["rule"] == "kl":
            self.watch(self.theta, [update["kl"] for update in self.found["updates"]])
        self.found["weights"], self.found["critic"] = self.theta, self.phi
        metrics |= {"loss": sums[0] / max(sums[1], 1e-9), "updates": self.updates}
        metrics |= {"reference_update": self.reference_update, "reference_kl_average": self.kl_average}
        metrics["skipped_updates"] = self.taken - self.updates

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
        columns = {"behaviour_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": batch.sampler}
        columns |= {"sampled_by": sampled_by, "kl_baseline": np.zeros(mask.shape)}
        counted = [np.flatnonzero(own) for own in batch.counted]
        rewards = [g.rewards[own].astype(float) for g, own in zip(batch.groups, counted, strict=True)]
        to_go = [
            [returns_to_go(g.completions[i], r, c["environment_weight"]) for i, r in zip(own, of_group, strict=True)]
            for g, own, of_group in zip(batch.groups, counted, rewards, strict=True)
        ]
        turns = [[turns_of(g.completions[i]) for i in own] for g, own in zip(batch.groups, counted, strict=True)]
        if self.critic is not None:
            if loss["credit"] == "completion":
                to_go = [[own[:1] for own in of_group] for of_group in to_go]
                turns = [[0 * own for own in of_group] for of_group in turns]
            return columns | self.learned(batch, mask, to_go, turns)
        if loss["credit"] == "turn":
            of_turns = [turn_advantages(loss["advantage"], of_group) for of_group in to_go]
            pairs = [zip(*both, strict=True) for both in zip(of_turns, turns, strict=True)]
            advantage = batch.of_counted([[a[t] for a, t in of_group] for of_group in pairs])
        else:
            lengths = [x[own] for x, own in zip(batch.by_completion(mask.sum(1)), counted, strict=True)]
            parts = [g.parts[own].astype(float) for g, own in zip(batch.groups, counted, strict=True)]
            own = advantages(loss["advantage"], rewards, lengths, parts, c["part_weights"])
            advantage = batch.of_counted(own)
        if self.hyperparameters.get("level") == "sequence":
            sums = batch.by_completion(np.where(batch.sampled, old - ref, 0).sum(1))
            kl = self.hyperparameters["divergence"], self.hyperparameters["kl_coef"]
            own = [kl_baseline(x[of_group], *kl) for x, of_group in zip(sums, counted, strict=True)]
            columns["kl_baseline"] = batch.of_counted(own)
        return columns | {"advantages": advantage + columns["kl_baseline"]}

    def learned(self, batch, mask, to_go, turns):
        """The columns of a critic: a turn is paid at its last token that the policy wrote."""
        paid = np.zeros(mask.shape)
        rows = np.flatnonzero(batch.counted)
        of_rows = [(*both,) for pair in zip(to_go, turns, strict=True) for both in zip(*pair, strict=True)]
        for row, (returns, numbers) in zip(rows, of_rows, strict=True):
            for turn, reward in enumerate(returns - np.append(returns[1:], 0.0)):
                written = batch.sampled[row, : len(numbers)] & (numbers == turn)
                paid[row, np.flatnonzero(written)[-1]] = reward
        values, c = self.values(self.critic_start, batch), self.config["critic"]
        advantage, returns = gae(paid, values, mask, c["gamma"], c["gae_lambda"])
        return {"advantages": advantage, "returns": returns, "values": values}

    def values(self, weights, batch):
        return batch.taken(self.critic.outputs(weights, batch)[0][..., None])[..., 0]

    def update(self, batch, mask, columns, of_reference):
        """Updates the weights on the tokens of `mask`. Returns the sum and the weight of the loss."""
        c, loss = self.config, self.config["loss"]
        policy = self.distributions(self.theta, batch)
        now, p, kls, of_kls = batch.picked(policy), np.exp(policy), None, []
        if self.hyperparameters.get("estimator") == "exact":
            q, log_r = np.exp(of_reference), policy - of_reference
            kls, of_kls = ((p * log_r).sum(-1), -(q * log_r).sum(-1)), [p * (log_r + 1), -q]
        names = "aggregate", "constant_length", "sampler_correction", "sampler_low", "sampler_high"
        given = {name: loss[name] for name in names} | self.hyperparameters | {"mask": mask, "prefix_kl": kls}
        read = "advantages", "behaviour_logprobs", "ref_logprobs", "sampler_logprobs"
        given |= {name: columns[name] for name in read}

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
        means = loss["aggregate"] == "sequence_mean_token_mean"
        shares = np.where(mask, 1 / second_losses.Rows(mask).length() if means else 1.0, 0)
        if bonus := loss["entropy_coef"]:
            total += (bonus * shares * (p * policy).sum(-1)).sum()
            of_tokens += (bonus * shares)[..., None] * p * (policy + 1)
        gradient = self.model.gradient(self.theta, batch, batch.put(of_tokens), batch.experts)
        gradient = {path: g / weight for path, g in gradient.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        metrics = {"loss": total / weight, "grad_norm": norm} | token_metrics(now[mask], columns, mask)
        if kls is not None:
            metrics["kl_exact"] = mean(kls[0][mask])
        elif self.hyperparameters.get("kl_coef"):
            of_rewards = columns["advantages"] - columns["kl_baseline"]
            of_kl = gradients - policy_loss(now, advantages=of_rewards, kl_coef=0.0)[2]
            metrics["kl_gradient_share"] = np.linalg.norm(of_kl) / max(np.linalg.norm(gradients), 1e-30)
        per_step = c["train"]["updates_per_step"] * c["train"]["epochs"]
        when = self.updates, per_step, c["train"]["steps"]
        is_finite = np.isfinite(total) and np.isfinite(norm)
        if self.critic is not None:
            of_critic = self.critic_gradient(batch, mask, columns, shares, weight, metrics)
            if is_finite:
                rate = learning_rate(c["optimizer"] | {"learning_rate": c["critic"]["learning_rate"]}, *when)
                self.phi = self.critic_optimizer.moved(self.phi, of_critic, rate)
        self.found["updates"].append(metrics | {"nonfinite_updates": float(not is_finite)})
        self.found["of_tokens"] = of_tokens / weight
        self.taken += 1
        if is_finite:
            rate = learning_rate(c["optimizer"], *when)
            self.theta = self.optimizer.moved(self.theta, self.shrunk(gradient, norm), rate)
            self.updates += 1
        rate = learning_rate(c["optimizer"], max(self.updates - 1, 0), *when[1:])
        self.found["learning_rate"] = rate
        return total, weight

    def critic_gradient(self, batch, mask, columns, shares, weight, metrics):
        """{path: f64}, after its clip. Adds the critic's metrics."""
        values, old, returns = self.values(self.phi, batch), columns["values"], columns["returns"]
        plain, near = (values - returns) ** 2, (old + np.clip(values - old, -0.2, 0.2) - returns) ** 2
        is_clipped = mask & (near > plain)
        of_values = shares * np.where(is_clipped, 0.0, values - returns) / 2
        self.found["is_ambiguous"] |= (np.abs(np.abs(values - old)[mask] - 0.2) < 2e-5).any()
        gradient = self.critic.gradient(self.phi, batch, batch.put(of_values[..., None])[..., 0])
        gradient = {path: g / weight for path, g in gradient.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        error = returns - old
        means = {"value": old, "return": returns, "return_squared": returns**2, "value_clip_fraction": 1.0 * is_clipped}
        means |= {"value_error": error, "value_error_squared": error**2}
        metrics |= {name: mean(x[mask]) for name, x in means.items()}
        metrics |= {"value_loss": (shares * np.maximum(plain, near)).sum() / 2 / weight, "critic_grad_norm": norm}
        return self.shrunk(gradient, norm)

    def shrunk(self, gradient, norm):
        share = min(1.0, self.config["optimizer"]["max_grad_norm"] / max(norm, 1e-30))
        return {path: g * share for path, g in gradient.items()}

    def last_move(self, updates):
        """The number of the update of this step after which a reference of rule `every` moves."""
        if self.config["reference"]["rule"] != "every":
            return None
        number, unit = self.config["reference"]["every"].split()
        if unit.startswith("step"):
            return self.taken + updates if self.number % int(number) == 0 else None
        return (self.taken + updates) // int(number) * int(number)

    def watch(self, theta, kls):
        """Moves a reference of rule `kl` after a step whose updates have these mean KLs of a token."""
        passed = False
        for kl in kls:
            self.kl_average, self.kl_count = 0.9 * self.kl_average + 0.1 * kl, self.kl_count + 1
            passed |= self.kl_average / (1 - 0.9**self.kl_count) > self.config["reference"]["kl_threshold"]
        if passed:
            self.move(theta)

    def move(self, theta):
        self.reference, self.reference_update, self.kl_average, self.kl_count = theta, self.taken, 0.0, 0

    def after(self, weights, critic=None):
        """Goes on from `weights`, those of the run after the step."""
        self.start = self.by_version[self.updates] = weights
        self.critic_start = critic
        if self.reference_update == self.taken:
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


def load_of(experts, count):
    """The metrics of the load of `count` experts, of those of the tokens [n, layers, k]."""
    load = np.stack([np.bincount(experts[:, i].ravel(), minlength=count) for i in range(experts.shape[1])])
    relative = load / load.mean(1, keepdims=True)
    above = relative.max(1) - 1
    found = {"max_violation": above.mean(), "max_violation_worst": above.max(), "cv": relative.std(1).mean()}
    return {f"expert_load/{name}": value for name, value in found.items()}


def loss_of(config):
    """(name, hyperparameters) of the loss of a resolved config."""
    functions = [own for own, _ in second_losses.LOSSES.values()]
    functions += [second_losses.rpg_tokens, second_losses.rpg_completions, second_losses.bounds_of]
    names = {name for function in functions for name in inspect.signature(function).parameters}
    own = {name: value for name, value in config["loss"].items() if name in names and value is not None}
    return config["loss"]["name"], own | json.loads(config["loss"]["arguments"] or "{}")
