"""What a worker makes of the trainer's words, without decoding."""

import dataclasses
import json

import pytest

from rpg_jax import models
from rpg_jax.rollout.fleet.worker_engine import Choices, WorkerEngine, model_from

MODEL = models.QwenConfig(
    vocab_size=50, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=48
)
SPEC = {
    "model": json.loads(json.dumps(dataclasses.asdict(MODEL))),
    "weights_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "capacity": 64,
    "slots": None,
    "needed": 40,
    "tensor": None,
    "expert": None,
    "int8": False,
    "int8_kv": False,
    "sharding": None,
}


def test_a_model_survives_the_way_with_all_its_parts():
    yarn = models.Rope(scaling=models.Yarn(4.0, 32_768))
    for model in (MODEL, dataclasses.replace(MODEL, rope=yarn, experts=models.Experts(4, 2, 16))):
        assert model_from(json.loads(json.dumps(dataclasses.asdict(model)))) == model
    with pytest.raises(ValueError, match="the trainer's model: .* 'wings'"):
        model_from({**SPEC["model"], "wings": 2})


def test_slots_are_the_workers_choice_then_the_trainers_then_what_is_needed():
    assert WorkerEngine({**SPEC, "slots": 3}, Choices(slots=2)).slots == 2 * 8
    assert WorkerEngine({**SPEC, "slots": 3}, Choices()).slots == 3 * 8
    assert WorkerEngine(SPEC, Choices()).slots == 40
    assert WorkerEngine({**SPEC, "needed": 10_000}, Choices()).slots == 128, "a CPU's memory is not known"


def test_copies_of_the_weights_must_divide_the_devices():
    with pytest.raises(ValueError, match="--tensor=3 times --expert=1 does not divide 8 devices"):
        WorkerEngine(SPEC, Choices(tensor=3))
    with pytest.raises(ValueError, match="--driver=fleet: a worker samples by itself"):
        WorkerEngine(SPEC, Choices(driver="fleet"))
