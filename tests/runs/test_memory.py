"""The decode slots that fit a device beside everything else."""

import dataclasses

import jax

from configs import qwen3_0p6b_gsm8k, qwen3_4b_8k, tiny
from rpg_jax.rollout import footprint
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.memory import make_decoding
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
    assert (
        footprint.slots_that_fit(160, held=50, slot=10, tile=4, needed=99) == 8
    )  # (150 - 50) / 10 = 10, in tiles of 4
    assert footprint.slots_that_fit(160, held=50, slot=10, tile=1, needed=99) == 10
    assert footprint.slots_that_fit(160, held=50, slot=40, tile=4, needed=99) == 2  # less than a tile
    assert footprint.slots_that_fit(160, held=50, slot=1, tile=4, needed=6) == 6
    assert footprint.slots_that_fit(160, held=155, slot=10, tile=4, needed=6) == 1


def test_slots_fill_what_weights_and_optimizer_leave():
    hbm = 95.74 * GIB
    decoding = decoding_of(qwen3_4b_8k.get_config(), hbm)
    held = 3 * 4 * WEIGHTS / 8 + 2 * WEIGHTS / 4  # master weights and two slots of AdamW; a copy of four devices
    slot = TOKEN * 10_240 + 4 * 4 * 151_936 * 4  # with its rows of logits on the four devices
    each = (hbm * 15 / 16 - held) / slot
    assert decoding.slots == 4 * (int(each) // 4 * 4) == 4 * 56
    assert TOKEN * 10_240 * decoding.slots / 4 + held < hbm


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


def test_where_the_memory_is_unknown_all_devices_share_128_slots():
    config = tiny.get_config()
    layout = make_layout(config, 32)
    assert layout.device_memory is None, "CPU devices do not say"
    assert make_decoding(layout).slots == 128
    config.rollout.prompts_per_step, config.rollout.group_size = 4, 4
    assert make_decoding(dataclasses.replace(layout, config=config)).slots == 16
    config.rollout.slots = 3
    assert make_decoding(dataclasses.replace(layout, config=config)).slots == 24, "a number is that of each device"
