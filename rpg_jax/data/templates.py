"""Prompts around questions: the paper's instruction, the model's chat template, and the limit on prompt length."""

from collections.abc import Iterable

import numpy as np

from rpg_jax.data.prompts import Problem
from rpg_jax.data.tokenizer import Tokenizer

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
    """The question inside a template: `template` is the name of a template, or a text that holds {question}.

    Raises:
      ValueError: `template` is neither a known name nor a text with {question}.
    """
    text = TEMPLATES.get(template, template)
    if text.count("{question}") != 1:
        raise ValueError(
            f"unknown prompt template {template!r}; known: {', '.join(TEMPLATES)}, or a text with {{question}}"
        )
    before, after = text.split("{question}")  # not str.format: questions and templates are full of LaTeX braces
    return before + question + after


def strip_template(prompt: str) -> str:
    """The question of a prompt that has the paper's template. A prompt without the template is returned unchanged."""
    if prompt.startswith(_PAPER_BEFORE) and prompt.endswith(_PAPER_AFTER):
        return prompt[len(_PAPER_BEFORE) : -len(_PAPER_AFTER)]
    return prompt


def rendered(problem: Problem, tokenizer: Tokenizer, *, thinking: bool = True) -> str:
    """The text that the policy continues: the prompt inside the tokenizer's chat template, if it has one."""
    messages = problem.opening
    if tokenizer.chat is None:
        return "\n\n".join(message["content"] for message in messages)
    return tokenizer.chat(messages, thinking=thinking)


def encode_prompt(problem: Problem, tokenizer: Tokenizer, *, thinking: bool = True) -> np.ndarray:
    """Token ids i32[n] of the text that `rendered` makes of the prompt."""
    return np.asarray(tokenizer.encode(rendered(problem, tokenizer, thinking=thinking)), np.int32)


def filter_length(
    problems: Iterable[Problem], tokenizer: Tokenizer, max_tokens: int, *, thinking: bool
) -> tuple[list[Problem], list[Problem]]:
    """(problems whose prompts have at most `max_tokens` tokens, problems with longer prompts), both in order.

    Raises:
      ValueError: two problems share a `prompt_id`.
    """
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
