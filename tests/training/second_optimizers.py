"""Schedules and optimizers a second time, in NumPy and float64. Weights are {path: f64[...]}."""

from __future__ import annotations

import numpy as np


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
    """The optimizers of docs/own_data.md, by the formulas that optax documents, and Schedule-Free AdamW of
    arXiv:2405.15682. `undecided` has the weights whose step of Lion has the sign of a number near 0."""

    def __init__(self, fields, start):
        self.o, self.count, self.first, self.second, self.undecided = fields, 0, {}, {}, {}
        self.z, self.fastest, self.squares = start, 0.0, 0.0

    @property
    def slots(self):
        both = {
            "adamw": "first second",
            "nadamw": "first second",
            "rmsprop": "second",
            "schedule_free_adamw": "second z",
        }
        return [getattr(self, slot) for slot in both.get(self.o["name"], "first").split()]

    def averaged(self, weights):
        """The weights that are evaluated."""
        if self.o["name"] != "schedule_free_adamw":
            return weights
        return {k: (y - (1 - self.o["b1"]) * self.z[k]) / self.o["b1"] for k, y in weights.items()}

    def direction(self, path, g):
        o, name, t = self.o, self.o["name"], self.count
        m, v = self.first.get(path, 0), self.second.get(path, 0)
        if name == "sgd":
            self.first[path] = g + o["b1"] * m
            return self.first[path]
        if name == "lion":
            self.first[path], mix = o["b2"] * m + (1 - o["b2"]) * g, o["b1"] * m + (1 - o["b1"]) * g
            self.undecided[path] = np.abs(mix) < 1e-3 * np.sqrt((mix**2).mean())
            return np.sign(mix)
        self.first[path], self.second[path] = o["b1"] * m + (1 - o["b1"]) * g, o["b2"] * v + (1 - o["b2"]) * g**2
        if name == "rmsprop":
            return g / np.sqrt(self.second[path] + o["eps"])
        root = np.sqrt(self.second[path] / (1 - o["b2"] ** t)) + o["eps"]
        if name == "schedule_free_adamw":
            return g / root
        mean = self.first[path] / (1 - o["b1"] ** t)
        if name == "nadamw":
            mean = o["b1"] * self.first[path] / (1 - o["b1"] ** (t + 1)) + (1 - o["b1"]) * g / (1 - o["b1"] ** t)
        return mean / root

    def moved(self, weights, gradient, rate):
        o, new, x = self.o, {}, self.averaged(weights)
        self.count += 1
        self.fastest = max(self.fastest, rate)
        self.squares += self.fastest**2
        for path, g in gradient.items():
            decays = o["decayed"] == "all" or "norm" not in path and "bias" not in path
            step = rate * (self.direction(path, g) + o["weight_decay"] * decays * weights[path])
            new[path] = weights[path] - step
            if o["name"] == "schedule_free_adamw":
                self.z = self.z | {path: self.z[path] - step}
                share = self.fastest**2 / self.squares if self.squares else 0.0
                average = (1 - share) * x[path] + share * self.z[path]
                new[path] = (1 - o["b1"]) * self.z[path] + o["b1"] * average
        return new
