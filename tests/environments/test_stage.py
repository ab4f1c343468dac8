"""Prompts that an environment opens, and environments that cannot be made."""

import concurrent.futures
import dataclasses
import time

import pytest

from rpg_jax.data import Problem, encode_prompt
from rpg_jax.environments.environment import Declaration, find
from rpg_jax.environments.stage import Stage


def test_reset_opens_the_prompt_and_its_own_prompt_changes_nothing(stage, tokenizer, problems):
    opened = stage.opened(problems)
    assert [p.messages for p in opened] == [({"role": "user", "content": f"Count {i} to 6"},) for i in range(2)]
    assert "Count 0 to 6" in tokenizer.decode(encode_prompt(opened[0], tokenizer))
    assert dataclasses.replace(opened[0], messages=()) == problems[0]
    own = Problem(0, "p", "", "t", system="s", messages=({"role": "system", "content": "s"},))
    assert len(dataclasses.replace(own, messages=()).opening) == 2


@pytest.mark.parametrize(
    ("path", "options", "line"),
    [
        (".adder:Adder", {}, "'.adder:Adder' is not of the form module:name"),
        ("nowhere:Game", {}, "cannot import 'nowhere' for the environment 'nowhere:Game'"),
        ("adder:Game", {}, "module 'adder' has no function or class 'Game'"),
        ("adder:Adder", {"gaol": 1}, "environment.options {'gaol': 1} of adder:Adder: .*gaol"),
        ("collections:OrderedDict", {}, "OrderedDict has no reset"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(modules, path, options, line):
    with pytest.raises(ValueError, match=line):
        Stage(Declaration(path, pooled=False), options)


def test_closing_waits_for_nothing_that_hangs_in_this_process(modules, problems):
    with Stage(Declaration("adder:Patient", pooled=False), {}, deadline_s=1e9) as stage:
        hanging = stage.submit(stage.step, problems[0], problems[0].opening, "7")
        assert stage.step(problems[1], problems[1].opening, "1").error is None
        time.sleep(0.05)
    assert isinstance(hanging.exception(1), concurrent.futures.CancelledError)


@pytest.mark.slow
def test_a_worker_process_says_what_it_cannot_make(modules, problems):
    line = "cannot import 'nowhere' for the environment"
    with Stage(Declaration("nowhere:Game"), {}, workers=1) as stage, pytest.raises(ValueError, match=line):
        stage.opened(problems)


def test_a_reset_that_fails_names_the_problem(modules, problems):
    line = "reset of 'Count 0' failed: it must return messages"
    with (
        Stage(Declaration("adder:Adder", pooled=False, handed=Silent()), {}) as stage,
        pytest.raises(ValueError, match=line),
    ):
        stage.opened(problems)


class Silent:
    def reset(self, problem):
        return []

    def step(self, problem, messages, completion):
        raise AssertionError


def test_names():
    with pytest.raises(ValueError, match="unknown environment.name 'gess'; known: .*module:name"):
        find("gess")
    assert find("my.module:Game").pooled and not find("my.module:Game", in_process=True).pooled
    assert not find("here:Game", handed={"here:Game": Silent}).pooled
