"""The engine behind JetStream's interface: its own calls give the engine's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.rollout.decode_state import DecodeResult
from rpg_jax.rollout.jetstream.adapter import JetStreamEngine, TokenIds, packed, token_utils
from rpg_jax.types import Sampling


def test_prefill_insert_and_generate_as_jetstream_calls_them_decode_greedily_until_the_slot_is_full(build, work):
    greedy = replace(
        work, prompts=work.prompts[1:2], prompt_ids=[0], group_size=1, sampling=Sampling(0.0, max_tokens=16)
    )
    ((expected,),) = build("simple").generate(greedy)
    engine = JetStreamEngine(build("orchestrator").engine)
    padded = np.zeros(32, np.int32)
    padded[:20] = work.prompts[1]
    prefix = engine.prefill(params=engine.load_params(), padded_tokens=padded, true_length=20)
    state, complete, tokens = engine.insert(prefix, engine.init_decode_state(), slot=3), np.zeros(1, bool), []
    while not complete.all():
        state, result = engine.generate(engine.load_params(), state)
        (sample,), complete = token_utils.process_result_tokens(
            engine.build_tokenizer(engine.get_tokenizer()), 3, 16, result.convert_to_numpy(), complete, True
        )
        tokens += [token for token in sample.token_ids if token >= 0]
    assert tokens == expected.tokens.tolist()


@pytest.mark.parametrize(
    ("slot", "drawn", "complete"), [(0, [4, 5, 6], False), (1, [7], False), (2, [8, 9], True), (3, [], False)]
)
def test_jetstream_ends_a_completion_whose_slot_ends_and_no_other(slot, drawn, complete):
    """One that goes on may have drawn fewer tokens in the dispatch than others, or none."""
    counts, active = np.array([3, 1, 2, 0], np.int32), np.array([True, True, False, True])
    tokens = np.array([[4, 5, 6], [7, 1, 1], [8, 9, 1], [1, 1, 1]], np.int32)
    result = packed(DecodeResult(tokens, np.full((4, 3), -0.5, np.float32), counts, active))
    (sample,), ended = token_utils.process_result_tokens(TokenIds(), slot, 16, result, np.zeros(1, bool), True)
    assert [token for token in sample.token_ids if token >= 0] == drawn
    assert ended.tolist() == [complete]
