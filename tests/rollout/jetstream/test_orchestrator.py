"""Faults, races and stops of JetStream's driver: each ends at the call it concerns, and none ends the process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from concurrent import futures
from dataclasses import replace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.jetstream import orchestrator
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.request import Row
from rpg_jax.rollout.schedule import Chunk


@pytest.fixture
def sampler(build):
    """A rollout of its own around the shared, compiled engine."""
    made = JetStreamRollout(build("orchestrator").engine)
    yield made
    made.close()


def failing(times: list[int], original):
    """`original`, but each call lowers `times` by one, and the call that reaches 0 raises."""

    def call(*args, **kwargs):
        times[0] -= 1
        if times[0] == 0:
            raise OSError("device fell off the bus")
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("stage", ["prefill", "insert", "generate"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_fault_in_the_engine_is_raised_at_the_call_and_the_next_call_is_right(
    sampler, work, expected, is_same, monkeypatch, stage, call
):
    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine, stage, failing([call], getattr(sampler.engine, stage)))
        with pytest.raises(RolloutError, match="device fell off the bus") as caught:
            sampler.generate(work)
    assert isinstance(caught.value.__cause__, OSError)
    assert is_same(sampler.generate(work), expected)


def test_a_fault_in_allocating_the_cache_is_raised_at_the_call(build, work, expected, is_same, monkeypatch):
    made = JetStreamRollout(build("orchestrator").engine)
    with monkeypatch.context() as patch:
        patch.setattr(made.engine, "init_decode_state", failing([1], made.engine.init_decode_state))
        with pytest.raises(RolloutError, match="device fell off the bus"):
            made.generate(work)
    assert is_same(made.generate(work), expected)
    made.close()


def test_a_fault_in_delivery_is_raised_at_the_call(sampler, work, expected, is_same, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(orchestrator.Ticket, "note", failing([3], orchestrator.Ticket.note))
        with pytest.raises(RolloutError, match="generate-0 thread failed"):
            sampler.generate(work)
    assert is_same(sampler.generate(work), expected)


@pytest.mark.parametrize("how", ["driver", "close"])
def test_a_stop_under_load_leaves_no_caller_waiting(sampler, work, expected, is_same, monkeypatch, how):
    caught, original, driver = [], sampler.engine.generate, sampler.driver()

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return original(*args, **kwargs)

    def call():
        try:
            sampler.generate(work)
        except RolloutError as error:
            caught.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine, "generate", slow)
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        deadline = time.monotonic() + 20
        while len(driver._channels) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        driver.stop() if how == "driver" else sampler.close()
        for caller in callers:
            caller.join(timeout=20)
    assert not any(caller.is_alive() for caller in callers)
    assert len(caught) == 3 and all("stopped before" in str(error) for error in caught)
    assert is_same(sampler.generate(work), expected)


def test_an_interrupted_call_frees_its_slots(sampler, work, expected, is_same, monkeypatch):
    def interrupted(self, driver):
        time.sleep(0.05)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orchestrator.Ticket, "wait", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                sampler.generate(work)
    assert is_same(sampler.generate(work), expected)


def test_a_call_that_is_interrupted_while_it_is_placed_does_not_hold_up_the_next(
    sampler, work, expected, is_same, monkeypatch
):
    def interrupted(request):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sampler.driver(), "place_request_on_prefill_queue", interrupted)
        sampler.generate(work)
    assert is_same(within(20, lambda: sampler.generate(work)), expected)


def test_a_rollout_may_be_closed_by_a_thread_of_its_own(sampler, work, expected, is_same):
    threads = sampler.driver()._all_threads
    with pytest.raises(RolloutError, match="stopped before"):
        within(20, lambda: sampler.generate(replace(work, on_group=lambda *_: sampler.close())))
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert is_same(sampler.generate(work), expected)


def within(seconds, call):
    """The result or the exception of `call`; TimeoutError if it does not end."""
    done = futures.Future()

    def run():
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=seconds)


def test_weights_changed_under_a_running_rollout_are_an_error(sampler, model, work, monkeypatch):
    _, params = model
    original = sampler.engine.generate

    def swapped(*args, **kwargs):
        sampler.sync_weights(params, sampler.weights.version + 1)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine, "generate", swapped)
        with pytest.raises(RolloutError, match="mix two policies"):
            sampler.generate(work)
    sampler.sync_weights(params, 0)


def test_requests_that_clients_have_closed_hold_up_the_next_by_the_smallest_prefills_only(
    sampler, work, expected, is_same, monkeypatch
):
    shapes, prefill = [], sampler.engine.prefill

    def counted(*, tokens, lengths):
        shapes.append(tokens.shape)
        return prefill(tokens=tokens, lengths=lengths)

    monkeypatch.setattr(sampler.engine, "prefill", counted)
    driver, channel = sampler.driver(), Mock()
    for i in range(6):
        how = {"cancelled": True, "channel": channel}
        rows = [Row(np.ones(20, np.int32), (0, 0, i, j), work.sampling, prompt_row=j, **how) for j in (0, 1)]
        driver.submit([Chunk(np.ones((2, 32), np.int32), np.full(2, 20, np.int32), rows)], channel)
        driver.retire(channel)
    assert is_same(sampler.generate(work), expected)
    assert shapes[:6] == [(1, 16)] * 6


def test_a_dropped_rollout_stops_its_threads(build, work):
    made = JetStreamRollout(build("orchestrator").engine)
    made.generate(work)
    threads = made.driver()._all_threads
    del made
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def test_the_cache_is_freed_between_rollouts(sampler, work):
    size = jax.tree.leaves(sampler.engine.init_decode_state()[0].cache.values)[0].shape
    others = [x for x in jax.live_arrays() if x.shape == size]  # kept by the tracebacks of other tests
    sampler.generate(work)
    deadline = time.monotonic() + 20
    while len([x for x in jax.live_arrays() if x.shape == size]) > len(others):
        assert time.monotonic() < deadline, "the cache outlives the rollout"
        time.sleep(0.02)


@pytest.mark.slow
def test_importing_jetstream_leaves_the_root_logger_and_the_process_alone():
    program = (
        "import logging, sys; before = (logging.getLogger().level, list(logging.getLogger().handlers))\n"
        "from rpg_jax.rollout.jetstream.adapter import orchestrator\n"
        "assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before\n"
        "assert 'tensorflow' not in sys.modules\n"
        "d = orchestrator.Driver()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert logging.getLogger("jetstream").getEffectiveLevel() == logging.WARNING
