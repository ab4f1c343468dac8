"""Problems, the order in which training sees them, and the prompts that are made of them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from rpg_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt with its reference answer.

    Attributes:
      prompt_id: stable index, below 2**31. The random numbers of a completion depend on the index, so the index must
        not depend on the order, the host or the number of problems asked for.
      prompt: text of the user's turn; may be empty if `messages` are given.
      answer: reference answer, in the form that the verifier reads; empty for a row with a demonstration and no answer.
      source: name of the task or data set.
      samples: completions that evaluation samples: the number of rows with this problem, or the sum of their `samples`.
      system: text of the system turn; empty for none.
      question: the problem without any template around it, if this text is known; else the prompt.
      demonstrations: completions to imitate in supervised training.
      messages: the conversation that an environment or a caller opens with, in place of `system` and `prompt`; empty
        for these two. The first message may have "tools" as well as role and content.
    """

    prompt_id: int
    prompt: str
    answer: str
    source: str
    samples: int = 1
    system: str = ""
    question: str = ""
    demonstrations: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self):
        if not self.question:
            object.__setattr__(self, "question", self.prompt)
        object.__setattr__(self, "demonstrations", tuple(self.demonstrations))  # JSON makes a list of it
        object.__setattr__(self, "messages", tuple(self.messages))

    @property
    def opening(self) -> list[Mapping[str, Any]]:
        """The messages of the prompt: `messages` if there are any, else `system` (if not empty) and `prompt`."""
        if self.messages:
            return list(self.messages)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class PromptStream:
    """An endless stream of problems. Every epoch has a permutation of its own.

    The order depends on (problems, seed) only, so all hosts have the same order and position.

    Args:
      problems: N problems held in memory, or anything with `__len__` and `__getitem__`. `fingerprint` reads them all.
      seed: seed of the shuffle, in [0, 2**32).

    Raises ValueError if there are no problems.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int):
        if len(problems) == 0:
            raise ValueError("no problems to stream: the source is empty or every row was dropped")
        self._identity = {"problems": len(problems), "seed": seed, "fingerprint": fingerprint(problems)}
        self._dataset = (
            grain.MapDataset.source(problems)
            .seed(seed)
            .shuffle()
            .repeat(None)
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        )
        self._iterator = iter(self._dataset)

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems, and moves the position behind them. An epoch may end among them."""
        return [next(self._iterator) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Returns the position in the stream, for `restore`, as a dict that JSON can hold."""
        return {"iterator": self._iterator.get_state(), **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to the position `state`, a result of the method `state`: `take` returns the problems that came next.
        Raises ValueError if the state belongs to other problems or another seed."""
        differing = {k: (state.get(k), v) for k, v in self._identity.items() if state.get(k) != v}
        if differing:
            raise ValueError(
                f"this data position belongs to another stream (saved, current): {differing}; "
                "resume with the problems and seed of the saved run, or start a new run folder"
            )
        self._iterator = iter(self._dataset)
        self._iterator.set_state(state["iterator"])


def fingerprint(problems: Sequence[Problem]) -> int:
    """Returns one CRC-32 over prompt_id, system, prompt, answer and messages of all problems, in their order."""
    checksum = 0
    for p in problems:
        opening = (p.messages,) if p.messages else ()
        checksum = zlib.crc32(repr((p.prompt_id, p.system, p.prompt, p.answer, *opening)).encode(), checksum)
    return checksum


# The prompt of arXiv:2505.17508, as the README of its official code gives it.
_PAPER_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_PAPER_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

# Each holds {question} once.
TEMPLATES = {
    "paper": _PAPER_BEFORE + "{question}" + _PAPER_AFTER,
    "none": "{question}",
    "gsm8k": '{question} Let\'s think step by step and output the final answer after "####".',
    "countdown": "{question} Show your work, and give the final expression in <answer> </answer> tags.",
}


def apply_template(template: str, question: str) -> str:
    """Returns a template's text with the question in the place of {question}. `template` is a name in `TEMPLATES`, or
    a text. Raises ValueError if the text has not exactly one {question}."""
    text = TEMPLATES.get(template, template)
    if text.count("{question}") != 1:
        raise ValueError(f"unknown template {template!r}; known: {', '.join(TEMPLATES)}, or a text with {{question}}")
    before, after = text.split("{question}")  # not str.format: questions and templates are full of LaTeX braces
    return before + question + after


def strip_template(prompt: str) -> str:
    """Returns the question of a prompt in the paper's template. A prompt without the template is returned unchanged."""
    if prompt.startswith(_PAPER_BEFORE) and prompt.endswith(_PAPER_AFTER):
        return prompt[len(_PAPER_BEFORE) : -len(_PAPER_AFTER)]
    return prompt


def rendered(problem: Problem, tokenizer: Tokenizer, *, thinking: bool = True) -> str:
    """Returns the text that the policy continues: the problem's messages in the tokenizer's chat template, up to where
    the answer begins. `thinking` is Qwen3's `enable_thinking`, which other templates ignore. Without a chat template:
    the messages' contents, with a blank line between them. Raises ValueError if the template fails on the messages."""
    messages = problem.opening
    if tokenizer.chat is None:
        return "\n\n".join(message["content"] for message in messages)
    return tokenizer.chat(messages, thinking=thinking)


def encode_prompt(
    problem: Problem, tokenizer: Tokenizer, *, thinking: bool = True, limit: int | None = None
) -> np.ndarray:
    """Returns the token ids i32[n] of the text that `rendered` returns. If there are more than `limit` >= 1, only the
    last `limit` are returned (None: all). Raises ValueError as `rendered` does."""
    ids = np.asarray(tokenizer.encode(rendered(problem, tokenizer, thinking=thinking)), np.int32)
    return ids if limit is None else ids[-limit:]


def filter_length(
    problems: Iterable[Problem], tokenizer: Tokenizer, max_tokens: int, *, thinking: bool
) -> tuple[list[Problem], list[Problem]]:
    """Returns (problems whose prompts, as `encode_prompt` encodes them, have at most `max_tokens` tokens; problems with
    longer prompts), both in order. Raises ValueError if two problems share a `prompt_id`, and as `rendered` does."""
    fitting: list[Problem] = []
    longer: list[Problem] = []
    known: set[int] = set()
    for problem in problems:
        if problem.prompt_id in known:
            raise ValueError(f"two problems have prompt_id {problem.prompt_id}; the second is {problem.prompt[:80]!r}")
        known.add(problem.prompt_id)
        fits = len(encode_prompt(problem, tokenizer, thinking=thinking)) <= max_tokens
        (fitting if fits else longer).append(problem)
    return fitting, longer
