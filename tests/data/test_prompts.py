from __future__ import annotations

import json

import pytest

from rpg_jax.data.prompts import Problem, PromptStream

PROBLEMS = [Problem(prompt_id=i, prompt=f"p{i}", answer=str(i), source="test") for i in range(22)]


def stream(problems=PROBLEMS, batch_size=8, seed=3, **kwargs) -> PromptStream:
    return PromptStream(problems, batch_size=batch_size, seed=seed, **kwargs)


def ids(batches) -> list[int]:
    return [problem.prompt_id for batch in batches for problem in batch]


def test_each_epoch_sees_every_problem_once_in_another_order():
    s = stream(batch_size=1)
    first, second = ids(next(s) for _ in PROBLEMS), ids(next(s) for _ in PROBLEMS)
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second != list(range(22))


def test_the_seed_decides_the_order():
    assert ids([next(stream(seed=3))]) == ids([next(stream(seed=3))])
    assert ids([next(stream(seed=3))]) != ids([next(stream(seed=4))])


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_see_the_one_host_order(hosts):
    alone = stream()
    together = [stream(host_index=h, host_count=hosts) for h in range(hosts)]
    for _ in range(7):
        assert next(alone) == [problem for s in together for problem in next(s)]


@pytest.mark.parametrize("done", [0, 1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 16])
def test_a_restored_stream_continues_in_the_middle_of_an_epoch(done, prefetch):
    original = stream(prefetch=prefetch)
    for _ in range(done):
        next(original)
    state = json.loads(json.dumps(original.state()))
    rest = [next(original) for _ in range(6)]
    restored = stream()
    next(restored)
    restored.restore(state)
    assert [next(restored) for _ in range(6)] == rest
    assert restored.state() == original.state()


def test_a_state_moves_to_another_number_of_hosts_and_batch_size():
    original = stream()
    next(original)
    restored = [stream(batch_size=4, host_index=h, host_count=2) for h in range(2)]
    for s in restored:
        s.restore(original.state())
    expected = ids([next(original)])
    assert ids(next(s) for _ in range(2) for s in restored) == expected


def test_a_state_over_other_problems_is_refused():
    state = stream().state()
    with pytest.raises(ValueError, match="seed.*3, 4"):
        stream(seed=4).restore(state)
    changed = [*PROBLEMS[:-1], Problem(prompt_id=21, prompt="p21", answer="0", source="test")]
    with pytest.raises(ValueError, match="fingerprint"):
        stream(changed).restore(state)


def test_impossible_streams_are_refused():
    with pytest.raises(ValueError, match="no problems"):
        stream([])
    with pytest.raises(ValueError, match="batch_size=8.*host_count=3"):
        stream(host_count=3)
    with pytest.raises(ValueError, match="host_index"):
        stream(host_index=2, host_count=2)
