"""Every published size of the supported families, with the numbers of the base model's config.

The table serves models with random weights, and planning. Loading a folder reads the config of the folder, never this
table. Instruct models have the shapes of their base model; some have another norm epsilon or context.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax

from rpg_jax.losses.declaration import unknown
from rpg_jax.models.config import DecoderConfig, Experts, Llama3, Rope
from rpg_jax.models.decoder import abstract


def _qwen2(layers, width, heads, kv_heads, hidden, *, eps=1e-6, context=131_072, theta=1e6) -> DecoderConfig:
    """A Qwen2 or 2.5: the heads divide the width; up to 3B, embeddings are tied and the vocabulary has less padding."""
    small = width <= 2048
    return DecoderConfig(
        vocab_size=151_936 if small else 152_064,
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        hidden_dim=hidden,
        qkv_bias=True,
        qk_norm=False,
        rope=Rope(theta, context),
        rms_norm_eps=eps,
        tie_embeddings=small,
    )


def _qwen3(layers, width, heads, kv_heads, hidden, *, tied=False, experts=None) -> DecoderConfig:
    """A Qwen3: heads have size 128 at every width."""
    return DecoderConfig(
        vocab_size=151_936,
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        hidden_dim=hidden,
        rope=Rope(max_position_embeddings=40_960),
        experts=experts,
        tie_embeddings=tied,
    )


def _llama(layers, width, heads, kv_heads, hidden, *, vocab=128_256, theta=5e5, context=131_072, factor=0.0, tied=True):
    """A Llama 3 or SmolLM2. `factor` is the factor of llama3's context extension; 0: no extension."""
    return DecoderConfig(
        vocab_size=vocab,
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        hidden_dim=hidden,
        qk_norm=False,
        rope=Rope(theta, context, Llama3(factor, 1.0, 4.0, 8192) if factor else None),
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
    )


def _long(config: DecoderConfig, theta: float) -> DecoderConfig:
    """A 2507 release: the same shapes, trained at 256K positions."""
    return dataclasses.replace(config, rope=Rope(theta, 262_144))


_SMALL_CONTEXT = dict(context=32_768)
_SMOL = dict(vocab=49_152, context=8192)
_MATH = dict(context=4096, theta=1e4)
_4B = _qwen3(36, 2560, 32, 8, 9728, tied=True)
_30B = _qwen3(48, 2048, 32, 4, 6144, experts=Experts(128, 8, 768))
_235B = _qwen3(94, 4096, 64, 4, 12_288, experts=Experts(128, 8, 1536))

SIZES: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "Qwen2-0.5B": _qwen2(24, 896, 14, 2, 4864),
        "Qwen2-1.5B": _qwen2(28, 1536, 12, 2, 8960),
        "Qwen2-7B": _qwen2(28, 3584, 28, 4, 18_944),
        "Qwen2-72B": _qwen2(80, 8192, 64, 8, 29_568, eps=1e-5),
        "Qwen2-Math-1.5B": _qwen2(28, 1536, 12, 2, 8960, **_MATH),
        "Qwen2-Math-7B": _qwen2(28, 3584, 28, 4, 18_944, **_MATH),
        "Qwen2-Math-72B": _qwen2(80, 8192, 64, 8, 29_568, eps=1e-5, **_MATH),
        "Qwen2.5-0.5B": _qwen2(24, 896, 14, 2, 4864, **_SMALL_CONTEXT),
        "Qwen2.5-1.5B": _qwen2(28, 1536, 12, 2, 8960),
        "Qwen2.5-3B": _qwen2(36, 2048, 16, 2, 11_008, **_SMALL_CONTEXT),
        "Qwen2.5-7B": _qwen2(28, 3584, 28, 4, 18_944),
        "Qwen2.5-14B": _qwen2(48, 5120, 40, 8, 13_824, eps=1e-5),
        "Qwen2.5-32B": _qwen2(64, 5120, 40, 8, 27_648, eps=1e-5),
        "Qwen2.5-72B": _qwen2(80, 8192, 64, 8, 29_568, eps=1e-5),
        "Qwen2.5-Math-1.5B": _qwen2(28, 1536, 12, 2, 8960, **_MATH),
        "Qwen2.5-Math-7B": _qwen2(28, 3584, 28, 4, 18_944, **_MATH),
        "Qwen2.5-Math-72B": _qwen2(80, 8192, 64, 8, 29_568, eps=1e-5, **_MATH),
        "Qwen3-0.6B": _qwen3(28, 1024, 16, 8, 3072, tied=True),
        "Qwen3-1.7B": _qwen3(28, 2048, 16, 8, 6144, tied=True),
        "Qwen3-4B": _4B,
        "Qwen3-8B": _qwen3(36, 4096, 32, 8, 12_288),
        "Qwen3-14B": _qwen3(40, 5120, 40, 8, 17_408),
        "Qwen3-32B": _qwen3(64, 5120, 64, 8, 25_600),
        "Qwen3-30B-A3B": _30B,
        "Qwen3-235B-A22B": _235B,
        "Qwen3-4B-2507": _long(_4B, 5e6),
        "Qwen3-30B-A3B-2507": _long(_30B, 1e7),
        "Qwen3-235B-A22B-2507": _long(_235B, 5e6),
        "SmolLM2-135M": _llama(30, 576, 9, 3, 1536, theta=1e5, **_SMOL),
        "SmolLM2-360M": _llama(32, 960, 15, 5, 2560, theta=1e5, **_SMOL),
        "SmolLM2-1.7B": _llama(24, 2048, 32, 32, 8192, theta=1.3e5, **_SMOL),
        "Llama-3.2-1B": _llama(16, 2048, 32, 8, 8192, factor=32.0),
        "Llama-3.2-3B": _llama(28, 3072, 24, 8, 8192, factor=32.0),
        "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14_336, factor=8.0, tied=False),
        "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28_672, factor=8.0, tied=False),
    }
)


def size(name: str) -> DecoderConfig:
    """Returns the config of a published size, by a name in `SIZES`, in upper or lower case ("qwen3-4b"). Raises
    ValueError if there is no such size; the message names the nearest."""
    known = {key.lower(): config for key, config in SIZES.items()}
    if name.lower() not in known:
        raise unknown("published size", name, SIZES)
    return known[name.lower()]


def hub_address(name: str) -> str:
    """Returns the repository OWNER/NAME of a published size on the Hugging Face hub: of the instruct model for SmolLM2,
    because the configs train this model, and for 2507, which has no base model. Raises ValueError as `size` does."""
    size(name)
    name = next(known for known in SIZES if known.lower() == name.lower())
    places = {"SmolLM2": f"HuggingFaceTB/{name}-Instruct", "Llama": f"meta-llama/{name}"}
    return places.get(name.partition("-")[0], f"Qwen/{name.replace('-2507', '-Instruct-2507')}")


@functools.cache
def parameter_count(config: DecoderConfig) -> int:
    """Returns the number of a model's weights, the embedding included; a tied head counts once."""
    return sum(x.size for x in jax.tree.leaves(abstract(config)[1]))
