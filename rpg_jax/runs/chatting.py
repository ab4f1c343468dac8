"""Conversations in the terminal: a person plays an environment, or talks with a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.runs import policy, run_folder
from rpg_jax.runs.experiment import make_stage
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import check_trusted, resolve

Read = Callable[[str], str]


def chat(
    run: str | None, config: ConfigDict | None, step: int | None, temperature: float, seed: int, *, trust: bool = False
) -> None:
    """Plays the environment of a run or a config. If a run has no environment, talks with the run's policy.

    Raises ValueError if a config has no environment, or if a run names code to import and `trust` is False.
    """
    if run is None:
        assert config is not None
        if config.environment.name is None:
            raise ValueError("--chat with a config plays its environment: add --config.environment.name=NAME")
        return play(resolve(config), seed)
    with run_folder.opened(run) as folder:
        own = run_folder.read_config(folder.files)
        if own.environment.name is None:
            return talk(policy.of_run(folder, step), temperature, seed)
        check_trusted(own, run, trust=trust)
        return play(own, seed)


def play(config: ConfigDict, seed: int, read: Read = input) -> None:
    """A person is the policy: answers the held-out problem number `seed` of the first set, turn by turn."""
    stage = make_stage(config)
    assert stage is not None
    with stage:
        problems = next(iter(Task.from_config(config, train=False).held_out.values()))
        [problem] = stage.opened([problems[seed % len(problems)]])
        messages, total, turns = _show(problem.opening), 0.0, 0
        while turns < config.environment.max_turns and (said := _line(read)):
            turns += 1
            verdict = stage.step(problem, messages, said)
            if verdict.value is None:
                print(f"the environment failed: {verdict.error} ({verdict.detail})")
                return
            total += verdict.value["reward"]
            print(f"reward {verdict.value['reward']:g}")
            if verdict.value["done"]:
                break
            messages += [{"role": "assistant", "content": said}, *_show(verdict.value["observation"])]
        print(f"turns {turns}, reward {total:g}, reference answer {problem.answer!r}")


def talk(opened: policy.Policy, temperature: float, seed: int, read: Read = input) -> None:
    """A person talks with a policy, which reads the whole conversation at every turn."""
    messages: list[dict[str, str]] = []
    while said := _line(read):
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in opened.chat(messages, temperature=temperature, seed=seed):
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


def _line(read: Read) -> str:
    """The line that the person types; "" ends the conversation."""
    try:
        return read("> ")
    except EOFError:
        return ""


def _show(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    for message in messages:
        print(f"[{message['role']}] {message['content']}")
    return list(messages)
