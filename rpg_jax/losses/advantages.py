"""Advantages of completions from their rewards: A = R − b, one number a completion.

Rewards and advantages are f[P, G]: P prompts with G completions each, a prompt's completions being a group.
`counted` is bool[P, G]: the completions that are compared and that the update trains on; None: all. No mean, minimum or
deviation reads another completion, whose result has no meaning; `advantages` sets it to 0.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rpg_jax.losses.declaration import Declared, Table, lookup

STANDARD_DEVIATION_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8


@dataclasses.dataclass(frozen=True)
class Advantage(Declared):
    """A declared advantage. `over` says what a completion is compared with: its group, or the whole batch."""

    over: Literal["group", "batch"] = "group"


# Functions of rewards and of `counted`. An advantage that averages over tokens also takes `lengths` i32[P, G], with 0
# for what is not counted. An advantage that tells the parts of a reward apart takes `parts` and `part_weights`
# instead of rewards.
ADVANTAGES = Table(Advantage)
# Functions of rewards and of a critic's values, one number a token.
LEARNED_ADVANTAGES = Table(Declared)


@ADVANTAGES.declare(r"R_i - \tfrac1G \textstyle\sum_j R_j")
def group_mean(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """R_i − mean of the group's counted rewards, f[P, G] as the rewards (RPG, arXiv:2505.17508). The result
    is 0 for equal rewards, the reward if G = 1, and undefined where `counted` bool[P, G] (None: all) is False."""
    if rewards.shape[1] == 1:
        return rewards
    one = rewards[:, :1]
    if counted is not None:
        one = jnp.take_along_axis(rewards, jnp.argmax(counted, axis=1, keepdims=True), axis=1)
    relative = rewards - one  # a mean of equal numbers may be rounded, and is divided by a small std later
    return relative - jnp.mean(relative, axis=1, keepdims=True, where=counted)


@ADVANTAGES.declare(r"R_i - \mathrm{mean}_\mathrm{batch}(R)", over="batch")
def batch_mean(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """R_i − mean of the batch's counted rewards, f[P, G] as the rewards. `counted` is bool[P, G]; None counts all."""
    return rewards - jnp.mean(rewards, where=counted)


@ADVANTAGES.declare(r"(R_i - \mathrm{mean}_\mathrm{group}(R)) / (\mathrm{std}_\mathrm{group}(R) + 10^{-6})")
def group_standardised(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """(R_i − mean)/(std + 1e-6) of the group's counted rewards, f[P, G] as the rewards (GRPO, arXiv:2402.03300; DAPO).
    std divides by the number minus 1. For G = 1 the result is R_i/(1 + 1e-6). The result has no meaning where `counted`
    bool[P, G] (None: all) is False. A larger group with one counted completion has NaN, where `advantages` has 0."""
    centred = group_mean(rewards, counted)
    deviation = jnp.std(centred, axis=1, keepdims=True, ddof=1, where=counted) if rewards.shape[1] > 1 else 1.0
    return centred / (deviation + STANDARD_DEVIATION_FLOOR)


@ADVANTAGES.declare(r"R_i - \tfrac{1}{G-1} \textstyle\sum_{j \ne i} R_j")
def leave_one_out(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """R_i − mean of the group's other counted rewards, or R_i if there are none; f[P, G] as the rewards (RLOO,
    arXiv:2402.14740). The result is undefined where `counted` bool[P, G] (None: all) is False."""
    size = rewards.shape[1] if counted is None else jnp.sum(counted, axis=1, keepdims=True)
    return jnp.where(size > 1, group_mean(rewards, counted) * (size / jnp.maximum(size - 1, 1)), rewards)


@ADVANTAGES.declare(
    r"(R_i - \mathrm{mean}_\mathrm{group}(R)) / (\mathrm{mean}_\mathrm{group}(R) - \min_\mathrm{group}(R))"
)
def maxrl(rewards: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """(R_i − mean)/(mean − min) of the group, 0 where all are equal; f[P, G] (MaxRL, arXiv:2602.02710 Algorithm 1).

    The paper assumes a reward of two values. For such a reward with success rate p the advantage is the paper's (s −
    p)/p, s ∈ {0, 1}, whatever the two values are. The expected gradient over groups is Σ_{k=1}^{G−1} ∇pass@k / k, the
    first terms of the series of ∇log p. In a group of one the advantage is the reward. Mean and min are over `counted`
    bool[P, G] (None: all); where `counted` is False the result has no meaning.
    """
    if rewards.shape[1] == 1:
        return rewards
    above = rewards - jnp.min(rewards, axis=1, keepdims=True, initial=jnp.inf, where=counted)
    mean = jnp.mean(above, axis=1, keepdims=True, where=counted)
    return jnp.where(mean > 0, above / jnp.where(mean > 0, mean, 1) - 1, 0)


@ADVANTAGES.declare(
    r"\mathrm{standardise}_\mathrm{batch}(\textstyle\sum_n \omega_n\, \mathrm{standardise}_\mathrm{group}(R_{n,i}))",
    over="batch",
)
def gdpo(parts: jax.Array, part_weights: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """The sum of a reward's parts, each standardised in its group, standardised over the batch; f[P, G] (GDPO).

    `parts` f[P, G, N] are the N unweighted parts, and `part_weights` f[N] are their weights ω in the sum. So ω says how
    much a part counts, whatever its spread is. Means and deviations are over `counted` bool[P, G] (None: all).
    Deviations divide by the number minus 1, and have 1e-6 added; NVlabs/GDPO at b080e63 adds 1e-4 (arXiv:2601.05242).
    """
    standardised = jax.vmap(lambda part: group_standardised(part, counted), in_axes=-1, out_axes=-1)(parts)
    summed = jnp.sum(part_weights * standardised, axis=-1)
    centred = summed - jnp.mean(summed, where=counted)
    count = max(centred.size - 1, 1) if counted is None else jnp.maximum(jnp.sum(counted) - 1, 1)
    deviation = jnp.sqrt(jnp.sum(jnp.square(centred), where=counted) / count)
    return centred / (deviation + STANDARD_DEVIATION_FLOOR)


def whiten(values: jax.Array, lengths: jax.Array) -> jax.Array:
    """(x − mean) · rsqrt(var + 1e-8) over tokens; values x and result are f[P, G], `lengths` i32[P, G]. A completion
    counts once per trained token: `lengths` times. var divides by the number of tokens minus 1. If all completions with
    tokens have equal values, their result is exactly 0: a rounded mean would become large."""
    tokens = lengths.astype(values.dtype)
    count = jnp.maximum(jnp.sum(tokens), 1)
    counted = tokens > 0
    equal = jnp.max(values, where=counted, initial=-jnp.inf) <= jnp.min(values, where=counted, initial=jnp.inf)
    mean = jnp.sum(tokens * values, where=counted) / count  # elsewhere a reward may be NaN
    centred = jnp.where(equal & counted, 0, values - mean)
    variance = jnp.sum(tokens * jnp.square(centred), where=counted) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + VARIANCE_FLOOR)


@ADVANTAGES.declare(r"\mathrm{whiten}_\mathrm{tokens}(R_i)", over="batch")
def whitened_returns(rewards: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns with γ = 1 (the reward, at every token), whitened over tokens; f[P, G] (REINFORCE++, arXiv:2501.03262).
    `lengths` i32[P, G] is the number of trained tokens of each completion, 0 where it is not counted."""
    return whiten(rewards, lengths)


@ADVANTAGES.declare(r"\mathrm{whiten}_\mathrm{tokens}(R_i - \mathrm{mean}_\mathrm{group}(R))", over="batch")
def whitened_group_mean(rewards: jax.Array, lengths: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """`group_mean`, whitened over tokens; f[P, G] (the baseline variant of REINFORCE++, arXiv:2501.03262). `lengths`
    i32[P, G] counts the trained tokens. The result is undefined where `counted` bool[P, G] (None: all) is False."""
    return whiten(group_mean(rewards, counted), lengths)


def declare_own_advantage(name: str, function: Callable[..., jax.Array]) -> None:
    """Adds an advantage from outside this repository to `ADVANTAGES`, in place of an advantage with the same name.

    `function(rewards)` takes and returns f[P, G]. It may also have the parameters `counted` bool[P, G] and `lengths`
    i32[P, G], or `parts` f[P, G, N] and `part_weights` f[N] in place of `rewards`. The function may compare different
    groups, so `turn_advantages` refuses the advantage. `name` is "module:function", the value of `loss.advantage` in a
    config. Raises ValueError if `function` does not have this form.
    """
    if not inspect.isfunction(function):
        raise ValueError(f"the advantage {name!r} must be a function, made with def; got {type(function).__name__}")
    asked = list(inspect.signature(function).parameters)
    others = set(asked) - {"rewards", "counted", "lengths", "parts", "part_weights"}
    if asked[:1] not in (["rewards"], ["parts"]) or others:
        raise ValueError(
            f"the advantage {name!r} is called as {function.__name__}(rewards), and may ask for counted and lengths, "
            f"or as {function.__name__}(parts, part_weights); it asks for {', '.join(asked) or 'nothing'}"
        )
    ADVANTAGES[name] = Advantage(function, r"\text{" + function.__name__ + "}", over="batch")


def advantages(
    name: str,
    rewards: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    parts: ArrayLike | None = None,
    part_weights: Sequence[float] | None = None,
    counted: ArrayLike | None = None,
) -> jax.Array:
    """Advantages of a batch of groups: one number a completion, which all its tokens share.

    Args:
      name: a name of `ADVANTAGES`.
      rewards: f[P, G], G completions of each of P prompts.
      lengths: i32[P, G], the number of trained tokens of each completion, which the whitened advantages need.
      parts, part_weights: f[P, G, N] and N weights, which `gdpo` reads. The weighted sum of the parts is the reward.
        Without `parts` the reward is the only part, of weight 1. `part_weights` None: every weight is 1.
      counted: bool[P, G], the completions that the update trains on; None: all. Other completions have advantage 0, and
        they change no advantage. The only counted completion of a group of several has advantage 0, not its reward,
        because no other completion can be compared with it.

    Returns:
      f32[P, G] (f64 for f64 rewards). No gradient.

    Raises:
      ValueError: an unknown name, an advantage from a critic, a wrong shape (also of a function's result), a whitened
        advantage without `lengths`, or `counted` for an advantage whose function cannot leave a completion out.
    """
    declared = lookup({**ADVANTAGES, **LEARNED_ADVANTAGES}, "advantage", name)
    if name in LEARNED_ADVANTAGES:
        raise ValueError(
            f"advantage {name!r} comes from the values of a critic, not from rewards alone: call losses.{name} with "
            f"values, or choose one of {', '.join(ADVANTAGES)}"
        )
    rewards = jnp.asarray(rewards)
    rewards = jax.lax.stop_gradient(rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32)))
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [prompts, completions of a prompt], got shape {rewards.shape}")
    for what, array in {"lengths": lengths, "counted": counted}.items():
        if array is not None and np.shape(array) != rewards.shape:
            raise ValueError(f"{what} must have the shape of rewards {rewards.shape}, got {np.shape(array)}")
    if counted is not None:
        counted = jnp.asarray(counted, bool)
        counted &= jnp.sum(counted, axis=1, keepdims=True) > min(1, rewards.shape[1] - 1)  # one alone has no other
        if not (declared.takes("counted") or declared.takes("lengths")):
            raise ValueError(f"advantage {name!r} cannot leave completions out: its function must take `counted`")
        if lengths is not None:
            lengths = jnp.where(counted, jnp.asarray(lengths), 0)
    if lengths is None and declared.takes("lengths"):
        raise ValueError(f"{name} averages over tokens: give lengths [P, G]")
    given = {"rewards": rewards, "counted": counted, "lengths": lengths if lengths is None else jnp.asarray(lengths)}
    asked = inspect.signature(declared.function).parameters
    if counted is None and "counted" in asked and asked["counted"].default is inspect.Parameter.empty:
        given["counted"] = jnp.ones(rewards.shape, bool)
    if "parts" in asked:
        given["parts"], given["part_weights"] = _parts(rewards, parts, part_weights)
    found = declared.function(**{name: given[name] for name in asked if given.get(name) is not None})
    if jnp.shape(found) != rewards.shape:
        raise ValueError(f"advantage {name!r} must return the shape of rewards {rewards.shape}, got {jnp.shape(found)}")
    return found if counted is None else jnp.where(counted, found, 0)


def _parts(
    rewards: jax.Array, parts: ArrayLike | None, part_weights: Sequence[float] | None
) -> tuple[jax.Array, jax.Array]:
    """The parts of the rewards, f[P, G, N], and their N weights. Raises ValueError for a wrong shape."""
    if parts is None:
        parts, part_weights = rewards[..., None], None
    parts = jax.lax.stop_gradient(jnp.asarray(parts, rewards.dtype))
    weights = jnp.ones(parts.shape[-1]) if part_weights is None else jnp.asarray(part_weights)
    if parts.shape != (*rewards.shape, len(weights)):
        raise ValueError(
            f"parts must be [prompts, completions, {len(weights)} part_weights] for rewards {rewards.shape}, got "
            f"{parts.shape}"
        )
    return parts, weights.astype(rewards.dtype)


def turn_advantages(
    name: str, returns: Sequence[Sequence[np.ndarray]], counted: Sequence[Sequence[bool] | np.ndarray] | None = None
) -> list[list[np.ndarray]]:
    """Advantages of turns: the return to go of a turn is compared with the group's returns to go at the same turn.

        R_{i,t} = Σ_{j ≥ t} r_{i,j},   A_{i,t} = A(R_{i,t}, {R_{j,s} : j ≠ i, T_j ≥ s})_i,   s = min(t, max_{j≠i} T_j)

    r_{i,j} is the reward of turn j of completion i, T_j the number of turns of completion j. So s is t, except at turns
    that no other completion has: such a turn is compared with the last returns of the longest other completions.

    R_{i,t} leaves out the rewards of earlier turns, which turn t cannot change. The baseline of `leave_one_out`
    depends on other completions alone, and s does too. So the expected gradient is the gradient of the sum of rewards.
    If all completions of a group have the same number of turns and only the last turn has a reward, every turn has the
    advantage of its completion. A group of one has baseline 0.

    Args:
      name: a name of `ADVANTAGES` that compares within a group.
      returns: for each of P prompts and G completions f32[k], R_{i,1} … R_{i,k} of its k turns.
      counted: [P][G] bools, the completions that the update trains on; None: all. Other completions have advantage 0
        and change no advantage. The only counted completion of a group of several has advantage 0.

    Returns f32[k] for each prompt and completion, in NumPy. Raises ValueError if the advantage is unknown, compares a
    whole batch, or comes from a critic.

    Source: the return to go is REINFORCE's. The baselines by turn and the rule for s are ours.
    """
    if name not in ADVANTAGES or ADVANTAGES[name].over != "group":
        able = ", ".join(n for n, declared in ADVANTAGES.items() if declared.over == "group")
        raise ValueError(
            f"advantage {name!r} compares a whole batch, or may do so, and has no form for turns; choose one of {able}"
        )
    found = [[np.zeros(len(own), np.float32) for own in group] for group in returns]
    compared: dict[int, list[tuple[int, int, list[int]]]] = collections.defaultdict(list)
    for p, group in enumerate(returns):
        lengths = [len(own) if counted is None or counted[p][i] else 0 for i, own in enumerate(group)]
        *_, shared, longest = sorted([0, *lengths])
        for turn in range(longest if shared or len(group) == 1 else 0):
            at = min(turn, max(shared - 1, 0))
            members = [i for i, length in enumerate(lengths) if length > at]
            compared[len(members)].append((p, turn, members))
    for size, cells in compared.items():
        rewards = np.zeros((1 << (len(cells) - 1).bit_length(), size), np.float32)  # few shapes: fewer compilations
        rewards[: len(cells)] = [[returns[p][i][: turn + 1][-1] for i in members] for p, turn, members in cells]
        for (p, turn, members), row in zip(cells, np.asarray(advantages(name, rewards)), strict=False):
            for i, advantage in zip(members, row, strict=True):
                found[p][i][turn : turn + 1] = advantage  # nothing, where the conversation was over
    return found
