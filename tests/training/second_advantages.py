"""Advantages a second time, in NumPy and float64, of the completions that count: of groups, of turns, of a critic."""

from __future__ import annotations

import importlib

import numpy as np

from tests.losses import second_losses


def standardised(x):
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6)


def of_group(name, r):
    """f64[n] of the rewards [n] of a group."""
    if name == "leave_one_out":
        return np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)])
    if name == "group_standardised":
        return standardised(r)
    if name == "maxrl":
        return (r - r.mean()) / (r.mean() - r.min()) if np.ptp(r) else 0 * r
    assert name == "group_mean"
    return r - r.mean()


def advantages(name, rewards, lengths, parts=None, part_weights=None):
    """Of each group f64[n], of rewards [n]. `lengths` [n] are numbers of trained tokens, `parts` [n, N] of rewards."""
    if ":" in name:
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)(np.stack(rewards))
    every, ends = np.concatenate(rewards), np.cumsum([len(r) for r in rewards])[:-1]
    if name.startswith("whitened"):
        x = every if name == "whitened_returns" else np.concatenate(advantages("group_mean", rewards, lengths))
        tokens = np.concatenate(lengths)
        center = (tokens * x).sum() / tokens.sum()
        spread = (tokens * (x - center) ** 2).sum() / (tokens.sum() - 1)
        return np.split((x - center) / np.sqrt(spread + 1e-8), ends)
    if name == "batch_mean":
        return np.split(every - every.mean(), ends)
    if name == "gdpo":
        summed = [sum(w * standardised(own[:, i]) for i, w in enumerate(part_weights)) for own in parts]
        return np.split(standardised(np.concatenate(summed)), ends)
    return [of_group(name, r) for r in rewards]


def turn_advantages(name, returns):
    """Of each completion of a group f64[k], of its returns to go [k]: turn by turn beside the others' at the same turn,
    or at the last turn of the longest others where none of them has it."""
    found = []
    for i, own in enumerate(returns):
        others = [r for j, r in enumerate(returns) if j != i]
        last = max(map(len, others)) - 1
        beside = [[r[min(t, last)] for r in others if len(r) > min(t, last)] for t in range(len(own))]
        found.append(np.array([of_group(name, np.array([x, *row]))[0] for x, row in zip(own, beside, strict=True)]))
    return found


def kl_baseline(log_ratios, divergence, kl_coef):
    """f64[n] of log π_old/π_ref of a group's completions: β (a times the mean of the group's others, plus b - c)."""
    a, b, c = second_losses.COEFFICIENTS[divergence]
    others = (log_ratios.sum() - log_ratios) / (len(log_ratios) - 1)
    return kl_coef * (a * others + b - c)


def gae(paid, values, places, gamma, decay):
    """(advantages, returns) [N, T], 0 but at the `places` bool[N, T]; the next token is that at the next place."""
    found = np.zeros(places.shape)
    for i, row in enumerate(places):
        later = after = 0.0
        for t in np.flatnonzero(row)[::-1]:
            later = paid[i, t] + gamma * after - values[i, t] + gamma * decay * later
            found[i, t], after = later, values[i, t]
    return found, np.where(places, found + values, 0.0)


def turns_of(completion):
    """i64[n], the turn of each token; an observation has that of the turn before it."""
    written = completion.sampled
    return np.cumsum(written & ~np.append(False, written[:-1])) - 1


def returns_to_go(completion, reward, environment_weight):
    """f64[k] of a completion's turns: what the environment pays from each turn on, and the other parts of the reward,
    which are known to f32. Numbers that differ by rounding alone would be taken for better and worse ones."""
    paid = np.zeros(1) if completion.turns is None else environment_weight * completion.turns.rewards.astype(float)
    return np.cumsum(paid[::-1])[::-1] + np.round(reward - paid.sum(), 6)
