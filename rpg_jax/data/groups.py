"""A group is a prompt's completions with scores. Groups as bytes, for other processes and checkpoints, bit by bit."""

import base64
import dataclasses
import io
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rpg_jax.data.prompts import Problem
from rpg_jax.types import Completion, Turns

_OPEN, _CLOSE = "\n<observation>\n", "\n</observation>\n"  # around the text of an environment


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its G completions and their scores.

    Attributes:
      problem: the prompt as text, with its answer.
      prompt: i32[n] token ids.
      completions: G completions.
      texts: the completions as people read them (see `shown`), with marks around what an environment wrote.
      rewards: f32[G], the weighted sum of all parts, shaping terms included.
      accuracy: f32[G], 1 where the answer is right, else 0 (also where the verifier failed).
      behaviour_logprobs: G arrays f32[n], log π_old of every token; NaN where the trainer must compute log π_old. None
        if the present weights sampled the whole group; then the trainer computes log π_old of all tokens.
      failures: for each completion the kind of failure (as "timeout") of the verdict that decides accuracy, or None if
        the verdict did not fail; empty if none is known.
      failed: for each completion the kind of failure if the verifier or the environment itself failed, else None: the
        text is not to blame, and the reward is unknown; empty if none failed.
      parts: f32[G, N], the parts of the rewards, unweighted, in the config's order; None if the parts are not known.
      unshaped: f32[G], the rewards without their shaping terms; None if `accuracy` has the same information.
    """

    problem: Problem
    prompt: np.ndarray
    completions: list[Completion]
    texts: list[str]
    rewards: np.ndarray
    accuracy: np.ndarray
    behaviour_logprobs: list[np.ndarray] | None = None
    failures: Sequence[str | None] = ()
    parts: np.ndarray | None = None
    unshaped: np.ndarray | None = None
    failed: Sequence[str | None] = ()

    @property
    def judged(self) -> np.ndarray:
        """bool[G]: whether the reward of a completion is known: `failed` is empty, or has None for the completion."""
        return np.array([kind is None for kind in self.failed] or [True] * len(self.completions))

    @property
    def counted(self) -> np.ndarray:
        """bool[G]: True for `judged` completions, on which the update trains; only their rewards enter the baseline. If
        one of several completions alone is judged, its reward can be compared with no other: all are False."""
        judged = self.judged
        return judged & (judged.sum() > 1 or len(judged) == 1)

    @property
    def stored_logprobs(self) -> list[np.ndarray]:
        """`behaviour_logprobs`; if the field is None, G arrays f64[n] that hold NaN for every token."""
        return self.behaviour_logprobs or [np.full(len(c.tokens), np.nan) for c in self.completions]

    @property
    def informative(self) -> bool:
        """Whether the `counted` completions differ in `unshaped` reward, or in accuracy if `unshaped` is None."""
        scores = (self.accuracy if self.unshaped is None else self.unshaped)[self.counted]
        return bool(scores.size and scores.min() < scores.max())

    def rescored(self, members: np.ndarray, again: "Group") -> "Group":
        """Returns a copy in which completion number members[i] has the scores of completion i of the group `again`.
        `members` is i64[n], and `again` has n completions. In both groups `parts` and `unshaped` are arrays, and
        `failures` and `failed` have an item for each completion."""
        scores: dict[str, Any] = {}
        for name in ("rewards", "accuracy", "parts", "unshaped", "failures", "failed"):
            own = getattr(self, name)
            values = np.array(own, own.dtype if isinstance(own, np.ndarray) else object)
            values[members] = getattr(again, name)
            scores[name] = values if isinstance(own, np.ndarray) else values.tolist()
        return dataclasses.replace(self, **scores)


def unscored(problem: Problem, prompt: np.ndarray, completions: list[Completion]) -> Group:
    """Returns a group of completions without scores: rewards and accuracy are 0, and texts are ""."""
    zeros = np.zeros(len(completions), np.float32)
    return Group(problem, prompt, completions, [""] * len(completions), zeros, zeros)


def encode_groups(groups: Sequence[Group]) -> str:
    """Returns the groups, which `groups_to_bytes` must accept, as ASCII text for `decode_groups`; "" for no groups."""
    return base64.b64encode(zlib.compress(groups_to_bytes(groups), 1)).decode() if groups else ""


def decode_groups(text: str) -> list[Group]:
    """Returns the groups in a text of `encode_groups`. All numbers are equal to the bit. Returns [] for ""."""
    return groups_from_bytes(zlib.decompress(base64.b64decode(text))) if text else []


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Returns the groups as bytes, which `groups_from_bytes` reads; b"" for no groups. `behaviour_logprobs`, `parts`,
    `unshaped`, and the completions' `experts` must each be None in all groups or in none, which is not checked."""
    if not groups:
        return b""
    completions = [c for g in groups for c in g.completions]
    texts = {
        "problems": [dataclasses.asdict(g.problem) for g in groups],
        "texts": [g.texts for g in groups],
        "finish_reasons": [c.finish_reason for c in completions],
        "failures": [list(g.failures) for g in groups],
        "failed": [list(g.failed) for g in groups],
        "turns": [c.turns and c.turns.record() for c in completions],
    }
    arrays = {
        "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        "group_sizes": np.array([len(g.completions) for g in groups]),
        "lengths": np.array([len(c.tokens) for c in completions]),
        "prompt_lengths": np.array([len(g.prompt) for g in groups]),
        "prompts": np.concatenate([g.prompt for g in groups]),
        "tokens": np.concatenate([c.tokens for c in completions]),
        "versions": np.concatenate([c.token_versions for c in completions]),
        "sampler_logprobs": np.concatenate([c.logprobs for c in completions]),
        "behaviour_logprobs": np.concatenate(
            [np.zeros(0, np.float32), *(x for g in groups for x in g.behaviour_logprobs or ())]
        ),
        "experts": np.concatenate([np.zeros(0, np.uint8) if c.experts is None else c.experts for c in completions]),
        "rewards": np.concatenate([g.rewards for g in groups]),
        "accuracy": np.concatenate([g.accuracy for g in groups]),
        "parts": np.concatenate([np.zeros((0, 0), np.float32) if g.parts is None else g.parts for g in groups]),
        "unshaped": np.concatenate([np.zeros(0, np.float32) if g.unshaped is None else g.unshaped for g in groups]),
    }
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    return packed.getvalue()


def groups_from_bytes(packed: bytes) -> list[Group]:
    """Returns the groups in bytes of `groups_to_bytes`, all numbers equal to the bit; [] for b"". Unpickles nothing."""
    if not packed:
        return []
    with np.load(io.BytesIO(packed)) as arrays:
        a = dict(arrays)
    texts = json.loads(a["texts"].tobytes())

    def split(name: str, lengths: str) -> list[Any]:
        """Returns an array of `name` for each of the `lengths`; None for each if nothing was stored."""
        cuts = np.cumsum(a[lengths])
        return np.split(a[name], cuts[:-1]) if len(a[name]) else [None] * len(cuts)

    a["read"] = a["lengths"] + np.repeat(a["prompt_lengths"], a["group_sizes"])
    tokens, versions, logprobs = (split(name, "lengths") for name in ("tokens", "versions", "sampler_logprobs"))
    behaviour, experts = split("behaviour_logprobs", "lengths"), split("experts", "read")
    completions = []
    for i, (reason, turns) in enumerate(zip(texts["finish_reasons"], texts["turns"], strict=True)):
        last = int(versions[i][-1])
        turns = turns and Turns.of(**turns, length=len(tokens[i]))
        several = versions[i] if (versions[i] != last).any() else None
        completions.append(Completion(tokens[i], logprobs[i], reason, last, turns, experts[i], several))
    prompts = split("prompts", "prompt_lengths")
    scored = ("rewards", "accuracy", "parts", "unshaped")
    rewards, accuracy, parts, unshaped = (split(name, "group_sizes") for name in scored)
    groups, first = list[Group](), 0
    for g, size in enumerate(a["group_sizes"].tolist()):
        own = slice(first, first + size)
        groups.append(
            Group(
                problem=Problem(**texts["problems"][g]),
                prompt=prompts[g],
                completions=completions[own],
                texts=texts["texts"][g],
                rewards=rewards[g],
                accuracy=accuracy[g],
                behaviour_logprobs=behaviour[own] if len(a["behaviour_logprobs"]) else None,
                failures=texts["failures"][g],
                parts=parts[g],
                unshaped=unshaped[g],
                failed=texts["failed"][g],
            )
        )
        first += size
    return groups


def shown(completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """Returns a completion as text for people, without stop tokens. `decode` makes text of token ids. The lines
    <observation> and </observation> enclose what an environment wrote."""
    pieces, at = [], 0
    for first, end in () if completion.turns is None else completion.turns.spans:
        pieces += [decode(completion.tokens[at : first - 1].tolist()), _OPEN]
        pieces += [decode(completion.tokens[first:end].tolist()).strip(), _CLOSE]
        at = end
    return "".join([*pieces, last_turn(completion, decode)])


def opening(problem: Problem) -> str:
    """Returns a prompt as text for people: lines "role: content" of `problem.messages`, else `problem.prompt`."""
    messages = [f"{message['role']}: {message['content']}" for message in problem.messages]
    return "\n".join(messages) or problem.prompt


def last_turn(completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """Returns the text of the policy's last turn, without the stop token, for verifiers. Without an environment this is
    the whole completion. `decode` makes text of token ids."""
    spans = () if completion.turns is None else completion.turns.spans
    tokens = completion.tokens[spans[-1][1] if spans else 0 :]
    return decode((tokens if completion.finish_reason == "length" else tokens[:-1]).tolist())


def last_shown(text: str) -> str:
    """Returns the last turn of a text that `shown` made: what follows the last line </observation>, else all."""
    return text.rpartition(_CLOSE)[2]
