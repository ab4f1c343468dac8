"""A config.json is read exactly, or refused with the field that stands in the way."""

import dataclasses
import json

import pytest

from rpg_jax import models
from rpg_jax.models import Experts, Llama3, Yarn

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
    llama3 = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling=Llama3(8.0, 1.0, 4.0, 8192)))
    assert models.parse_config(models.write_config(llama3, "bfloat16")) == llama3


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
        (
            {"model_type": "gemma2"},
            "model_type 'gemma2' is not supported; the families are qwen2, qwen3, qwen3_moe, llama",
        ),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "vision"),
        ({"model_type": "qwen3_vl", "text_config": {}}, "vision"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok='2' must be a number"),
        ({"rope_scaling": 3}, "rope_scaling=3 must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope type 'linear' is not supported, only 'default', "),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "yarn fields {'mscale': 0.7}"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' needs factor"),
        ({"rope_theta": None}, "neither rope_theta"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | fields), encoding="utf-8")
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
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in QWEN3_4B.items() if k != "hidden_size"}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="no field 'hidden_size'"):
        models.read_config(tmp_path)


def test_a_model_that_transformers_does_not_have_is_not_written():
    experts = Experts(8, 2, 16)
    for name in ("Qwen2-7B", "SmolLM2-135M"):
        with pytest.raises(ValueError, match="transformers has no such model"):
            models.write_config(dataclasses.replace(models.size(name), experts=experts), "float32")
    with pytest.raises(ValueError, match="biases on q, k and v .* or neither .*got qkv_bias=True, qk_norm=True"):
        models.write_config(dataclasses.replace(models.size("Qwen3-8B"), qkv_bias=True), "float32")
    with pytest.raises(ValueError, match="num_heads divides embed_dim"):
        models.write_config(dataclasses.replace(models.size("SmolLM2-135M"), embed_dim=580), "float32")


LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def test_a_published_llama_is_the_published_size_in_both_styles():
    assert models.parse_config(LLAMA_1B) == models.size("Llama-3.2-1B")
    five = {k: v for k, v in LLAMA_1B.items() if k not in ("rope_theta", "rope_scaling")}
    five["rope_parameters"] = LLAMA_1B["rope_scaling"] | {"rope_theta": 500000.0}
    assert models.parse_config(five) == models.size("Llama-3.2-1B")


def test_a_llama_is_written_as_transformers_knows_it():
    written = models.write_config(models.size("Llama-3.2-1B"), "bfloat16", LLAMA_1B)
    assert written == LLAMA_1B


def test_an_older_llama_folder_that_names_no_theta_has_that_of_llama_2():
    old = {k: v for k, v in LLAMA_1B.items() if k not in ("rope_theta", "rope_scaling", "head_dim", "mlp_bias")}
    assert models.parse_config(old).rope == models.Rope(1e4, 131_072)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias True is not supported for llama"),
        ({"pretraining_tp": 2}, "pretraining_tp 2 is not supported for llama"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": LLAMA_1B["rope_scaling"] | {"factor": 0.5}}, "llama3 factor must be >= 1"),
        ({"rope_scaling": LLAMA_1B["rope_scaling"] | {"low_freq_factor": 4.0}}, "low_freq_factor < high_freq_factor"),
        ({"rope_scaling": LLAMA_1B["rope_scaling"] | {"extra": 1}}, "llama3 fields {'extra': 1} are not supported"),
    ],
)
def test_a_llama_that_is_not_computed_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config(LLAMA_1B | fields)
