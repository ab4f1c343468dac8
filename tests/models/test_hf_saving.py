"""The parts of several processes are one folder; a folder in host memory becomes the params that `load` makes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rpg_jax import models, parallel
from rpg_jax.models import hf_saving

GOLDEN = Path(__file__).parent / "golden"
CASES = ["qwen2", "qwen3", "qwen3_moe"]


def tensors(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("name", CASES)
def test_processes_write_about_as_many_bytes_and_together_the_folder_of_one(tmp_path, monkeypatch, name, processes):
    monkeypatch.setattr(hf_saving, "_BLOCK_BYTES", 2**13)
    config = models.read_config(GOLDEN / name)
    params = models.load(GOLDEN / name, config)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    written = []
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        saving = models.Saving(config, np.float32, max_file_bytes=20_000)
        blocks = list(saving.fetch(params))
        written.append((sum(block.nbytes for block in blocks), max((block.nbytes for block in blocks), default=0)))
        saving.write(tmp_path, blocks)
    assert not (tmp_path / "config.json").exists()
    saving.complete(tmp_path)
    original = load_file(GOLDEN / name / "model.safetensors")
    found = tensors(tmp_path)
    assert found.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(found[key], tensor, err_msg=key)
    index = json.loads((tmp_path / models.hf_layout.INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    for key, file in index["weight_map"].items():
        assert key in load_file(tmp_path / file), "the index names the file"
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path, config), params)
    # Greedy: nobody has more than the mean and the largest block.
    assert max(size for size, _ in written) <= sum(size for size, _ in written) / processes + max(b for _, b in written)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 4, "tensor": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}, {"replica": 8}], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_a_folder_read_whole_becomes_the_same_params_on_any_mesh(name, mesh, dtype):
    config = models.read_config(GOLDEN / name)
    where = parallel.shardings(models.logical_axes(config), models.abstract(config)[1], parallel.make_mesh(mesh))
    held = models.read(GOLDEN / name, config)
    assert held.nbytes == sum(x.nbytes for x in load_file(GOLDEN / name / "model.safetensors").values())
    placed = held.placed(dtype, where)
    expected = models.load(GOLDEN / name, config, param_dtype=dtype, shardings=where)
    assert jax.tree.map(lambda x: x.sharding, placed) == where
    jax.tree.map(np.testing.assert_array_equal, placed, expected)


def test_a_folder_has_the_weights_that_were_saved_last(tmp_path):
    config = models.read_config(GOLDEN / "qwen3")
    first = models.load(GOLDEN / "qwen3", config)
    last = jax.tree.map(lambda x: x + 1, first)
    for params, options in ((first, {"max_file_bytes": 4000}), (last, {}), (first, {"max_file_bytes": 4000})):
        models.save(tmp_path, config, params, **options)
        jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path, config), params)


def test_a_folder_of_before_2023_has_frequencies_that_the_config_gives(tmp_path):
    config = models.read_config(GOLDEN / "qwen3")
    params = models.load(GOLDEN / "qwen3", config)
    models.save(tmp_path, config, params)
    weights = load_file(tmp_path / "model.safetensors")
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for n in range(2)}
    save_file(weights | old, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path, config), params)
    assert models.read(tmp_path, config).nbytes == sum(x.nbytes for x in weights.values())


def test_a_folder_of_eight_bits_is_refused_by_name(tmp_path):
    """As the FP8 checkpoints of Qwen3, which numpy has no dtype for."""
    config = models.read_config(GOLDEN / "qwen3")
    models.save(tmp_path, config, models.load(GOLDEN / "qwen3", config))
    weights = load_file(tmp_path / "model.safetensors")
    eight = {name: x.astype(jnp.float8_e4m3fn) for name, x in weights.items()}
    save_file(eight, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="as F8_E4M3; known: F32, BF16, F16"):
        models.load(tmp_path, config)


def test_a_folder_that_is_cut_short_or_of_other_numbers_is_refused(tmp_path):
    config = models.read_config(GOLDEN / "qwen3")
    models.save(tmp_path, config, models.load(GOLDEN / "qwen3", config))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        models.read(tmp_path, config)
    file.write_bytes(whole.replace(b'"F32"', b'"I32"'))
    for read in (models.read, models.load):
        with pytest.raises(ValueError, match="as I32; known: F32, BF16, F16"):
            read(tmp_path, config)
    file.unlink()
    with pytest.raises(ValueError, match="lacks the weight files"):
        models.read(tmp_path, config)
