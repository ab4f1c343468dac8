"""All losses a second time, in NumPy and float64, with gradients by complex steps.

Written from the formulas in docs/ before the code of `rpg_jax.losses` was read; it shares no line with that code. A
loss here is a function of `Given` that returns one number a token. Its gradient needs no derivative by hand: the
log-probs get a tiny imaginary part, one token after the other, and what is no function of the policy stays real.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CAP = 20.0
"""Ratios are e^min(x, 20), and their derivative is their value."""
STEP = 1e-30
ROUNDING = 16 * np.finfo(np.float64).eps
"""A ratio so near to a bound is at the bound."""


def ratio(x):
    x = np.asarray(x)
    value = np.exp(np.minimum(x.real, CAP))
    return value + 1j * value * x.imag if np.iscomplexobj(x) else value


def smaller(a, b):
    """The minimum by the real parts. The gradient of equal numbers is their mean, as JAX has it."""
    a, b = np.broadcast_arrays(np.asarray(a, complex), np.asarray(b, complex))
    return np.where(a.real < b.real, a, np.where(a.real > b.real, b, (a + b) / 2))


def larger(a, b):
    return -smaller(-np.asarray(a, complex), -np.asarray(b, complex))


def bounded(x, low, high):
    """x in [low, high]; outside it the gradient is 0."""
    x = np.asarray(x, complex)
    return np.where(x.real < low, low + 0j, np.where(x.real > high, high + 0j, x))


def frozen(x):
    return x.real + 0j


class Rows:
    """The completions in rows [B, T]: the tokens of a row whose id is equal, without those that the mask leaves out."""

    def __init__(self, mask, ids=None):
        self.mask = np.asarray(mask) != 0
        ids = np.zeros(self.mask.shape, int) if ids is None else np.asarray(ids)
        key = np.arange(len(self.mask))[:, None] * 100_000 + ids
        found = [np.argwhere((key == one) & self.mask) for one in np.unique(key)]
        self.completions = [places for places in found if len(places)]

    def total(self, x):
        """The sum over a completion, at each of its tokens."""
        out = np.zeros_like(x)
        for places in self.completions:
            row, column = places.T
            out[..., row, column] = x[..., row, column].sum(-1)[..., None]
        return out

    def upto(self, x, own=True):
        """The sum over the tokens of a completion up to each token, with or without the token itself."""
        out = np.zeros_like(x)
        for places in self.completions:
            row, column = places.T
            part = x[..., row, column]
            out[..., row, column] = np.cumsum(part, -1) - (0 if own else part)
        return out

    def length(self):
        return np.maximum(self.total(self.mask.astype(float)), 1)


@dataclass
class Given:
    """The inputs of a loss. `lp` [K, B, T] is differentiated; `now` is its value. All others are constants [B, T]."""

    lp: np.ndarray
    now: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    rows: Rows
    prefix: list | None = None
    groups: np.ndarray | None = None

    def __post_init__(self):
        self.log_w, self.log_w_now, self.log_rho = self.lp - self.old, self.now - self.old, self.ref - self.old
        self.log_r, self.log_r_now = self.lp - self.ref, self.now - self.ref
        self.w, self.w_now = ratio(self.log_w), ratio(self.log_w_now)

    def factor(self, estimator):
        """What multiplies a frozen weight: its gradient is that of log π."""
        return np.exp(self.lp - self.now) if estimator == "differentiable" else self.lp


# ---- The divergences: K = w (a log r + b) - c ρ has the gradient of D.

COEFFICIENTS = {
    "fkl": (0, 0, 1),
    "ufkl": (0, 1, 1),
    "rkl": (1, 1, 0),
    "urkl": (1, 0, 0),
    "js": (0.5, 0.5, 0.5),
    "ujs": (0.5, 0.5, 0.5),
}


def divergence_of(name, log_w, log_rho):
    w, rho, log_r = ratio(log_w), ratio(log_rho), log_w - log_rho
    return {
        "fkl": -rho * log_r,
        "ufkl": -rho * log_r - rho + w,
        "rkl": w * log_r,
        "urkl": w * log_r - w + rho,
        "js": (w - rho) * log_r / 2,
        "ujs": (w - rho) * log_r / 2,
    }[name]


def weight_of(name, log_w, log_rho):
    a, b, c = COEFFICIENTS[name]
    return ratio(log_w) * (a * (log_w - log_rho) + b) - c * ratio(log_rho)


# ---- Clips.


def region(sign, w, low, high, dual):
    """(the clipped ratio, where it is a bound): above for advantages ≥ 0, below and dual for the others."""
    positive = sign >= 0
    above = positive & (w >= (1 + high) * (1 - ROUNDING))
    below = ~positive & (w <= (1 - low) * (1 + ROUNDING))
    far = ~positive & (w >= dual * (1 - ROUNDING)) if dual is not None else np.zeros_like(positive)
    return np.where(above, 1 + high, np.where(below, 1 - low, np.where(far, dual or 0.0, w))), above | below | far


def dual_clip(w, advantages, low, high, dual):
    """PPO's clip with the dual bound for negative advantages."""
    w = np.asarray(w, complex)
    loss = larger(-w * advantages, -bounded(w, 1 - low, 1 + high) * advantages)
    if dual is None or not np.isfinite(dual):
        return loss
    return np.where(advantages < 0, smaller(loss, -dual * advantages + 0j), loss)


def clipped(given, weight, advantages, kl, estimator, clip, low, high, dual):
    """-(C A - κ) x, where `clip` bounds C. `weight` C and `kl` κ are constants."""
    x, whole = given.factor(estimator), weight * advantages - kl
    if clip == "none":
        return -whole * x
    regularised = whole / weight
    at, is_bound = region(advantages if clip == "reward" else regularised, weight, low, high, dual)
    if clip == "truncate":
        return np.where(is_bound, -at * regularised, -whole) * x
    if clip == "dual":
        loss = -(at * advantages - kl) * x
        return np.where(is_bound, frozen(loss), loss)
    loss = -at * advantages * x
    return np.where(is_bound, frozen(loss), loss) + kl * x


# ---- The losses of other methods.


def ppo(given, clip_low=0.2, clip_high=0.2, clip_dual=10.0):
    return dual_clip(given.w, given.advantages, clip_low, clip_high, clip_dual)


def grpo(given, kl_coef=1e-3, kl_weighting="none", kl_clamp=None, **clip):
    loss = ppo(given, **clip)
    if kl_coef == 0:
        return loss
    if kl_weighting == "importance":
        return loss + kl_coef * divergence_of("urkl", given.log_w, given.log_rho)
    inverse = bounded(-given.log_r, -np.inf, 40.0)
    k3 = np.exp(inverse) - 1 - inverse
    return loss + kl_coef * (k3 if kl_clamp is None else bounded(k3, -kl_clamp, kl_clamp))


def reinforce_pp(given, clip_low=0.2, clip_high=0.28, clip_dual=10.0, kl_coef=1e-4):
    return ppo(given, clip_low, clip_high, clip_dual) + (kl_coef * given.log_r if kl_coef else 0)


def gspo(given, clip_low=3e-4, clip_high=4e-4):
    mean = ratio(given.rows.total(given.log_w) / given.rows.length())
    return dual_clip(mean, given.advantages, clip_low, clip_high, None)


def cispo(given, clip_low=None, clip_high=0.28):
    weight = np.minimum(given.w_now, 1 + clip_high)
    weight = weight if clip_low is None else np.maximum(weight, 1 - clip_low)
    return -weight * given.advantages * given.lp


def dppo(given, mask_divergence="tv", mask_threshold=0.15):
    p, q = np.exp(given.now), np.exp(given.old)
    if mask_divergence == "tv":
        distance = abs(p - q)
    else:
        others = (1 - q) * (np.log1p(-q) - np.log1p(-p))
        distance = q * (given.old - given.now) + np.where(q < 1, others, 0.0)
    further = np.where(given.advantages > 0, given.w_now > 1, (given.advantages < 0) & (given.w_now < 1))
    return np.where((distance > mask_threshold) & further, 0, -given.w * given.advantages)


def ctpo(given, width_low=0.025, width_high=0.05, width_dual=0.05):
    root = np.sqrt(given.rows.upto(given.rows.mask.astype(float)))
    prefix = ratio(given.rows.upto(given.log_w_now) + (given.lp - given.now))  # the gradient of its own token alone
    a = given.advantages
    loss = larger(-prefix * a, -bounded(prefix, np.exp(-width_low * root), np.exp(width_high * root)) * a)
    return np.where(a < 0, smaller(loss, -np.exp(width_dual * root) * a + 0j), loss)


def drpo(given, trust_region=0.15):
    penalty = abs(given.advantages) / (2 * trust_region) * np.exp(given.old) * (given.w - 1) ** 2
    return -given.w * given.advantages + penalty


def sapo(given, tau_positive=1.0, tau_negative=1.05):
    tau = np.where(given.advantages > 0, tau_positive, tau_negative)
    z = tau * (given.w - 1)
    tail = np.exp(-abs(z.real))
    gate = np.where(z.real >= 0, 1, tail) / (1 + tail)
    return -4 / tau * (gate + 1j * tail / (1 + tail) ** 2 * z.imag) * given.advantages


def gmpo(given, clip_low=None, clip_high=None):
    high = 0.4 if clip_high is None else np.log1p(clip_high)
    low, a = -0.4 if clip_low is None else np.log1p(-clip_low), given.advantages
    log_w = np.where((a > 0) & (given.log_w.real > high), high + 0j, given.log_w)
    log_w = np.where((a < 0) & (given.log_w.real < low), low + 0j, log_w)
    return -a * ratio(given.rows.total(log_w) / given.rows.length())


def opmd(given, kl_coef=0.1, penalty_level="completion"):
    log_r = given.log_r
    return -given.advantages * given.lp + kl_coef / 2 * log_r * (
        log_r if penalty_level == "token" else given.rows.total(log_r)
    )


# ---- RPG.


def bounds_of(clip_low=0.2, clip_high=0.28, clip_dual=10.0):
    return clip_low, clip_high, clip_dual


def rpg(given, form="paper", level="token", behaviour_mass=1.0, **hyperparameters):
    if form == "verl":
        return behaviour_mass * rpg_verl(given, **hyperparameters)
    if level == "token":
        return behaviour_mass * rpg_tokens(given, **hyperparameters)
    return behaviour_mass * rpg_completions(given, level=level, **hyperparameters)


def rpg_tokens(given, divergence="urkl", estimator="reinforce", clip="dual", kl_coef=1e-4, **clips):
    (a, _, c), bounds, advantages = COEFFICIENTS[divergence], bounds_of(**clips), given.advantages
    if estimator == "exact":  # the KL is a sum over the vocabulary, and the clip is the rewards'
        loss = clipped(given, given.w_now, advantages, 0.0, "exact", "reward" if clip == "dual" else clip, *bounds)
        return loss + kl_coef * (a * given.prefix[0] + c * given.prefix[1])
    kl = kl_coef * weight_of(divergence, given.log_w_now, given.log_rho)
    if clip == "none" and estimator == "differentiable":
        return -given.w * advantages + kl_coef * divergence_of(divergence, given.log_w, given.log_rho)
    if clip == "reward" and estimator == "differentiable":
        loss = clipped(given, given.w_now, advantages, 0.0, estimator, clip, *bounds)
        return loss + kl_coef * divergence_of(divergence, given.log_w, given.log_rho)
    if clip in ("none", "reward"):
        return clipped(given, given.w_now, advantages, kl, estimator, clip, *bounds)
    x, whole = given.factor(estimator), given.w_now * advantages - kl
    regularised = advantages - kl_coef * weight_of(divergence, np.zeros_like(given.now), -given.log_r_now)  # K / w
    at, is_bound = region(regularised, given.w_now, *bounds)
    if clip == "dual":
        return np.where(is_bound, frozen(-(at * advantages - kl) * x), -whole * x)
    if clip == "truncate":
        return np.where(is_bound, -at * regularised * x, -whole * x)
    through = -given.w * advantages + kl_coef * weight_of(divergence, given.log_w, given.log_rho)
    return np.where(is_bound, -(at * advantages - kl) + 0j, through)


def _baselines(given, divergence, kl_coef):
    """β (a mean of the others' log(π_old/π_ref) + b - c) at each token; the others of the group, or all if there are
    none."""
    a, b, c = COEFFICIENTS[divergence]
    sums = [(given.old - given.ref)[tuple(places.T)].sum() for places in given.rows.completions]
    groups = [given.groups[tuple(places[0])] for places in given.rows.completions]
    out = np.zeros_like(given.advantages)
    for k, places in enumerate(given.rows.completions):
        others = [i for i in range(len(sums)) if i != k]
        chosen = [i for i in others if groups[i] == groups[k]] or others
        out[tuple(places.T)] = kl_coef * (a * (np.mean([sums[i] for i in chosen]) if chosen else 0.0) + b - c)
    return out


def rpg_completions(
    given,
    divergence="urkl",
    estimator="reinforce",
    clip="dual",
    level="sequence",
    weight="token",
    weight_cap=2.0,
    kl_ratio="present",
    trace_decay=1.0,
    trace_cap=1.0,
    kl_coef=1e-4,
    **clips,
):
    (a, b, c), rows, advantages = COEFFICIENTS[divergence], given.rows, given.advantages
    bounds, ones = bounds_of(**clips), np.ones_like(given.now)
    whole, before = rows.total(given.log_w_now), ratio(rows.upto(given.log_w_now, own=False))
    rho, rho_before = ratio(rows.upto(given.log_rho)), ratio(rows.upto(given.log_rho, own=False))
    completion = np.exp(np.clip(whole, -CAP, CAP))
    of_weight = {
        "product": completion,
        "capped": np.minimum(completion, weight_cap),
        "token": np.exp(np.clip(given.log_w_now, -CAP, CAP)),
        "none": ones,
    }[weight]
    if level == "sequence":
        if given.groups is not None:
            advantages = advantages + _baselines(given, divergence, kl_coef)
        if estimator == "differentiable" and weight == "product" and kl_ratio == "present":
            live, length = rows.total(given.log_w), rows.length()
            kl = kl_coef * divergence_of(divergence, live, rows.total(given.log_rho))
            return (-ratio(live) * rows.total(advantages) / length + kl) / length
        log_r = rows.total(given.log_r_now if kl_ratio == "present" else given.old - given.ref)
        kl = of_weight * kl_coef * (a * log_r + b) - kl_coef * c * rho
        return clipped(given, of_weight, advantages, kl, estimator, clip, *bounds)
    prefix = {"product": before, "capped": np.minimum(before, weight_cap), "token": ones, "none": ones}[weight]
    own = a * (given.prefix[0][0].real * ones if estimator == "exact" else given.w_now * given.log_r_now)
    later = _later(rows, own, given.w_now, trace_decay, trace_cap)
    if estimator == "exact":
        kl = kl_coef * (a * prefix * given.prefix[0] + c * rho_before * given.prefix[1])
        return clipped(given, of_weight, advantages, kl_coef * prefix * later, estimator, clip, *bounds) + kl
    token = ones if weight == "none" else given.w_now
    reverse, forward = (0, b) if divergence == "ufkl" else (b, 0)
    of_token = token * (a * given.log_r_now + reverse) + later
    kl = kl_coef * (prefix * of_token + rho_before * token * forward - c * rho)
    return clipped(given, of_weight, advantages, kl, estimator, clip, *bounds)


def _later(rows, own, w, decay, cap):
    """The KL of later tokens, weighted by the ratios between: F_t = γ min(w_t, cap) (d_{t+1} + F_{t+1})."""
    out = np.zeros_like(own)
    for places in rows.completions:
        place = [tuple(one) for one in places]
        for here, after in list(zip(place, place[1:], strict=False))[::-1]:
            out[here] = decay * min(w[here], cap) * (own[after] + out[after])
    return out


def rpg_verl(given, divergence="urkl", estimator="reinforce", clip="dual", kl_coef=1e-4, **clips):
    """The losses of the public implementation, with its own KL: of one ratio r = π/π_ref, or of the clipped w."""
    x, advantages, bounds = given.factor(estimator), given.advantages, bounds_of(**clips)
    if clip in ("none", "reward"):
        value, weight = _verl_penalty(divergence, given.log_r), _verl_weight(divergence, given.log_r_now)
        if estimator == "differentiable":
            loss = -given.w * advantages if clip == "none" else dual_clip(given.w, advantages, *bounds)
            return loss + kl_coef * value
        return clipped(given, given.w_now, advantages, kl_coef * weight, estimator, clip, *bounds)
    clip_low, clip_high, clip_dual = bounds
    near = np.clip(given.w_now, 1 - clip_low, 1 + clip_high)
    kl = kl_coef * _verl_weight(divergence, np.log(near), limit=np.inf)
    if clip == "truncate":
        return -(near * advantages - kl) * x
    positive = advantages > 0
    above = positive & (given.w_now >= (1 + clip_high) * (1 - ROUNDING))
    below = ~positive & (given.w_now < (1 - clip_low) * (1 - ROUNDING))
    far = ~positive & (given.w_now >= clip_dual * (1 - ROUNDING))
    at = np.where(above, 1 + clip_high, np.where(below, 1 - clip_low, np.where(far, clip_dual, given.w_now)))
    loss = -(at * advantages + np.where(above | below, kl, -kl)) * x  # its KL changes sign at the two bounds
    return np.where(above | below | far, frozen(loss), loss)


def _verl_penalty(divergence, log_r):
    r = ratio(log_r)
    value = {
        "fkl": -log_r,
        "ufkl": r - log_r - 1,
        "rkl": r * log_r,
        "urkl": r * log_r - r + 1,
        "js": (r * log_r + log_r) / 2,
        "ujs": (r * log_r - log_r) / 2,
    }[divergence]
    return value if divergence == "fkl" else bounded(value, -10.0, 10.0)


def _verl_weight(divergence, log_r, limit=10.0):
    r = ratio(log_r)
    value = {
        "fkl": -np.ones_like(r),
        "ufkl": r - 1,
        "rkl": r * (log_r + 1),
        "urkl": r * log_r,
        "js": (r * (log_r + 1) + 1) / 2,
        "ujs": (r * (log_r + 1) - 1) / 2,
    }[divergence]
    return np.clip(value, -limit, limit)


LOSSES = {
    "ppo": (ppo, "token_mean"),
    "grpo": (grpo, "sequence_mean_token_mean"),
    "reinforce_pp": (reinforce_pp, "token_mean"),
    "gspo": (gspo, "sequence_mean_token_mean"),
    "cispo": (cispo, "token_mean"),
    "dppo": (dppo, "token_mean"),
    "ctpo": (ctpo, "token_mean"),
    "drpo": (drpo, "token_mean"),
    "sapo": (sapo, "sequence_mean_token_mean"),
    "gmpo": (gmpo, "sequence_mean_token_mean"),
    "opmd": (opmd, "sequence_mean_token_sum"),
    "rpg": (rpg, "token_mean"),
}
"""{loss: (function, the aggregate without a choice)}."""


# ---- Corrections and aggregates.

BOUNDS = {
    "truncate": (None, 2.0),
    "mask": (0.5, 5.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
    "off_policy": (np.exp(-0.5), None),
}


def correction(kind, now, old, sampler, advantages, rows, low, high):
    """The weight of each token for the difference between the behaviour policy and the sampler."""
    if kind in (None, "anchor"):
        return np.ones_like(old)
    low, high = (default if given is None else given for given, default in zip((low, high), BOUNDS[kind], strict=True))
    log_u = old - sampler
    if kind == "off_policy":
        q = np.exp(np.minimum(rows.total(now - sampler) / rows.length(), 40))
        return np.where((advantages >= 0) | (q >= low), 1.0, 0.0)
    log_u = {"sequence": rows.total(log_u), "geometric": rows.total(log_u) / rows.length()}.get(kind, log_u)
    u = np.exp(np.minimum(log_u, 40))
    if kind == "truncate":
        return np.minimum(u, high)
    return np.where((u >= low) & (u <= high), 1.0 if kind == "geometric" else u, 0.0)


def aggregated(kind, values, rows, constant_length):
    """(the sum, the weight to divide it by)."""
    values, count = np.where(rows.mask, values, 0), len(rows.completions)
    if kind == "token_mean":
        return values.sum((-1, -2)), rows.mask.sum()
    if kind == "sequence_mean_token_sum":
        return values.sum((-1, -2)), count
    if kind == "constant":
        return values.sum((-1, -2)), count * constant_length
    return (values / rows.length()).sum((-1, -2)), count


def policy_loss(
    name,
    *,
    logprobs,
    behaviour_logprobs,
    advantages,
    mask,
    ref_logprobs=None,
    sampler_logprobs=None,
    completion_ids=None,
    group_ids=None,
    prefix_kl=None,
    aggregate=None,
    constant_length=None,
    sampler_correction=None,
    sampler_low=None,
    sampler_high=None,
    **hyperparameters,
):
    """(sum, weight, gradients of the sum [B, T] in the log-probs and, if given, the two `prefix_kl`)."""
    rows = Rows(mask, completion_ids)
    shape, count = rows.mask.shape, rows.mask.size

    def spread(x):
        return np.broadcast_to(x[:, None] if np.ndim(x) == 1 else x, shape)

    def known(x):
        return None if x is None else np.where(rows.mask, spread(np.asarray(x, float)), 0.0)

    now, old, ref, sampler = map(known, (logprobs, behaviour_logprobs, ref_logprobs, sampler_logprobs))
    advantages, groups = known(advantages), None if group_ids is None else spread(np.asarray(group_ids))
    if sampler_correction == "anchor":
        old = sampler
    weights = correction(sampler_correction, now, old, sampler, advantages, rows, sampler_low, sampler_high)
    arrays = [now, *(() if prefix_kl is None else map(known, prefix_kl))]
    live = []
    for place, array in enumerate(arrays):
        steps = np.zeros((1 + count * len(arrays), count), complex)
        steps[1 + count * place + np.arange(count), np.arange(count)] = 1j * STEP
        live.append(array + steps.reshape(-1, *shape))
    given = Given(live[0], now, old, old if ref is None else ref, advantages, rows, live[1:] or None, groups)
    loss, usual = LOSSES[name]
    with np.errstate(all="ignore"):
        values = loss(given, **hyperparameters) * weights
    sums, weight = aggregated(aggregate or usual, values, rows, constant_length)
    return sums[0].real, weight, sums[1:].imag.reshape(len(arrays), *shape) / STEP
