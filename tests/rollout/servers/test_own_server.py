"""This project's own server samples for a trainer: the engine's tokens and log-probs, from the trainer's weights."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rpg_jax import models
from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.servers.server import KINDS
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling

from ..test_schedule import STOPS, Echo
from .proxy import FAULTS, Proxy

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow  # an engine of its own is compiled


@pytest.fixture(scope="module")
def server(build, letters, model_config, model):
    rollout = JetStreamRollout(build("orchestrator").engine, keep_state=True)
    rollout.sync_weights(jax.tree.map(lambda x: x * 0.5, model[1]), 0)  # not those that the trainer has

    class Disk:
        def read(self, folder):
            return models.read(folder, model_config)

        def swap(self, weights):
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            rollout.sync_weights(weights.placed(np.float32, jax.tree.map(lambda _: one, model[1])), 0)
            return rollout.weights.checksum()

    made = Server(rollout, letters, Sampling(stop_token_ids=(7,)), max_active=2000, http_port=0, disk=Disk())
    yield made
    made.stop(grace=5)
    rollout.sync_weights(model[1], 0)


@pytest.fixture
def trainer(server, served, model_config, model):
    """A rollout by the server, as a kind of server."""

    def make(kind, url=f"http://127.0.0.1:{server.http_port}", **options):
        kind = replace(KINDS[kind], loads=KINDS["rpg_jax"].loads)
        options = {"timeout": 300, "parallel": 40} | options
        return served(url, kind=kind, params=model[1], store=models.Saving(model_config, np.float32), **options)

    return make


def test_a_trainer_gets_the_tokens_and_log_probs_of_an_engine_of_its_own(trainer, work, expected, is_same):
    rollout = trainer("rpg_jax")
    assert is_same(rollout.generate(work), expected)
    assert rollout.take_counts()["servers/loads"] == 1


def test_behind_a_bad_network_they_are_the_same(trainer, server, work, expected, is_same):
    faults = (fault for i in itertools.count() for fault in [*[None] * 5, FAULTS[i % len(FAULTS)]])
    proxy = Proxy(server.http_port, faults)
    rollout, total = trainer("rpg_jax", proxy.url, parallel=8), Counter()
    for _ in range(3):
        assert is_same(rollout.generate(work), expected)
        total.update(rollout.take_counts())
    proxy.end()
    assert set(proxy.met) == {None, *FAULTS}
    assert total["servers/requests"] == 120 and total["servers/failures"] > 5 and total["servers/loads"] > 5


def test_conversations_are_those_of_an_engine_of_its_own_behind_a_bad_network_too(trainer, server, build, work):
    """Each turn is a request of its own with all tokens so far: its random numbers go on where the last one ended."""
    sampling = replace(work.sampling, stop_token_ids=STOPS)
    talks = [Echo(longest=4), Echo(longest=4), Echo(longest=4)]
    expected = build("lockstep").generate(replace(work, sampling=sampling, environment=talks[0]))
    made = trainer("rpg_jax").generate(replace(work, sampling=sampling, environment=talks[1]))
    faults = (fault for i in itertools.count() for fault in [*[None] * 7, FAULTS[i % len(FAULTS)]])
    proxy = Proxy(server.http_port, faults)
    again = trainer("rpg_jax", proxy.url, parallel=8).generate(replace(work, sampling=sampling, environment=talks[2]))
    proxy.end()
    assert {fault for fault in proxy.met} >= {None, "drop", "lose"}
    assert talks[0].turns == talks[1].turns == talks[2].turns
    assert {len(turns) for turns in talks[0].turns.values()} == {1, 2, 3}
    for one, two, three in zip(sum(expected, []), sum(made, []), sum(again, []), strict=True):
        for other in (two, three):
            assert one.tokens.tolist() == other.tokens.tolist() and one.finish_reason == other.finish_reason
            # An observation is appended to the cache there, and prefilled with all that was before it here.
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            assert one.turns.rewards.tolist() == other.turns.rewards.tolist()
            assert one.turns.observed.tolist() == other.turns.observed.tolist()


def test_in_the_form_of_vllm_each_completion_has_a_seed_and_the_log_probs_of_the_model(trainer, server, work):
    rollout = trainer("vllm")
    request = replace(work, sampling=replace(work.sampling, temperature=1.0))
    made = rollout.generate(request)
    for group, prompt in zip(made, request.prompts, strict=True):
        assert len({tuple(one.tokens) for one in group}) > 1
        for one in group:
            scores = server._admission.score(np.concatenate([prompt, one.tokens]).astype(np.int32))
            np.testing.assert_allclose(one.logprobs, scores.logprobs[len(prompt) :], atol=2e-5)
    few = replace(request, prompts=request.prompts[:2], prompt_ids=request.prompt_ids[:2])
    for again, first in zip(rollout.generate(few), made, strict=False):
        assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in first]


def test_weights_that_are_no_weights_are_refused_by_name(trainer, work):
    rollout = trainer("rpg_jax")
    folder = next(Path(rollout.weights._home).iterdir())
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(RolloutError, match="answered 400: .*model.safetensors is damaged"):
        rollout.generate(work)
