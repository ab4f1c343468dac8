"""An adapter of the library peft computes here what it computes there, and comes back to the bit."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rpg_jax import models
from rpg_jax.models.lora import Base, Lora, load_adapters, save_adapters

GOLDEN = Path(__file__).parent / "golden"
FOLDER, LORA = GOLDEN / "qwen3_lora", Lora(rank=2, alpha=3.0)
CONFIG = models.read_config(GOLDEN / "qwen3")


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_logits_with_an_adapter_are_those_of_peft(name):
    config, folder = models.read_config(GOLDEN / name), GOLDEN / f"{name}_lora"
    base = Base(models.load(GOLDEN / name, config), LORA.scale)
    graphdef, tokens = models.abstract(config)[0], np.load(GOLDEN / name / "golden.npz")["tokens"].astype(np.int32)
    golden, adapters = np.load(folder / "golden.npz"), load_adapters(folder, config, LORA)

    @jax.jit
    def logits(params):
        module, positions = nnx.merge(graphdef, params), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return module.logits(module(tokens, positions, jnp.ones_like(tokens)))

    assert np.abs(golden["logits"] - golden["base_logits"]).max() > 1
    np.testing.assert_allclose(logits(base.policy(adapters)), golden["logits"], atol=5e-4)  # f32, another order of sums


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_a_saved_adapter_has_the_tensors_and_the_fields_of_the_one_that_was_loaded(tmp_path, name):
    config, source = models.read_config(GOLDEN / name), GOLDEN / f"{name}_lora"
    save_adapters(tmp_path, config, LORA, load_adapters(source, config, LORA), base=name)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, source))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(mine[name], tensor, err_msg=name)
    written, read = (
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")) for folder in (tmp_path, source)
    )
    assert {name: read[name] for name in written} == written


@pytest.mark.parametrize(
    "changes, lora, said",
    [
        ({"r": 4}, LORA, "rank 4, here 2: set model.lora.rank"),
        ({"target_modules": ["q_proj"]}, LORA, "choose the targets that the folder has"),
        ({"target_modules": ["q_proj", 1]}, LORA, "choose the targets that the folder has"),
        ({"use_dora": True}, LORA, "use_dora=True cannot be read; merge this adapter"),
        ({"init_lora_weights": "pissa"}, LORA, "init_lora_weights='pissa' cannot be read; merge this adapter"),
        ({"peft_type": "IA3"}, LORA, "peft_type='IA3' cannot be read"),
        ({}, Lora(2, 16.0), "alpha 3, here 16"),
    ],
)
def test_an_adapter_that_means_something_else_is_refused_in_one_line(tmp_path, changes, lora, said):
    folder = shutil.copytree(FOLDER, tmp_path / "adapter")
    fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")) | changes
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_adapters(folder, CONFIG, lora)


def test_a_folder_without_an_adapter_is_refused_by_its_field(tmp_path):
    with pytest.raises(ValueError, match="has no adapter_config.json: model.lora.path is the folder of an adapter"):
        load_adapters(tmp_path, CONFIG, LORA)


def test_an_adapter_of_another_model_is_refused_by_its_shapes(tmp_path):
    other = models.read_config(GOLDEN / "qwen2")
    with pytest.raises(ValueError, match="misshapen"):
        load_adapters(FOLDER, other, LORA)


def test_an_adapter_with_a_number_that_is_not_finite_is_named(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[min(tensors)][0, 1] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter has weights that are not finite, in layers\.mlp\.down\.a\. Copy it"):
        load_adapters(folder, CONFIG, LORA)
