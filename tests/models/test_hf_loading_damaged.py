"""A damaged folder of weights is one line that names the file, at once."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rpg_jax import models
from rpg_jax.models.hf_config import read_config
from rpg_jax.models.hf_loading import Folder, load

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
NUMBERS = [name for name, value in CONFIG.items() if isinstance(value, int) and name != "max_position_embeddings"]


@pytest.mark.parametrize("value", [-1, 10**6 + 1, 10**400, 1.5, True, "28", [2], {"a": 2}], ids=str)
@pytest.mark.parametrize("name", [*NUMBERS, *EXPERTS])
def test_a_number_that_is_none_of_a_model_is_refused_with_its_file(tmp_path, name, value):
    if value == 10**6 + 1 and name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"):
        value *= 10**3
    mixture = EXPERTS | {"model_type": "qwen3_moe"} if name in EXPERTS else {}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | mixture | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "x", None])
def test_a_constant_that_makes_no_sense_is_refused(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "x"])
@pytest.mark.parametrize(
    ("scaling", "name"),
    [(YARN, name) for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")]
    + [(YARN, "attention_factor"), (LLAMA3, "factor"), (LLAMA3, "original_max_position_embeddings")],
)
def test_a_number_of_a_context_extension_that_makes_no_sense_is_refused(tmp_path, scaling, name, value):
    fields = CONFIG | {"rope_scaling": scaling | {name: value}}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b"\xff", b"[" * 100_000, b"{}"])
def test_a_config_that_is_no_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json( is damaged|: )"):
        read_config(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_safetensors_cut_short_are_named(tmp_path, share):
    file = tmp_path / "model.safetensors"
    save_file({"w": np.arange(1000, dtype=np.float32)}, file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: "):
        Folder(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": "../../etc/x.safetensors"}}',
    ],
)
def test_an_index_that_names_no_files_of_its_folder_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: "):
        Folder(tmp_path)


def test_weights_that_are_not_finite_are_named(tmp_path):
    config = models.DecoderConfig(32, 1, 8, 2, 1, 4, 16)
    params = models.init(config, seed=1)[1]
    params["embed"] = params["embed"].at[3, 2].set(np.nan)
    models.save(tmp_path, config, params)
    with pytest.raises(ValueError, match="has weights that are not finite, in embed. Copy it again from where it came"):
        load(tmp_path, config)
