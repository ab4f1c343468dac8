"""Measures a trained policy: reward, KL to the start, and what it has lost of the start.

Every number is of samples at temperature 1 of one policy and log-probabilities of the other, so each is unbiased:

- KL(π‖π₀) in nats a completion is the mean of log π/π₀ over completions of held-out questions that π samples.
- KL(π₀‖π) in nats a token is the mean of log π₀/π over the start's own answers to general questions; exp of the mean of
  −log π over these tokens is the perplexity of π on them.
"""

import json
import re
from pathlib import Path

import numpy as np

from examples import sums
from rpg_jax.report.scores import clustered_standard_error
from rpg_jax.runs.policy import Policy, Sample
from rpg_jax.storage import write_atomically

_HERE = Path(__file__).parent
K = 8  # completions of each held-out question
ANSWER = 32  # tokens of an answer to a general question, at most


def questions() -> list[str]:
    """200 general questions, written for this project."""
    return (_HERE / "questions.txt").read_text(encoding="utf-8").splitlines()


def facts() -> list[tuple[str, str]]:
    """Questions with one right answer, which no run trains."""
    lines = (_HERE / "facts.tsv").read_text(encoding="utf-8").splitlines()
    return [(question, answer) for question, _, answer in (line.partition("\t") for line in lines)]


def start_answers(start: Policy, file: Path) -> list[Sample]:
    """The start's answers to `questions`, from `file` if it is there."""
    if not file.exists():
        answers = start.sample(questions(), max_tokens=ANSWER, seed=7)
        lines = [{"tokens": s.tokens.tolist(), "logprobs": s.logprobs.tolist()} for (s,) in answers]
        write_atomically(file, json.dumps(lines))
    kept = json.loads(file.read_text(encoding="utf-8"))
    return [Sample("", np.array(s["tokens"]), np.array(s["logprobs"], np.float32), "length") for s in kept]


def judge(policy: Policy, start: Policy, answers: list[Sample]) -> dict[str, float]:
    """The measured numbers of a policy; `answers` are `start_answers`."""
    problems = sums.Problems().problems("held out")
    prompts = [p.prompt for p in problems]
    groups = policy.sample(prompts, k=K, max_tokens=20, seed=11)
    rewards = [[sums.last_number(s.text, p.answer, p.prompt) for s in g] for p, g in zip(problems, groups, strict=True)]
    flat = [s for g in groups for s in g]
    of_start = start.logprobs([prompt for prompt in prompts for _ in range(K)], flat)
    log_ratios = [float(np.sum(s.logprobs - old)) for s, old in zip(flat, of_start, strict=True)]
    own = policy.logprobs(questions(), answers)
    lost = np.concatenate([s.logprobs - new for s, new in zip(answers, own, strict=True)])
    general = policy.sample(questions()[:64], max_tokens=ANSWER, seed=13)
    known = policy.sample([question for question, _ in facts()], max_tokens=24, temperature=0.0)
    right = [_says(s.text, answer) for (s,), (_, answer) in zip(known, facts(), strict=True)]
    return {
        "reward": float(np.mean(rewards)),
        "reward_se": clustered_standard_error(np.mean(rewards, axis=1)),
        "kl": float(np.mean(log_ratios)),
        "kl_se": clustered_standard_error(np.reshape(log_ratios, (-1, K)).mean(axis=1)),
        "length": float(np.mean([len(s.tokens) for s in flat])),
        "entropy": float(-np.mean(np.concatenate([s.logprobs for s in flat]))),
        "lost": float(lost.mean()),
        "lost_se": float(np.sqrt(lost.var() / len(lost))),
        "perplexity": float(np.exp(-np.concatenate(own).mean())),
        "facts": float(np.mean(right)),
        "general_length": float(np.mean([len(s.tokens) for (s,) in general])),
        "general_entropy": float(-np.mean(np.concatenate([s.logprobs for (s,) in general]))),
    }


def _says(text: str, answer: str) -> bool:
    return re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE) is not None
