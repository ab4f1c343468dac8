"""The decode slots that fit a device beside everything else, and the rows of a micro-batch that fit."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import pytest
from ml_collections import ConfigDict

from configs import qwen2p5_0p5b_gsm8k, qwen3_0p6b_gsm8k, qwen3_4b_2k, qwen3_4b_8k, tiny
from rpg_jax.runs import config_files, memory
from rpg_jax.runs.layout import make_layout, packing_shape, row_shape
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.memory import fitting_layout, make_decoding
from rpg_jax.runs.resolve import resolve

GIB = 2**30
WEIGHTS = 4_022_468_096  # of Qwen3-4B
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of its keys and values


def decoding_of(config, device_memory, **changes):
    """How the config decodes on two hosts of four devices with that memory."""
    config = resolve(config)
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    return make_decoding(make_layout(config, None, host=jax.devices()[:4], device_memory=device_memory))


def test_slots_that_fit_by_hand():
    assert memory.slots_that_fit(160, held=50, slot=10, tile=4, needed=99) == 8  # (150 - 50) / 10 = 10, in tiles of 4
    assert memory.slots_that_fit(160, held=50, slot=10, tile=1, needed=99) == 10
    assert memory.slots_that_fit(160, held=50, slot=40, tile=4, needed=99) == 2  # less than a tile
    assert memory.slots_that_fit(160, held=50, slot=1, tile=4, needed=6) == 6
    assert memory.slots_that_fit(160, held=155, slot=10, tile=4, needed=6) == 1


def test_slots_fill_what_weights_and_optimizer_leave():
    hbm = 95.74 * GIB
    decoding = decoding_of(qwen3_4b_8k.get_config(), hbm)
    held = 3 * 4 * WEIGHTS / 8 + 2 * WEIGHTS / 4  # master weights and two slots of AdamW; a copy of four devices
    slot = TOKEN * 10_240 + 4 * 4 * 151_936 * 4  # with its rows of logits on the four devices
    each = (hbm * 15 / 16 - held) / slot
    assert decoding.slots == 4 * (int(each) // 4 * 4) == 4 * 56
    assert TOKEN * 10_240 * decoding.slots / 4 + held < hbm


def test_where_nothing_is_trained_slots_fill_what_the_weights_leave():
    """Qwen3-4B on one chip of 16 GB: beside AdamW's 48 GB it would have one slot."""
    config = resolve(qwen3_4b_2k.get_config())
    with config.unlocked():
        config.model.param_dtype, config.rollout.tensor, config.mesh.fsdp = "bfloat16", None, -1
        config.task.max_prompt_tokens, config.rollout.max_tokens = 512, 512
    one = jax.devices()[:1]
    trainer = make_layout(config, None, one, one, 16 * GIB)
    assert make_decoding(trainer).slots == 1
    server = dataclasses.replace(trainer, trains=False)
    slot = TOKEN * 1024 + 4 * 4 * 151_936
    fits = int((15 * GIB - 2 * WEIGHTS) / slot)
    assert make_decoding(server).slots == fits // 16 * 16 == 48
    assert make_decoding(server, most=20).slots == 20 and make_decoding(server, most=999).slots == 48
    copied = config_files.changed(config, {"model.param_dtype": "float32"})
    copied = dataclasses.replace(make_layout(copied, None, one, one, 32 * GIB), trains=False)
    assert make_decoding(copied).slots == int((30 * GIB - 6 * WEIGHTS) / slot) // 16 * 16, "a copy decodes"
    assert not fitting_layout(tiny.get_config(), 32).trains


def test_an_int8_cache_has_nearly_twice_the_slots_and_sampling_ahead_half():
    hbm = 95.74 * GIB
    int8 = decoding_of(qwen3_4b_8k.get_config(), hbm, **{"rollout.int8_kv": True})
    assert int8.slots == 4 * 112
    ahead = decoding_of(qwen3_4b_8k.get_config(), hbm, **{"rollout.max_staleness": 1})
    assert ahead.slots == 4 * 28


def test_no_more_slots_than_a_step_has_completions():
    config = qwen3_0p6b_gsm8k.get_config()
    config.rollout.slots, config.rollout.prompts_per_step = None, 32
    completions = 32 * 8 * (config.dynamic_sampling.oversample if resolve(config).dynamic_sampling.enabled else 1)
    assert decoding_of(config, 95 * GIB).slots == completions / 2  # on each of two hosts


def test_devices_that_only_sample_hold_no_optimizer():
    config = resolve(qwen3_4b_8k.get_config())
    config.rollout.devices = 4
    layout = make_layout(config, None, jax.devices(), jax.devices(), device_memory=32 * GIB)
    decoding = make_decoding(layout)
    assert decoding.slots == 4 * int((30 * GIB - WEIGHTS / 2) / (TOKEN * 10_240 + 16 * 151_936 * 4) // 4 * 4) == 64


@pytest.mark.parametrize(
    ("devices", "slots", "fits"), [(4, 165, False), (4, 140, True), (0, 158, False), (0, 135, True)]
)
def test_sampling_needs_its_weights_beside_the_cache_on_devices_of_its_own_or_not(devices, slots, fits):
    size = "Qwen3-8B" if devices else "Qwen3-4B"
    changes = {"model.path": None, "model.size": size, "rollout.tensor": 1, "rollout.devices": devices}
    config = config_files.changed(qwen3_4b_2k.get_config(), {**changes, "rollout.slots": slots, "mesh.fsdp": -1})
    layout = memory.with_micro_batch(make_layout(resolve(config), 151_936, device_memory=95 * GIB))
    learner, decoding = make_learner(layout), make_decoding(layout)
    assert memory.peak(layout, learner, decoding) < 95 * GIB
    if fits:
        assert memory.checked(layout) is layout
    else:
        assert memory.resident(layout, learner, decoding)["prefill"] < 95 * GIB, "too much with its arguments only"
        with pytest.raises(ValueError, match="sampling needs .* GiB or more"):
            memory.checked(layout)
        served = config_files.changed(layout.config, {"rollout.driver": "servers"})
        assert memory.checked(dataclasses.replace(layout, config=served)), "servers have this memory"


def test_devices_that_only_sample_need_no_memory_for_the_trainer():
    config = resolve(qwen3_4b_2k.get_config())
    config.rollout.devices = 4
    layout = make_layout(config, None, jax.devices(), jax.devices(), device_memory=95.74 * GIB)
    learner, decoding = make_learner(layout), make_decoding(layout)
    held = memory.resident(layout, learner, decoding)
    assert held["decode"] == 0 and held["prefill"] == memory.cache_bytes(layout, decoding)
    assert held["prefill"] < 95.74 * GIB, "the slots fill what the trainer's state would take"


def test_where_the_memory_is_unknown_all_devices_share_128_slots():
    config = tiny.get_config()
    layout = make_layout(config, 32)
    assert layout.device_memory is None, "CPU devices do not say"
    assert make_decoding(layout).slots == 128
    config.rollout.prompts_per_step, config.rollout.group_size = 4, 4
    assert make_decoding(dataclasses.replace(layout, config=config)).slots == 16
    config.rollout.slots = 3
    assert make_decoding(dataclasses.replace(layout, config=config)).slots == 24, "a number is that of each device"


LAYERS, WIDTH, LENGTH = 36, 2560, 8192


def layout_of(config, device_memory, devices=8, **changes):
    config = resolve(config)
    with config.unlocked():
        config.update_from_flattened_dict({"train.microbatch_size": None, **changes})
    return make_layout(config, None, jax.devices()[:devices], jax.devices()[:devices], device_memory)


def rows_of(config, device_memory, **changes):
    return memory.with_micro_batch(layout_of(config, device_memory, **changes)).config.train.microbatch_size


def by_hand(rows):
    """Bytes of a chip of eight as rows of Qwen3-4B are added to the gradients of an update of 512."""
    trained = 4 * WEIGHTS / 8
    tokens = rows * LENGTH / 8
    state = 3 * trained  # weights and AdamW's slots
    gradients = 2 * trained  # of this micro-batch, and the sum, which is donated
    copy = 2 * WEIGHTS / 4  # of four chips that decode
    waiting = tokens * LAYERS * WIDTH * 2  # remat=full keeps the input of each layer
    layer = 3 * 2 * WEIGHTS / LAYERS + 16 * tokens * WIDTH * 2
    batch = 512 * 16 * 4 * (3 + 8) * LENGTH / 8
    return state + gradients + copy + waiting + layer + batch


def test_the_peak_of_training_by_hand():
    layout = memory.with_micro_batch(layout_of(qwen3_4b_2k.get_config(), 95.7 * GIB))
    peak = memory.peak(layout, make_learner(layout), make_decoding(layout))
    assert peak == pytest.approx(by_hand(8), rel=1e-3)


@pytest.mark.parametrize(("recipe", "compiled"), [(qwen3_0p6b_gsm8k, 14.2), (qwen2p5_0p5b_gsm8k, 13.0)])
def test_a_recipe_for_a_chip_of_16_gb_is_not_refused_there(recipe, compiled):
    """`compiled` is the peak, in GiB, of the programs compiled for v5e:1x1 (docs/plan.md, docs/log/2026-11.md)."""
    layout = make_layout(resolve(recipe.get_config()), None, jax.devices()[:1], jax.devices()[:1], 15.75 * GIB)
    assert memory.checked(layout) is layout
    peak = memory.peak(layout, make_learner(layout), make_decoding(layout))
    assert peak == pytest.approx(compiled * GIB, rel=0.04)


def test_the_largest_micro_batch_that_fits_four_fifths_of_a_device():
    config, padded = qwen3_4b_2k.get_config(), {"train.packed_length": None, "rollout.slots": 8}
    layout = memory.with_micro_batch(layout_of(config, 60 * GIB, **padded))
    needed = memory.peak(layout, make_learner(layout), make_decoding(layout)) / memory.TRUSTED
    assert (rows := row_shape(layout.config).rows) in (64, 128, 256)
    assert rows_of(config, needed * 1.001, **padded) == rows
    assert rows_of(config, needed * 0.999, **padded) == rows // 2
    assert rows_of(config, 1 * GIB, **padded) == 8, "one row a device is the smallest"


def test_packed_rows_are_full_at_the_end_of_an_update_too(capsys):
    """512 completions of 1,024 tokens and prompts of 1,024 fill 128 rows of 8,192, which eight devices share."""
    config = qwen3_4b_2k.get_config()
    assert rows_of(config, 1000 * GIB) == 8
    assert "train.microbatch_size=8 of 512 rows an update, which fits 1000.0 GiB" in capsys.readouterr().err
    assert rows_of(config, 1000 * GIB, **{"train.packed_length": 2048}) == 32, "8,192 tokens a device"
    small = {"train.packed_length": 2048, "rollout.prompts_per_step": 32}
    assert rows_of(config, 1000 * GIB, **small) == 8, "32 rows an update, an eighth of which is less than one a device"
    assert rows_of(config, 1000 * GIB, **{"train.packed_length": None}) == 512
    assert "=512" not in capsys.readouterr().err, "a whole mini-batch is nothing to tell"


def test_sampling_ahead_on_the_same_devices_leaves_less_for_training():
    config = qwen3_0p6b_gsm8k.get_config()
    changes = {"train.packed_length": None, "rollout.slots": 64}
    alone = layout_of(config, 16 * GIB, **changes)
    ahead = layout_of(config, 16 * GIB, **changes, **{"rollout.max_staleness": 1})
    learner, decoding = make_learner(alone), make_decoding(alone)
    cache = memory.cache_bytes(alone, decoding)
    difference = memory.peak(ahead, learner, decoding) - memory.peak(alone, learner, decoding)
    assert difference == pytest.approx(cache) and cache > GIB / 4
    held = [memory.resident(layout, learner, decoding) for layout in (ahead, alone)]
    assert held[0]["update"] - held[1]["update"] == pytest.approx(cache), "plans read this"
    staged = memory.bytes_on_a_device(memory.decoding_params(alone, decoding))
    assert held[0]["prefill"] - held[1]["prefill"] == pytest.approx(staged), "the copy for the next batch"
    further = memory.resident(layout_of(config, 16 * GIB, **changes, **{"rollout.max_staleness": 3}), learner, decoding)
    assert further["update"] - held[0]["update"] == pytest.approx(2 * staged), "two more batches wait with theirs"
    assert further["prefill"] - held[0]["prefill"] == pytest.approx(2 * staged)
    servers = layout_of(config, 16 * GIB, **changes, **{"rollout.max_staleness": 3, "rollout.driver": "servers"})
    assert memory.resident(servers, learner, decoding)["update"] == held[1]["update"], "weights wait in files"
    sizes = [memory.with_micro_batch(layout).config.train.microbatch_size for layout in (alone, ahead)]
    assert sizes[0] > sizes[1] >= 8


def test_sampling_ahead_in_the_trainers_own_dtype_copies_the_weights_that_training_donates():
    config = qwen3_0p6b_gsm8k.get_config()
    changes = {"model.param_dtype": "bfloat16", "rollout.slots": 64, "mesh.fsdp": -1}
    alone = layout_of(config, 64 * GIB, 1, **changes)
    ahead = layout_of(config, 64 * GIB, 1, **changes, **{"rollout.max_staleness": 1})
    learner, decoding = make_learner(alone), make_decoding(alone)
    assert not memory.has_copy(alone, decoding)
    weights = memory.bytes_on_a_device(memory.decoding_params(alone, decoding))
    held = [memory.resident(layout, learner, decoding) for layout in (ahead, alone)]
    assert held[0]["update"] - held[1]["update"] == pytest.approx(memory.cache_bytes(alone, decoding) + weights)
    assert held[0]["prefill"] - held[1]["prefill"] == pytest.approx(2 * weights), "the trainer's and the next batch's"


def test_a_size_that_is_given_stands_and_without_a_known_memory_nothing_is_chosen():
    config = qwen3_4b_2k.get_config()
    assert rows_of(config, 95 * GIB, **{"train.microbatch_size": 64}) == 64
    config = tiny.get_config()
    layout = make_layout(config, 32)
    assert memory.with_micro_batch(layout) is layout and layout.config.train.microbatch_size is None


@pytest.mark.parametrize(
    "field, value, said",
    [("rollout.tensor", 16, "does not divide 8 devices"), ("mesh.tensor", 32, "does not cover 8 devices"),
     ("rollout.devices", 12, "rollout.devices=12 of 8 devices"), ("rollout.expert", 3, "does not divide 8 devices")],
)  # fmt: skip
def test_a_config_of_a_larger_machine_is_laid_out_on_this_one_and_says_so(field, value, said, capsys):
    config = ConfigDict(json.loads(tiny.get_config().to_json_best_effort()))  # as a run's config.json is read
    config.update_from_flattened_dict({field: value})
    layout = fitting_layout(config, 32)
    assert layout.mesh.shape["fsdp"] == 8 and make_decoding(layout).mesh is layout.mesh
    error = capsys.readouterr().err
    assert error.startswith("using mesh.fsdp=8 instead of the config's layout: ") and said in error
    assert layout.config.rollout.devices == 0 and layout.config.rollout.tensor is None
    section, name = field.split(".")
    assert config[section][name] == value, "the config that was given is changed"


def test_a_config_that_fits_is_left_as_it_is(capsys):
    config = tiny.get_config()
    config.rollout.tensor, config.mesh.tensor = 1, 2
    layout = fitting_layout(config, 32)
    assert (layout.mesh.shape["tensor"], make_decoding(layout).mesh.shape["tensor"]) == (2, 1)
    assert not capsys.readouterr().err
    config.model.num_layers = None
    with pytest.raises(ValueError, match="which model"):
        fitting_layout(config, 32)


def test_a_policy_decodes_without_the_teacher_of_its_run(tmp_path, monkeypatch):
    config = tiny.get_config()
    config.reference.path, config.rollout.slots = str(tmp_path / "gone"), None
    own = functools.partial(make_layout, device_memory=GIB)  # slots depend on what else a device holds
    monkeypatch.setattr(memory, "make_layout", own)
    assert make_decoding(fitting_layout(config, 32)).slots > 8
    assert config.reference.path, "the config that was given is changed"
    with pytest.raises(ValueError, match="gone"):
        make_decoding(own(config, 32))


def test_a_micro_batch_that_the_devices_cannot_share_evenly_is_refused_by_name():
    config = resolve(tiny.get_config())
    with config.unlocked():
        config.train.microbatch_size = 4
    with pytest.raises(
        ValueError, match="a micro-batch of 4 rows cannot be spread over 8 devices: set train.microbatch"
    ):
        packing_shape(make_layout(config, 32))
    with config.unlocked():
        config.train.microbatch_size = 16
    assert packing_shape(make_layout(config, 32)).rows == 16


def test_an_update_of_one_micro_batch_holds_sums_of_gradients_where_it_rehearses():
    config = tiny.get_config()
    whole = memory.own_peaks(make_layout(resolve(config), 32))
    config.update_from_flattened_dict({"warm_start.enabled": False, "rehearsal.path": "kept", "rehearsal.coef": 0.1})
    summed = memory.own_peaks(make_layout(resolve(config), 32))
    assert "update" in whole and {"start", "add", "apply"} <= summed.keys() and "update" not in summed
