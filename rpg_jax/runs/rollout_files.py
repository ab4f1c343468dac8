"""Rollout files: the groups of some steps with every token's numbers, for people to look at, in `rollouts/STEP.npz`.

A file holds no pickles. It has P groups of G completions, N = P·G completions, and n tokens in all of them:

    text             u8[…], JSON: step, weights (version after the step), columns, clip_states, pieces (distinct token
                     texts), specials (numbers of the pieces that name a special token), parts (of a reward of several),
                     paid (what each part adds, for each completion), groups (prompt_id, prompt, answer), completions
                     (finish_reason, verdict, turns); turns is null or has spans ([first, end] of an environment's
                     words), rewards and error
    group_sizes      i32[P]
    lengths          i32[N], tokens of each completion
    rewards          f32[N]
    pieces           i32[n], number of each token's text. The texts in order are the completion, without the names of
                     special tokens. A token that ends in the middle of a character has the empty text
    weight_versions  i32[n], of the weights that sampled a token
    tokens           f32[n, K], a column for each of `COLUMNS`, nats. At tokens that an environment wrote `clip` is the
                     number of "observed", and the other columns are NaN
"""

import dataclasses
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import losses
from rpg_jax.data import Group, RolloutBatch
from rpg_jax.data.groups import opening
from rpg_jax.data.tokenizer import IncrementalDecoder, Tokenizer
from rpg_jax.losses.divergences import k3
from rpg_jax.losses.tokens import checked
from rpg_jax.parallel import hosts
from rpg_jax.report.rollouts import STEP
from rpg_jax.storage import write_atomically
from rpg_jax.training.state import TrainState
from rpg_jax.types import Batch, Completion, Rows

FOLDER = "rollouts"  # the subfolder of a run
# `logprobs`, `entropy`, `kl` (k₃ estimate of KL(π_θ‖π_ref)) and `clip` are of the weights after the step's last update.
# `clip` is the number of one of `CLIP_STATES`: what the loss would do to the token if it were trained again. For this
# answer the k₃ estimate stands in for a KL that the loss sums over the vocabulary.
COLUMNS = ("sampler_logprobs", "behaviour_logprobs", "logprobs", "ref_logprobs", "entropy", "kl", "advantages", "clip")
CLIP_STATES = ("free", "clipped", "high", "low", "dual", "not trained", "observed")

Numbers = Callable[[jax.Array, jax.Array, Batch], jax.Array]


@functools.lru_cache(maxsize=128, typed=True)
def token_numbers(loss: str | losses.Loss, **hyperparameters: Any) -> Numbers:
    """A jitted function (log-probs f32[B, C], entropy f32[B, C], batch) -> f32[B, C, K], the numbers of `COLUMNS`. The
    batch has log π_old, log π_ref and advantages. The `loss`, with its `hyperparameters`, decides `clip`. Equal
    arguments give the same function, so that runs of one process compile it once."""

    @jax.jit
    def numbers(logprobs: jax.Array, entropy: jax.Array, batch: Batch) -> jax.Array:
        tokens = checked(logprobs=logprobs, **batch.loss_inputs)
        kl = k3(-tokens.log_r)
        tokens = dataclasses.replace(tokens, prefix_kl=losses.PrefixKL(kl, kl))
        events = losses.token_loss(loss, tokens, **hyperparameters).events
        clip = jnp.zeros_like(logprobs)
        for name in ("clip", "clip_high", "clip_low", "clip_dual"):
            if name in events:
                state = "clipped" if name == "clip" else name.removeprefix("clip_")
                clip = jnp.where(events[name], CLIP_STATES.index(state), clip)
        clip = jnp.where(tokens.mask, clip, CLIP_STATES.index("not trained"))
        known = {"logprobs": logprobs, "entropy": entropy, "kl": kl, "clip": clip}
        return jnp.stack([known[c] if c in known else getattr(batch, c) for c in COLUMNS], -1)

    return numbers


@dataclasses.dataclass(frozen=True)
class RolloutFiles:
    """Writes rollout files into `run_dir`/rollouts: the first `groups` groups of a step, those of the first mini-batch
    first. `every`: a file is due at step 1 and at each multiple. A file costs a pass of log-probs over the mini-batches
    that hold its groups. It changes no number of the run. `logprobs` maps weights and rows to (log-probs f32[B, C],
    entropy f32[B, C], …). `numbers` comes from `token_numbers`. `parts` has the weight of each part of the reward, in
    the order of `Group.parts`."""

    run_dir: Path
    tokenizer: Tokenizer
    logprobs: Callable[[Any, Rows], tuple[jax.Array, jax.Array, Any]]
    numbers: Numbers
    every: int
    groups: int = 8
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        """Whether a file of the step is due: at step 1 and at the multiples of `every`."""
        return step == 1 or step % self.every == 0

    def after_updates(self, step: int, batch: RolloutBatch, state: TrainState) -> None:
        """Writes the file of `step`, also if it is not due. `state` is the state after the step's updates on `batch`.
        Collective: all processes call it, and the first process writes."""
        shown: list[int] = []
        micro_batches: list[Batch] = []
        updates = len(batch.minibatch_sizes)
        for u, minibatch in enumerate(batch.minibatches):
            if len(shown) >= self.groups:
                break
            shown += range(u, len(batch.groups), updates)  # as `data.pack` deals them
            micro_batches += minibatch
        columns = [self.numbers(*self.logprobs(state.params, b.rows)[:2], b) for b in micro_batches]
        shown = shown[: self.groups]
        numbers = batch.gather(columns, shown)
        if hosts.is_first():
            groups = [batch.groups[p] for p in shown]
            content = encode(step, int(state.updates), groups, numbers, self.tokenizer, self.parts)
            folder = self.run_dir / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{step:06d}.npz", content)


def rewind(run_dir: Path, step: int) -> None:
    """Removes the rollout files of steps after `step` in the run folder `run_dir`, which a resumed run writes again."""
    for file in (run_dir / FOLDER).glob("*.npz"):
        if STEP.fullmatch(file.stem) and int(file.stem) > step:
            file.unlink()


def encode(
    step: int,
    version: int,
    groups: Sequence[Group],
    numbers: Sequence[Sequence[np.ndarray]],
    tokenizer: Tokenizer,
    parts: Mapping[str, float] = MappingProxyType({}),
) -> bytes:
    """The bytes of the rollout file of `step`, whose updates made the weights `version`. `numbers` has an f32[n, K], by
    `COLUMNS`, for each completion of each of `groups`. `parts` has the weight of each part of the reward."""
    completions, flat = [c for g in groups for c in g.completions], [x for group in numbers for x in group]
    found: dict[tuple[str, bool], int] = {}  # (text, whether it names a special token) -> its number
    named = [piece for c in completions for piece in _pieces(c.tokens, tokenizer)]
    pieces = [found.setdefault(piece, len(found)) for piece in named]
    verdicts = [
        failed or ("right" if accuracy > 0.5 else failure or "wrong")
        for g in groups
        for accuracy, failure, failed in zip(
            g.accuracy, g.failures or [None] * len(g.accuracy), g.failed or [None] * len(g.accuracy), strict=True
        )
    ]
    apart = len(parts) > 1 and all(g.parts is not None for g in groups)
    paid = [(g.parts * [*parts.values()]).tolist() for g in groups if g.parts is not None] if apart else []
    text = {
        "step": step,
        "parts": list(parts) if apart else [],
        "paid": [own for group in paid for own in group],
        "weights": version,
        "columns": COLUMNS,
        "clip_states": CLIP_STATES,
        "pieces": [text for text, _ in found],
        "specials": [number for (_, special), number in found.items() if special],
        "groups": [
            {"prompt_id": g.problem.prompt_id, "prompt": opening(g.problem), "answer": g.problem.answer} for g in groups
        ],
        "completions": [
            {"finish_reason": c.finish_reason, "verdict": verdict, "turns": c.turns and c.turns.record()}
            for c, verdict in zip(completions, verdicts, strict=True)
        ],
    }
    packed = io.BytesIO()
    np.savez_compressed(
        packed,
        text=np.frombuffer(json.dumps(text).encode(), np.uint8),
        group_sizes=np.array([len(g.completions) for g in groups], np.int32),
        lengths=np.array([len(c.tokens) for c in completions], np.int32),
        rewards=np.concatenate([g.rewards for g in groups]).astype(np.float32),
        pieces=np.array(pieces, np.int32),
        weight_versions=np.concatenate([c.token_versions for c in completions]),
        tokens=np.concatenate([_of_policy(x, c) for x, c in zip(flat, completions, strict=True)]),
    )
    return packed.getvalue()


def _of_policy(numbers: np.ndarray, completion: Completion) -> np.ndarray:
    """`numbers` f32[n, K], but NaN, and "observed" in the column `clip`, at tokens that an environment wrote."""
    if completion.turns is None:
        return numbers
    observed = np.where(np.array(COLUMNS) == "clip", CLIP_STATES.index("observed"), np.nan)
    return np.where(completion.sampled[:, None], numbers, observed.astype(np.float32))


def _pieces(tokens: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """(text, whether the text names a special token) of each token. The texts that name no special token are the
    completion, in order. If the completion ends inside a character, U+FFFD ends the last text."""
    decoder, found = IncrementalDecoder(tokenizer), []
    for token in tokens.tolist():
        piece = decoder.push([token])
        special = not piece and not tokenizer.decode([token])
        found.append((tokenizer.name(token) if special else piece, special))
    if rest := decoder.flush():
        last, special = found[-1]
        found[-1] = (rest if special else last + rest, False)
    return found
