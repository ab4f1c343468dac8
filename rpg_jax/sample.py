"""Completes prompts of your own with a run's policy, or chats: with the policy, or as the policy with an environment.

python -m rpg_jax.sample --run=runs/tiny-rpg-reinforce-urkl-seed0 --prompt=17+25= --prompt=8+9= --k=4
python -m rpg_jax.sample --chat --model=smollm2-135m   # a folder, OWNER/NAME on the hub, FILE.gguf
python -m rpg_jax.sample --chat --config=tiny --config.environment.name=module:Class   # you are the policy
python -m rpg_jax.sample --chat --run=runs/NAME   # the run's environment; without one, its policy answers you
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpg_jax.runs import cli, config_files

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from rpg_jax.runs.policy import Policy


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv`, by default those of the process; returns its exit code."""
    parser = cli.parser("sample", __doc__)
    parser.add_config()
    parser.add_argument("--run", help="folder of the run, local or gs://BUCKET/…")
    parser.add_argument("--model", help="in place of a run a model, as --config.model.path takes it")
    parser.add_argument("--prompt", action="append", help="text to complete; may be given again")
    parser.add_switch("chat", help="talk turn by turn; an empty line ends it")
    parser.add_argument("--k", type=int, default=4, help="completions of each (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the last)")
    parser.add_switch("trust", help=cli.TRUST)
    return cli.run(sample, parser, argv)


def sample(options: argparse.Namespace) -> None:
    """Prints each prompt and, indented, its completions; with --chat calls `chat`. `options` has the flags of the
    command. A completion that the limit of tokens cuts ends with "…". Raises ValueError if the flags do not fit
    together, or there is no such run or model."""
    loaded = cli.load_config(options)
    if options.chat:
        chat(options, loaded)
        return
    if (options.run is None) == (options.model is None) or not options.prompt or loaded is not None:
        raise ValueError("give --run=runs/NAME or --model=NAME, and one or more --prompt=TEXT; --config is for --chat")
    from rpg_jax.runs.policy import Policy  # loads JAX: wrong flags need not wait for it

    how = {name: getattr(options, name) for name in ("k", "temperature", "seed")}
    policy = Policy.from_pretrained(options.model) if options.model else Policy.from_run(options.run, step=options.step)
    for prompt, samples in zip(options.prompt, policy.sample(options.prompt, **how), strict=True):
        print(prompt)
        for sample in samples:
            cut = " …" if sample.finish_reason == "length" else ""
            print(f"  {sample.text.replace(chr(10), chr(10) + 4 * ' ')}{cut}")


def chat(options: argparse.Namespace, loaded: config_files.Loaded | None) -> None:
    """A person at the terminal plays the environment of a config or a run, or talks with a policy. Exactly one of
    `options.run`, `options.model` and `loaded`, the file of --config, is not None. With a model, or a run without an
    environment, the person talks with the policy. Raises ValueError if two or none are given, if a config has no
    environment, or without --trust if a run with an environment names code to import or a judge."""
    if (options.run, options.model, loaded).count(None) != 2:
        raise ValueError("--chat needs --run=runs/NAME, --model=NAME or --config=FILE, and one of them alone")
    from rpg_jax.runs import policy, run_folder  # loads JAX
    from rpg_jax.runs.arguments import check_trusted
    from rpg_jax.runs.resolve import resolve

    if options.model:
        return talk(policy.Policy.from_pretrained(options.model), options.temperature, options.seed)
    if loaded is not None:
        if loaded.config.environment.name is None:
            raise ValueError("--chat with a config plays its environment: add --config.environment.name=NAME")
        return play(resolve(loaded.config), options.seed)
    with run_folder.opened(options.run) as folder:
        own = run_folder.read_config(folder.files)
        if own.environment.name is None:
            return talk(policy.of_run(folder, options.step), options.temperature, options.seed)
        check_trusted(own, options.run, trust=options.trust)
        return play(own, options.seed)


def play(config: ConfigDict, seed: int, read: Callable[[str], str] = input) -> None:
    """A person is the policy: answers a problem of the config's environment turn by turn, and sees the rewards. The
    problem has the number `seed`, modulo the number of problems, in the first held-out set. `read` shows a prompt and
    returns the typed line. The conversation ends with an empty line, the end of the input, the environment's word or
    failure, or after `environment.max_turns` turns. Raises ValueError if the environment fails at the beginning."""
    from rpg_jax.runs.experiment import make_stage  # loads JAX
    from rpg_jax.runs.problems import Task

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


def talk(opened: Policy, temperature: float, seed: int, read: Callable[[str], str] = input) -> None:
    """A person talks with a policy, which reads the whole conversation at every turn. Prints the answers in pieces.
    `temperature` 0 is greedy. `read` shows a prompt and returns the typed line; an empty line or the end of the input
    ends the conversation. Raises ValueError if the conversation has more tokens than `task.max_prompt_tokens`."""
    messages: list[dict[str, str]] = []
    while said := _line(read):
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in opened.chat(messages, temperature=temperature, seed=seed):
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


def _line(read: Callable[[str], str]) -> str:
    """The line that the person types; "" ends the conversation."""
    try:
        return read("> ")
    except EOFError:
        return ""


def _show(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    for message in messages:
        print(f"[{message['role']}] {message['content']}")
    return list(messages)


if __name__ == "__main__":
    sys.exit(main())
