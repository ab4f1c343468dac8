"""Small batches under a switch interval of a microsecond, with faults in the engine, cancelled calls and stops between.

RPG_STRESS_BATCHES=10000 python -m pytest -s -m slow tests/rollout/jetstream/test_stress.py
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import sys
import threading
import time
from dataclasses import replace

import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.jetstream import orchestrator
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout

BATCHES = int(os.environ.get("RPG_STRESS_BATCHES", 300))
CALLERS = 4
STAGES = ("init_decode_state", "prefill", "insert", "generate", "release", "fetch")


class Injected(OSError):
    pass


class Cancelled(BaseException):
    """Ends a call from inside, as Ctrl-C does."""


@pytest.fixture
def microsecond():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def failing(period, counts, name, original):
    """`original`, but every `period`-th call fails."""
    calls = itertools.count(1)

    def call(*args, **kwargs):
        if next(calls) % period == 0:
            counts[name] += 1
            raise Injected(name)
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("batches", [48, pytest.param(BATCHES, marks=pytest.mark.slow)])
def test_faults_cancellations_and_stops_leave_only_right_tokens(
    build, work, expected, is_same, monkeypatch, microsecond, batches
):
    sampler = JetStreamRollout(build("orchestrator").engine)
    sampler.generate(work)
    counts, rng, left = collections.Counter(), random.Random(0), iter(range(batches))
    period = 31 if batches < 100 else 251
    wait = orchestrator.Ticket.wait

    def cancelled_wait(ticket, driver):
        if rng.random() < 0.05:
            ticket._ended.wait(rng.random() * 0.02)
            raise Cancelled
        wait(ticket, driver)

    def calls():
        for _ in left:
            i = rng.randrange(len(work.prompts) - 1)
            part = replace(work, prompts=work.prompts[i : i + 2], prompt_ids=work.prompt_ids[i : i + 2])
            if rng.random() < 0.01:
                counts["stopped"] += 1
                rng.choice([sampler.close, sampler.driver().stop])()
            try:
                right = is_same(sampler.generate(part), expected[i : i + 2])
                outcomes.append("right" if right else "wrong")
            except RolloutError as error:
                known = isinstance(error.__cause__, Injected) or "stopped before" in str(error)
                outcomes.append("fault" if known else repr(error))
            except Cancelled:
                outcomes.append("cancelled")

    outcomes: list[str] = []
    with monkeypatch.context() as patch:
        places = [(sampler.engine, stage, period) for stage in STAGES]
        places.append((orchestrator.Ticket, "note", 8 * period))  # delivery, once per slot
        for owner, name, every in places:
            patch.setattr(owner, name, failing(every, counts, name, getattr(owner, name)))
        patch.setattr(orchestrator.Ticket, "wait", cancelled_wait)
        callers = [threading.Thread(target=calls, daemon=True) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        seen, since = -1, time.monotonic()
        while any(caller.is_alive() for caller in callers):
            if len(outcomes) != seen:
                seen, since = len(outcomes), time.monotonic()
            assert time.monotonic() - since < 60, f"hangs after {seen} batches"
            time.sleep(0.05)
    tally = collections.Counter(outcomes)
    print(dict(tally), dict(counts))
    assert tally.keys() <= {"right", "fault", "cancelled"} and tally.total() == batches
    assert tally["right"] > batches / 10 and tally["fault"] > 0
    assert is_same(sampler.generate(work), expected)
    sampler.close()
