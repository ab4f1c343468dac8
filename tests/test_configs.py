"""Every shipped config loads, resolves for every method, states a model that exists and says how to run it."""

import importlib
import re
from pathlib import Path

import jax
import pytest

from configs import base
from rpg_jax import losses, parallel
from rpg_jax.runs.layout import make_layout, model_config
from rpg_jax.runs.memory import make_decoding
from rpg_jax.runs.resolve import resolve

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("base", "__init__"))


def load(name):
    return importlib.import_module(f"configs.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_says_command_and_hardware(name):
    text = load(name).__doc__
    assert re.search(r"^Command: ", text, re.M)
    assert re.search(r"^Hardware: ", text, re.M)
    assert f"configs/{name}.py" in text or "launch/local.sh" in text


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_for_every_method(name):
    config = load(name).get_config()
    for method in losses.METHODS:
        config.method = method
        config.reference.path = "teacher" if losses.METHODS[method].reference == "teacher" else None
        resolve(config)


@pytest.mark.parametrize("name", NAMES)
def test_its_model_decodes_in_the_layout_it_asks_for(name):
    config = load(name).get_config()
    model = model_config(config, vocab_size=512)
    tensor = config.rollout.tensor or 1
    expert = model.experts.hidden_dim if model.experts else 0
    for heads in (model.num_kv_heads, model.num_heads, model.vocab_size, model.hidden_dim, expert):
        assert heads % tensor == 0


@pytest.mark.parametrize("name", NAMES)
def test_its_updates_split_into_whole_micro_batches_and_its_rows_hold_a_completion(name):
    c = load(name).get_config()
    rows = c.rollout.prompts_per_step // c.train.updates_per_step * c.rollout.group_size
    assert rows % (c.train.microbatch_size or rows) == 0
    assert (c.train.packed_length or 10**9) >= c.task.max_prompt_tokens + c.rollout.max_tokens
    assert (c.rewards.overlong_buffer or 0) < c.rollout.max_tokens


@pytest.mark.parametrize("name", NAMES)
def test_where_steps_take_minutes_every_one_is_saved_and_two_are_kept(name):
    c = load(name).get_config()
    groups = c.rollout.prompts_per_step * c.dynamic_sampling.oversample
    assert c.checkpoint.every == 1 or groups * c.rollout.group_size * c.rollout.max_tokens < 10e6
    assert c.checkpoint.keep == 2 and c.checkpoint.permanent_every is None


@pytest.mark.parametrize("name", [n for n in NAMES if load(n).get_config().model.size])
def test_its_tiny_variant_is_the_same_experiment_on_a_small_model(name):
    c, tiny = load(name).get_config(), load(name).get_config("tiny")
    resolve(tiny)
    for same in (lambda c: c.method, lambda c: c.task.train, lambda c: c.task.held_out_sets, lambda c: c.rewards.parts):
        assert same(tiny) == same(c)
    assert tiny.run.dir != c.run.dir and tiny.train.packed_length >= tiny.task.max_prompt_tokens + 16
    with pytest.raises(ValueError, match="unknown variant 'small'"):
        load(name).get_config("small")


def test_sharding_rules_come_from_the_config():
    config = load("qwen3_0p6b_gsm8k").get_config()
    config.sharding = "embed=fsdp+context, kv_heads="
    rules = make_layout(config, None).rules
    assert rules["embed"] == ("fsdp", "context")
    assert rules["kv_heads"] == ()
    assert rules["vocab"] == parallel.RULES["vocab"]
    config.sharding = "vocab"
    with pytest.raises(ValueError, match="LOGICAL=MESH_AXIS"):
        make_layout(config, None)


def test_rules_that_would_add_up_different_tokens_are_refused_before_anything_runs():
    """Every command that has a model opens its layout first: training, sft, evaluation, samples, policies, plans."""
    config = load("qwen3_0p6b_gsm8k").get_config()
    config.mesh.update({"fsdp": 4, "context": 2})
    config.sharding = "vocab=tensor+context,kv_heads="
    with pytest.raises(ValueError, match="vocab and length both fall on mesh axis 'context'.*vocab= replicates it"):
        make_layout(config, None)
    config.mesh.update({"fsdp": 8, "context": 1})
    config.rollout.tensor, config.sharding = 2, "slots=replica+tensor"
    layout = make_layout(config, None)
    with pytest.raises(ValueError, match="vocab and slots both fall on mesh axis 'tensor'"):
        make_decoding(layout)


def test_decoding_weights_are_cast_and_copied_only_where_the_config_asks():
    config = load("qwen3_0p6b_gsm8k").get_config()
    config.rollout.tensor = 4
    decoding = make_decoding(make_layout(config, None))
    assert dict(decoding.mesh.shape) == {"replica": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 4}
    assert decoding.dtype == "bfloat16"
    config.rollout.tensor, config.model.param_dtype = None, "bfloat16"
    decoding = make_decoding(make_layout(config, None))
    assert (decoding.dtype, decoding.shardings) == (None, None)
    config.rollout.tensor = 3
    with pytest.raises(ValueError, match="does not divide 8 devices"):
        make_decoding(make_layout(config, None))


def of_two_hosts(config):
    """Of the eight devices each host has four."""
    return make_layout(config, None, host=jax.devices()[:4])


@pytest.mark.parametrize(("tensor", "shape"), [(None, {"fsdp": 4}), (2, {"replica": 2, "tensor": 2})])
def test_a_host_decodes_its_part_of_the_slots_on_its_own_devices(tensor, shape):
    config = load("qwen3_0p6b_gsm8k").get_config()
    config.rollout.tensor = tensor
    decoding = make_decoding(of_two_hosts(config))
    assert {axis: n for axis, n in decoding.mesh.shape.items() if n > 1} == shape
    assert decoding.mesh.devices.ravel().tolist() == jax.devices()[:4]
    assert decoding.slots == config.rollout.slots * 4
    assert {s.mesh for s in jax.tree.leaves(decoding.shardings)} == {decoding.mesh}
    config.rollout.driver = "lockstep"
    decoding = make_decoding(of_two_hosts(config))
    assert (decoding.mesh.size, decoding.slots) == (8, config.rollout.slots * 8)


def test_copies_that_a_host_cannot_hold_are_refused():
    config = load("qwen3_0p6b_gsm8k").get_config()
    config.rollout.tensor = 8
    with pytest.raises(ValueError, match=r"rollout.tensor=8 .* does not divide 4 devices"):
        make_decoding(of_two_hosts(config))


def test_decoding_follows_the_config_s_sharding_and_copies_key_value_heads_that_do_not_divide():
    config = load("qwen2p5_0p5b_gsm8k").get_config()  # 14 heads, two of keys and values
    config.rollout.tensor, config.sharding = 2, "vocab="
    rules = make_decoding(make_layout(config, None)).rules
    assert (rules["vocab"], rules["kv_heads"]) == ((), ("tensor",))
    config.model.size, config.rollout.tensor = "qwen3-4b", 8
    assert make_decoding(make_layout(config, None)).rules["kv_heads"] == ("tensor",)
    config = base.variant(config, "tiny")  # four heads, two of keys and values
    config.rollout.tensor = 4
    decoding = make_decoding(make_layout(config, 32))
    assert (decoding.rules["kv_heads"], decoding.rules["heads"]) == ((), ("tensor",))


def test_devices_that_only_sample_are_the_last_and_the_mesh_is_of_the_others(monkeypatch):
    config = load("tiny").get_config()
    config.rollout.devices = 6
    layout = make_layout(config, 32)
    training, sampling = layout.mesh, make_decoding(layout).mesh
    assert training.devices.ravel().tolist() == jax.devices()[:2] and training.shape["fsdp"] == 2
    assert sampling.devices.ravel().tolist() == jax.devices()[2:] and sampling.shape["replica"] == 6
    config.rollout.tensor = 2
    shape = make_decoding(make_layout(config, 32)).mesh.shape
    assert (shape["replica"], shape["tensor"]) == (3, 2)
    config.rollout.tensor = 4
    with pytest.raises(ValueError, match=r"rollout.tensor=4 .* does not divide 6 devices"):
        make_decoding(make_layout(config, 32))
    config.mesh.fsdp = 4
    with pytest.raises(ValueError, match=r"does not cover 2 devices.*; rollout.devices=6 more devices only sample"):
        make_layout(config, 32)
    for number in (-1, 8):
        config.rollout.devices = number
        with pytest.raises(ValueError, match=rf"rollout.devices={number} of 8 devices .* leave one to train"):
            make_layout(config, 32)
    config.rollout.devices = 4
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"rollout.devices=4 needs a single process, not 2: .* on several hosts"):
        make_layout(config, 32)
