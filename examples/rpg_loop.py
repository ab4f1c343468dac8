"""Regularized policy gradients in one file: a small Qwen3 learns to add two-digit numbers.

    python -m examples.rpg_loop --seed=1

Read the file from top to bottom: problems, a model, rollouts, rewards, advantages, the RPG-URKL loss, an optimizer, a
reference policy that moves. The method is REINFORCE-style RPG with the unnormalized reverse KL (arXiv:2505.17508):

    J(θ)  = E_{π_θ}[R] − β UKL(π_θ‖π_ref)          the objective
    A     = R − mean of the group                   advantages, one a completion
    A_reg = A − β log r                             the regularized advantage of a token
    L     = −SG(w A_reg) log π_θ                    the loss of a token, to be minimised

with w = π_θ/π_old, the importance ratio to the behaviour policy that sampled the tokens, and r = π_θ/π_ref. SG stops
the gradient. Where A_reg >= 0 and w >= 1 + ε₂, or A_reg < 0 and w <= 1 − ε₁, a token has no gradient (RPG-style clip).

What is simpler here than in `python -m rpg_jax.train --config=configs/tiny.py`, and why:

- Characters are tokens, so there is no tokenizer. Every row is padded to the longest problem, so there is no packing.
- One device and one process, float32, no checkpoints: a run takes a minute.
- Supervised updates stand in for a pretrained model: a policy that is never right has nothing to reinforce.
- Groups whose rewards are all equal stay in the batch. Their advantages are 0. DAPO's dynamic sampling replaces them.
- Arrays are never donated. So the reference policy is a second name for old weights, and costs memory, not code.
- Sampler and trainer compute in the same precision. The loop prints their largest disagreement and corrects nothing.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rpg_jax import data, losses, models, rollout
from rpg_jax.types import Completion, Sampling

# P prompts a step with G completions each are B = P · G rows of T tokens.
PROMPTS, GROUP_SIZE = 128, 8
UPDATES_PER_STEP = 4  # the second to fourth update of a step are off-policy: w is not 1
REFERENCE_EVERY = 16  # updates
KL_COEF, CLIP_LOW, CLIP_HIGH = 0.001, 0.2, 0.28  # β, ε₁, ε₂
LEARNING_RATE, PRETRAINING_RATE = 5e-4, 1e-3

# The problems: "12+34=" has the answer "64", the lowest digit first, the order in which one carries.
CHARACTERS = "\0\n0123456789+="  # the number of a character is its token: padding, end, and what a problem may have
PAD, END = 0, 1
TASK = data.Arithmetic(digits=2, reverse=True, held_out=0.2)
PROMPT_TOKENS, COMPLETION_TOKENS = len("99+99="), len("891\n")
LENGTH = PROMPT_TOKENS + COMPLETION_TOKENS

CONFIG = models.DecoderConfig(
    vocab_size=len(CHARACTERS), num_layers=3, embed_dim=96, num_heads=4, num_kv_heads=2, head_dim=24, hidden_dim=256
)


def encode(text: str) -> np.ndarray:
    """The token of each character of `text`, i32[len(text)]. Raises ValueError for one that is not in `CHARACTERS`."""
    return np.array([CHARACTERS.index(character) for character in text], np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of tokens i32[n], a character for each."""
    return "".join(CHARACTERS[token] for token in tokens)


class Rows(NamedTuple):
    """Prompts and their completions, padded on the right: tokens i32[B, T], mask f32[B, T − 1].

    The mask is 1 where the token after a position belongs to the completion, else 0.
    """

    tokens: np.ndarray
    mask: np.ndarray


def rows_of(prompts: list[np.ndarray], completions: list[np.ndarray]) -> Rows:
    """The tokens of each prompt, i32[…], and of its completion as a row of `Rows`."""
    tokens = np.full((len(prompts), LENGTH), PAD, np.int32)
    mask = np.zeros((len(prompts), LENGTH - 1), np.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        tokens[row, :end] = np.concatenate([prompt, completion])
        mask[row, len(prompt) - 1 : end - 1] = 1
    return Rows(tokens, mask)


def token_logprobs(graphdef: nnx.GraphDef, params: models.Params, rows: Rows) -> jax.Array:
    """log π(token t + 1 | tokens 0 … t) of the model with these weights, f32[B, T − 1], also at prompts and padding."""
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), rows.tokens.shape)
    hidden = model(rows.tokens, positions, jnp.ones_like(rows.tokens), axes=(None, None))
    logprobs = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
    return jnp.take_along_axis(logprobs, rows.tokens[:, 1:, None], axis=-1)[..., 0]


def supervised_loss(params: models.Params, graphdef: nnx.GraphDef, rows: Rows) -> jax.Array:
    """The mean negative log-likelihood of the tokens of right answers, in nats, to be minimised."""
    return -jnp.sum(token_logprobs(graphdef, params, rows) * rows.mask) / jnp.sum(rows.mask)


class Batch(NamedTuple):
    """What the loss reads: rows, log-probs of their tokens under π_old and π_ref, f32[B, T − 1], advantages f32[B]."""

    rows: Rows
    behaviour_logprobs: jax.Array
    ref_logprobs: jax.Array
    advantages: jax.Array


def rpg_loss(params: models.Params, graphdef: nnx.GraphDef, batch: Batch) -> tuple[jax.Array, losses.Metrics]:
    """(L = −SG(w (A − β log r)) log π_θ with the RPG-style clip, its mean over tokens, to be minimised; metrics)."""
    return losses.rpg(
        token_logprobs(graphdef, params, batch.rows),
        batch.behaviour_logprobs,
        batch.advantages,
        batch.rows.mask,
        ref_logprobs=batch.ref_logprobs,
        divergence="urkl",
        estimator="reinforce",
        clip="dual",
        kl_coef=KL_COEF,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )


def adam(learning_rate: float) -> optax.GradientTransformation:
    """Adam on gradients clipped to a norm of 1; the learning rate rises from 0 over 10 updates."""
    rising = optax.linear_schedule(0.0, learning_rate, transition_steps=10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rising, b2=0.95))


def supervised_update(params, state, graphdef, rows):
    """(weights, state of the optimizer) after one update on `rows` with right answers."""
    gradient = jax.grad(supervised_loss)(params, graphdef, rows)
    updates, state = adam(PRETRAINING_RATE).update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def rpg_update(params, state, graphdef, batch):
    """(weights, state of the optimizer, metrics) after one update on a part of the completions of a step."""
    gradient, metrics = jax.grad(rpg_loss, has_aux=True)(params, graphdef, batch)
    updates, state = adam(LEARNING_RATE).update(gradient, state, params)
    return optax.apply_updates(params, updates), state, metrics


def sample(
    sampler: rollout.Rollout, problems: list[data.Problem], group_size: int, seed: int, step: int
) -> list[list[Completion]]:
    """`group_size` completions of each problem, by the sampler's present policy; `seed` and `step` make them random."""
    return sampler.generate(
        rollout.Request(
            prompts=[encode(problem.prompt) for problem in problems],
            prompt_ids=[problem.prompt_id for problem in problems],
            group_size=group_size,
            sampling=Sampling(temperature=1.0, max_tokens=COMPLETION_TOKENS, stop_token_ids=(END,)),
            seed=seed,
            step=step,
        )
    )


def reward(problem: data.Problem, completion: Completion) -> float:
    """1 for the right answer and the end, else 0."""
    return float(decode(completion.tokens) == problem.answer + CHARACTERS[END])


def rewards_of(problems: list[data.Problem], groups: list[list[Completion]]) -> np.ndarray:
    """The reward of each completion, f32[P, G]; `groups` has the completions of each problem."""
    return np.array([[reward(p, c) for c in group] for p, group in zip(problems, groups, strict=True)], np.float32)


def main(seed: int = 0, steps: int = 40, picture: str = "") -> list[float]:
    """Trains, prints a curve, and returns held-out accuracies: before the first step, every 5 steps, at the end."""
    random = np.random.default_rng(seed)
    train, held_out = TASK.problems("train", seed=seed), TASK.problems("held_out", 250, seed=seed)
    graphdef, params = models.init(CONFIG, seed=seed)
    logprobs_of = jax.jit(token_logprobs, static_argnums=0)
    pretrain, improve = jax.jit(supervised_update, static_argnums=2), jax.jit(rpg_update, static_argnums=2)

    decoding = rollout.Decoding(slots=128, capacity=rollout.capacity(PROMPT_TOKENS, COMPLETION_TOKENS))
    sampler = rollout.make_rollout("lockstep", CONFIG, graphdef, params, decoding)

    # A policy to begin with: supervised updates on right answers, until a third of the held-out answers are right.
    state, accuracy = adam(PRETRAINING_RATE).init(params), 0.0
    while accuracy < 1 / 3:
        for _ in range(20):
            problems = [train[i] for i in random.choice(len(train), 128, replace=False)]
            answers = [encode(problem.answer + CHARACTERS[END]) for problem in problems]
            params, state = pretrain(params, state, graphdef, rows_of([encode(p.prompt) for p in problems], answers))
        sampler.sync_weights(params, 0)
        accuracy = float(rewards_of(held_out, sample(sampler, held_out, 1, seed, 0)).mean())

    state, updates, reference, accuracies = adam(LEARNING_RATE).init(params), 0, params, [accuracy]
    print(f"step   0             held-out {accuracy:.2f} {'#' * round(50 * accuracy)}")

    for step in range(1, steps + 1):
        # Rollout: the behaviour policy π_old is the present policy.
        sampler.sync_weights(params, updates)
        problems = [train[i] for i in random.choice(len(train), PROMPTS, replace=False)]
        groups = sample(sampler, problems, GROUP_SIZE, seed, step)

        # Rewards f32[P, G], and advantages A = R − mean of the group.
        rewards = rewards_of(problems, groups)
        advantages = losses.advantages("group_mean", rewards).reshape(-1)

        # Log-probabilities of the tokens under π_old and π_ref, computed by the trainer.
        completions = [completion for group in groups for completion in group]
        prompts = [encode(problem.prompt) for problem in problems for _ in range(GROUP_SIZE)]
        rows = rows_of(prompts, [completion.tokens for completion in completions])
        behaviour_logprobs = logprobs_of(graphdef, params, rows)
        ref_logprobs = logprobs_of(graphdef, reference, rows)
        sampler_logprobs = np.concatenate([completion.logprobs for completion in completions])
        gap = np.abs(np.asarray(behaviour_logprobs)[rows.mask > 0] - sampler_logprobs).max()

        # Updates, each on other groups. The reference moves to the present policy every so many updates.
        for part in np.split(np.arange(PROMPTS * GROUP_SIZE), UPDATES_PER_STEP):
            batch = Batch(
                Rows(rows.tokens[part], rows.mask[part]),
                behaviour_logprobs[part],
                ref_logprobs[part],
                advantages[part],
            )
            params, state, metrics = improve(params, state, graphdef, batch)
            updates += 1
            if updates % REFERENCE_EVERY == 0:
                reference = params

        if step % 5 == 0 or step == steps:
            sampler.sync_weights(params, updates)
            accuracies.append(float(rewards_of(held_out, sample(sampler, held_out, 1, seed, 0)).mean()))
            shown = losses.divided(metrics)
            print(
                f"step {step:3} reward {rewards.mean():.2f} held-out {accuracies[-1]:.2f} "
                f"{'#' * round(50 * accuracies[-1]):50} KL {shown['kl']:.4f} clipped {shown['clip_fraction']:.2f} "
                f"gap {gap:.0e}"
            )

    if picture:
        draw(accuracies, Path(picture))
    return accuracies


def draw(accuracies: list[float], file: Path) -> None:
    """Writes the curve of held-out accuracies, one every 5 steps, as a PNG into `file`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(5 * np.arange(len(accuracies)), accuracies, marker="o")
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1), title="RPG-REINFORCE-URKL, two-digit addition")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", default="", help="a PNG file for the curve")
    options = parser.parse_args()
    main(options.seed, options.steps, picture=options.picture)
