"""A config.json is read exactly, or refused with the field that stands in the way."""

import dataclasses
import json

import pytest

from rpg_jax import models
from rpg_jax.models import Experts, Yarn

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


def test_a_published_config_is_the_published_size():
    assert models.parse_config(QWEN3_4B) == models.size("Qwen3-4B")


@pytest.mark.parametrize("name", models.SIZES)
def test_what_is_written_is_read_back(name):
    config = models.size(name)
    assert models.parse_config(models.write_config(config, "bfloat16")) == config
    long = dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, scaling=Yarn(4.0, 32_768, attention_factor=1.25))
    )
    assert models.parse_config(models.write_config(long, "bfloat16")) == long


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_theta": 1e6,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
    ],
    ids=["documented", "transformers 4", "transformers 5"],
)
def test_every_spelling_of_yarn_is_the_same_yarn(fields):
    assert models.parse_config(QWEN3_4B | fields).rope.scaling == Yarn(4.0, 32_768)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; the families are qwen2, qwen3, qwen3_moe"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "vision"),
        ({"model_type": "qwen3_vl", "text_config": {}}, "vision"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "YaRN fields {'mscale': 0.7}"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "YaRN needs a factor"),
        ({"rope_theta": None}, "neither rope_theta"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | fields))
    with pytest.raises(ValueError, match=message) as error:
        models.read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_mixtures_with_dense_layers_are_refused():
    moe = models.write_config(models.size("Qwen3-30B-A3B"), "bfloat16")
    with pytest.raises(ValueError, match=r"mlp_only_layers \[0\]"):
        models.parse_config(moe | {"mlp_only_layers": [0]})
    with pytest.raises(ValueError, match="decoder_sparse_step 2"):
        models.parse_config(moe | {"decoder_sparse_step": 2})


def test_a_missing_file_or_field_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in QWEN3_4B.items() if k != "hidden_size"}))
    with pytest.raises(ValueError, match="no field 'hidden_size'"):
        models.read_config(tmp_path)


def test_a_model_that_transformers_does_not_have_is_not_written():
    with pytest.raises(ValueError, match="transformers has no Qwen"):
        models.write_config(dataclasses.replace(models.size("Qwen2-7B"), experts=Experts(8, 2, 16)), "float32")
    for bias in (False, True):
        neither_or_both = dataclasses.replace(models.size("Qwen3-8B"), qkv_bias=bias, qk_norm=bias)
        with pytest.raises(ValueError, match="biases on q, k and v .* or norms on q and k"):
            models.write_config(neither_or_both, "float32")
