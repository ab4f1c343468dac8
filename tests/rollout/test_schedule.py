"""The plan of prefills; and conversations: an environment's tokens are in the cache once, the same by every driver."""

from __future__ import annotations

import dataclasses
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rpg_jax import losses, rollout
from rpg_jax.rollout import Decoding, RolloutError
from rpg_jax.rollout.drivers import make_rollout
from rpg_jax.rollout.request import Reply
from rpg_jax.rollout.schedule import plan
from rpg_jax.types import Sampling

CAPACITY = 128
STOPS = (3, 5, 9, 17, 28, 33, 40, 46)


class Echo:
    """Replies with tokens that depend on the turn; ends after `most` turns."""

    turn_tokens = 6

    def __init__(self, delay=0.0, longest=9, most=3, out_of_turns=False):
        self.delay, self.longest, self.most, self.out_of_turns = delay, longest, most, out_of_turns
        self.turns: dict[tuple[int, int], list[list[int]]] = {}
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(8)

    def respond(self, place, index, tokens, finish_reason) -> Future[Reply]:
        with self.lock:
            turns = self.turns.setdefault((place, index), [])
            turns.append(tokens.tolist())
        return self.pool.submit(self._reply, place, index, tokens, finish_reason, len(turns))

    def _reply(self, place, index, tokens, finish_reason, turn) -> Reply:
        if self.delay:
            time.sleep(self.delay * ((place + index) % 3))
        if finish_reason == "length" or turn == self.most:
            return Reply(None, reward=10.0 + turn, out_of_turns=self.out_of_turns and finish_reason == "stop")
        length = 1 + (int(tokens.sum()) + index) % self.longest
        return Reply(np.arange(length, dtype=np.int32) * 7 % 50, reward=float(turn))


@pytest.fixture(scope="module")
def talk(model, model_config, work):
    """The conversations of a request by a driver, their environment, and the rollout's usage."""

    def talk(driver="lockstep", environment=None, max_tokens=48, capacity=CAPACITY, **options):
        environment = environment or Echo()
        decoding = Decoding(capacity=capacity, **{"slots": 8, "steps_per_dispatch": 4, "patience_s": 60.0, **options})
        own = make_rollout(driver, model_config, *model, decoding)
        sampling = dataclasses.replace(work.sampling, max_tokens=max_tokens, stop_token_ids=STOPS)
        try:
            groups = own.generate(dataclasses.replace(work, sampling=sampling, environment=environment))
        finally:
            own.close()
        return groups, environment, own.usage

    return talk


@pytest.fixture(scope="module")
def spoken(talk):
    return talk()


def test_a_conversation_has_the_turns_that_the_environment_read_and_the_tokens_that_it_wrote(spoken):
    groups, environment, usage = spoken
    observed = 0
    for place, group in enumerate(groups):
        for index, c in enumerate(group):
            turns = environment.turns[place, index]
            edges = np.flatnonzero(np.diff(np.concatenate([[True], c.turns.observed, [True]]).astype(int)))
            assert np.concatenate(turns).tolist() == c.tokens[c.sampled].tolist()
            assert [len(t) for t in turns] == (edges[1::2] - edges[::2]).tolist()
            assert (c.logprobs[c.turns.observed] == 0).all() and (c.logprobs[c.sampled] < 0).all()
            assert len(c.turns.rewards) == len(turns) <= 3 and c.turns.rewards[-1] >= 10
            assert all(t[-1] in STOPS for t in turns[:-1])
            assert (c.finish_reason == "stop") == (int(c.tokens[-1]) in STOPS)
            observed += c.turns.observed.sum()
    assert {len(c.turns.rewards) for group in groups for c in group} == {1, 2, 3}
    assert usage.extended_tokens == observed and usage.again_tokens == 0


@pytest.mark.parametrize("driver", ["lockstep", pytest.param("orchestrator", marks=pytest.mark.slow)])
def test_a_conversation_that_the_limit_of_turns_ends_says_so(talk, driver):
    """Its bits are those of a conversation that its environment ends. A turn that is too long has its own reason."""
    done, out = (sum(talk(driver, Echo(most=1, out_of_turns=out))[0], []) for out in (False, True))
    for a, b in zip(done, out, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes()
        assert (a.finish_reason, b.finish_reason) in {("stop", "turns"), ("length", "length")}
        assert b.truncated and a.truncated == (a.finish_reason == "length")
    assert {c.finish_reason for c in out} == {"length", "turns"}


@pytest.mark.parametrize("driver", ["lockstep", "orchestrator"])
def test_the_time_at_which_replies_come_changes_no_bit(spoken, talk, driver):
    """Where they come one by one, and where several come together."""
    groups, _, usage = talk(driver, Echo(delay=0.02))
    assert usage.again_tokens == 0
    for a, b in zip(sum(spoken[0], []), sum(groups, []), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes()


def test_the_log_probs_are_those_of_one_forward_pass_over_the_whole_conversation(spoken, model, work):
    graphdef, params = model
    module = nnx.merge(graphdef, params)
    rows = [(prompt, c) for prompt, group in zip(work.prompts, spoken[0], strict=True) for c in group]
    tokens, segments = np.zeros((2, len(rows), CAPACITY), np.int32)
    for row, (prompt, c) in enumerate(rows):
        n = len(prompt) + len(c.tokens)
        tokens[row, :n], segments[row, :n] = np.concatenate([prompt, c.tokens]), 1
    hidden = module(tokens, np.tile(np.arange(CAPACITY, dtype=np.int32), (len(rows), 1)), segments)
    temperature = work.sampling.temperature
    following = jnp.asarray(tokens[:, 1:])
    logprobs, _ = losses.token_logprobs(hidden[:, :-1], module.head(), following, temperature=temperature)
    for row, (prompt, c) in enumerate(rows):
        own = logprobs[row, len(prompt) - 1 : len(prompt) - 1 + len(c.tokens)]
        np.testing.assert_allclose(c.logprobs[c.sampled], own[c.sampled], atol=1e-5)


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        pytest.param("lockstep", {"slots": 4}, marks=pytest.mark.slow),
        ("lockstep", {"patience_s": 0.0, "environment": Echo(delay=0.005)}),
        ("orchestrator", {}),
        ("orchestrator", {"patience_s": 0.0, "environment": Echo(delay=0.005)}),
        ("orchestrator", {"threads": 2, "refill": 0.5}),
    ],
    ids=["few slots", "lent slots", "orchestrator", "orchestrator, lent slots", "orchestrator, two threads"],
)
def test_slots_drivers_and_slow_environments_change_no_token(talk, spoken, is_same, driver, options):
    groups, _, usage = talk(driver, **options)
    assert is_same(groups, spoken[0])
    for a, b in zip(sum(groups, []), sum(spoken[0], []), strict=True):
        np.testing.assert_array_equal(a.turns.observed, b.turns.observed)
        np.testing.assert_array_equal(a.turns.rewards, b.turns.rewards)
    assert (usage.again_tokens > 0) == ("patience_s" in options)


def test_a_turn_and_a_conversation_end_at_their_limits(talk, spoken):
    """A turn of the limit's length has no stop token. An observation that leaves no room for a token is left out."""
    echo = Echo(longest=40)
    groups, environment, _ = talk(environment=echo, max_tokens=24)
    made = [(place, index, c) for place, group in enumerate(groups) for index, c in enumerate(group)]
    long = [environment.turns[place, index][-1] for place, index, c in made if c.finish_reason == "length"]
    assert all(len(c.tokens) <= 24 for _, _, c in made) and all(len(turn) <= 6 for turn in long)
    no_room = [(c, turns) for place, index, c in made if (turns := environment.turns[place, index])[-1][-1] in STOPS]
    cut = [c for c, turns in no_room if c.finish_reason == "length"]
    assert cut and all(not c.turns.observed[-1] and c.tokens[-1] in STOPS for c in cut)
    assert any(turn[-1] not in STOPS and len(turn) == 6 for turn in long)


def test_an_environment_s_failure_ends_its_own_conversation(talk, spoken):
    class Failing(Echo):
        def _reply(self, place, index, *turn):
            return Reply(None, error="timeout") if index == 1 else super()._reply(place, index, *turn)

    groups, _, _ = talk(environment=Failing())
    for group, expected in zip(groups, spoken[0], strict=True):
        assert [c.turns.error for c in group] == [None, "timeout", None, None]
        assert group[1].tokens.tolist() == expected[1].tokens[: len(group[1].tokens)].tolist()
        assert [c.tokens.tolist() for c in group[2:]] == [c.tokens.tolist() for c in expected[2:]]


def test_a_rollout_that_is_closed_while_an_environment_hangs_leaves_no_caller_waiting(build, work, is_same, expected):
    hung, asked = Future(), threading.Event()

    class Hung(Echo):
        def respond(self, *turn):
            asked.set()
            return hung

    own = build("orchestrator")
    request = dataclasses.replace(work, environment=Hung())
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(own.generate, request)
        assert asked.wait(60)
        own.close()
        with pytest.raises(RolloutError, match="stopped"):
            call.result(60)
    assert is_same(own.generate(work), expected)


def chunks(lengths, capacity, prefill_tokens, done=()):
    decoding = rollout.Decoding(slots=8, capacity=capacity, prefill_tokens=prefill_tokens)
    engine = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=50), decoding=decoding)
    prompts = [np.full(n, n % 50, np.int32) for n in lengths]
    request = rollout.Request(prompts, range(len(prompts)), 2, Sampling(max_tokens=8), 0, 0, done=frozenset(done))
    return prompts, *plan(engine, request)


@pytest.mark.parametrize("max_prompt_tokens", [1, 16, 24, 40, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 100, 512])
def test_the_largest_prefill_has_the_shape_that_a_plan_asks_for(max_prompt_tokens, prefill_tokens):
    capacity = rollout.capacity(max_prompt_tokens, 8)
    expected = rollout.prefill_shape(max_prompt_tokens, capacity, prefill_tokens)
    _, _, made = chunks([max_prompt_tokens] * 40, capacity, prefill_tokens)
    assert made[0].tokens.shape == expected == max(chunk.tokens.shape for chunk in made)


def test_every_prompt_is_in_one_chunk_of_its_length_and_every_row_names_it():
    lengths = [3, 40, 17, 5, 33, 16, 1, 20, 20]
    prompts, groups, made = chunks(lengths, 64, 64)
    assert sum(len(chunk.rows) for chunk in made) == 2 * len(prompts)
    for chunk in made:
        for row in chunk.rows:
            length = chunk.lengths[row.prompt_row]
            np.testing.assert_array_equal(chunk.tokens[row.prompt_row, :length], prompts[row.group])
            assert row in groups[row.group]


def test_prompts_that_are_done_leave_the_prefills_of_the_others_as_they_are():
    lengths = [3, 40, 17, 5, 33, 16, 1, 20, 20]
    done = {1, 3, 4, 7}
    prompts, groups, made = chunks(lengths, 64, 64, done)
    whole = chunks(lengths, 64, 64)[2]
    assert [len(group) for group in groups] == [0 if place in done else 2 for place in range(len(prompts))]
    assert len(made) < len(whole), "a chunk of done prompts alone is left out"
    kept = [chunk for chunk in whole if {row.group for row in chunk.rows} - done]
    for chunk, full in zip(made, kept, strict=True):
        np.testing.assert_array_equal(chunk.tokens, full.tokens)
        assert [row.prompt_row for row in chunk.rows] == [r.prompt_row for r in full.rows if r.group not in done]
