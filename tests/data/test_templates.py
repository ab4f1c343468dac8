from __future__ import annotations

import pytest

from rpg_jax.data.chat import ChatTemplate
from rpg_jax.data.prompts import Problem, apply_template, encode_prompt, filter_length, strip_template
from rpg_jax.data.tokenizer import train_sentencepiece

PAPER = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "What is $\\frac{1}{2}$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def test_the_papers_prompt():
    assert apply_template("paper", "What is $\\frac{1}{2}$?") == PAPER
    assert strip_template(PAPER) == "What is $\\frac{1}{2}$?"
    assert strip_template("other") == "other"


def test_a_template_of_ones_own_and_an_unknown_one():
    assert apply_template("{x} {question}", "{question}?") == "{x} {question}?"
    with pytest.raises(ValueError, match="'papre'; known: paper"):
        apply_template("papre", "1+1?")


@pytest.fixture
def tokenizer(tmp_path):
    return train_sentencepiece(["abcdefghijk <|user|>system\n"], tmp_path / "tokenizer.model")


def problem(prompt, prompt_id=0, system=""):
    return Problem(prompt_id, prompt, "1", "test", system=system)


def test_prompts_go_through_the_chat_template_where_there_is_one(tokenizer):
    assert tokenizer.decode(encode_prompt(problem("abc", system="be"), tokenizer)) == "be\n\nabc"
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if enable_thinking %}k{% endif %}"
    tokenizer.chat = ChatTemplate(template)
    assert tokenizer.decode(encode_prompt(problem("abc", system="be"), tokenizer)) == "<|system|>be<|user|>abck"
    assert tokenizer.decode(encode_prompt(problem("abc"), tokenizer, thinking=False)) == "<|user|>abc"


def test_problems_with_long_prompts_are_apart_and_ids_are_distinct(tokenizer):
    problems = [problem("abc", 0), problem("abcdefg", 1), problem("efgh", 2)]
    assert filter_length(problems, tokenizer, 4, thinking=True) == ([problems[0], problems[2]], [problems[1]])
    with pytest.raises(ValueError, match="prompt_id 0"):
        filter_length([problems[0]] * 2, tokenizer, 4, thinking=True)
