from __future__ import annotations

import json

import pytest

from rpg_jax.data.prompts import Problem, PromptStream, fingerprint

PROBLEMS = [Problem(prompt_id=i, prompt=f"p{i}", answer=str(i), source="test") for i in range(22)]


def stream(problems=PROBLEMS, seed=3) -> PromptStream:
    return PromptStream(problems, seed=seed)


def ids(problems) -> list[int]:
    return [problem.prompt_id for problem in problems]


def test_each_epoch_sees_every_problem_once_in_another_order():
    s = stream()
    first, second = ids(s.take(22)), ids(s.take(22))
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second != list(range(22))


def test_the_seed_decides_the_order():
    assert ids(stream(seed=3).take(8)) == ids(stream(seed=3).take(8))
    assert ids(stream(seed=3).take(8)) != ids(stream(seed=4).take(8))


def test_the_order_does_not_depend_on_how_many_are_taken_at_once():
    s = stream()
    assert ids([*s.take(5), *s.take(0), *s.take(40), *s.take(1)]) == ids(stream().take(46))


@pytest.mark.parametrize("done", [0, 8, 16, 40])
def test_a_restored_stream_continues_in_the_middle_of_an_epoch(done):
    original = stream()
    original.take(done)
    state = json.loads(json.dumps(original.state()))
    rest = original.take(48)
    restored = stream()
    restored.take(3)
    restored.restore(state)
    assert restored.take(48) == rest
    assert restored.state() == original.state()


def test_a_state_over_other_problems_is_refused():
    state = stream().state()
    with pytest.raises(ValueError, match="seed.*3, 4"):
        stream(seed=4).restore(state)
    changed = [*PROBLEMS[:-1], Problem(prompt_id=21, prompt="p21", answer="0", source="test")]
    with pytest.raises(ValueError, match="fingerprint"):
        stream(changed).restore(state)


def test_a_stream_of_no_problems_is_refused():
    with pytest.raises(ValueError, match="no problems"):
        stream([])


def test_the_messages_of_an_environment_are_in_the_fingerprint():
    said = [({"role": "user", "content": text},) for text in ("a", "b")]
    assert len({fingerprint([Problem(0, "p", "", "t", messages=messages)]) for messages in [(), *said]}) == 3
