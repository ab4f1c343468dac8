"""All families agree with transformers, and a folder that is loaded and saved keeps its contents."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rpg_jax import models, parallel
from rpg_jax.models import KVCache

GOLDEN = Path(__file__).parent / "golden"
CASES = ["qwen2", "qwen3", "qwen3_yarn", "qwen3_moe", "qwen3_moe_unnormalised", "llama", "llama3"]


@pytest.fixture(scope="module")
def loaded():
    """(config, graphdef, params) of every case."""

    def load(name):
        config = models.read_config(GOLDEN / name)
        return config, models.abstract(config)[0], models.load(GOLDEN / name, config)

    return {name: load(name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_continuations_are_those_of_transformers(loaded, name):
    config, graphdef, params = loaded[name]
    golden = np.load(GOLDEN / name / "golden.npz")
    tokens = jnp.asarray(golden["tokens"], jnp.int32)

    @jax.jit
    def forward(params):
        module = nnx.merge(graphdef, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return module.logits(module(tokens, positions, jnp.ones_like(tokens)))

    np.testing.assert_allclose(forward(params), golden["logits"], atol=2e-4)  # f32 in another order of summation

    @jax.jit
    def first(params, prompt):
        module = nnx.merge(graphdef, params)
        hidden, prefix, _ = module.prefill(prompt, jnp.full(2, prompt.shape[1]))
        cache = KVCache.empty(config, slots=2, capacity=16)
        for row in range(2):
            cache = cache.insert(prefix, slot=row, row=row)
        return module.logits(hidden).argmax(-1), cache

    @jax.jit
    def following(params, token, cache):
        module = nnx.merge(graphdef, params)
        hidden, cache, _ = module.decode(token, cache)
        return module.logits(hidden).argmax(-1), cache

    token, cache = first(params, tokens[:, :5])
    greedy = [token]
    for _ in range(golden["greedy"].shape[1] - 1):
        token, cache = following(params, token, cache)
        greedy.append(token)
    np.testing.assert_array_equal(np.stack(greedy, 1), golden["greedy"])


@pytest.mark.parametrize("name", CASES)
def test_both_styles_of_config_say_the_same(name):
    new = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    old = json.loads((GOLDEN / name / "config.transformers4.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in new and "dtype" in new
    assert "rope_theta" in old and "torch_dtype" in old
    assert models.parse_config(old) == models.parse_config(new)


@pytest.mark.parametrize("name", CASES)
def test_load_export_load_is_bit_equal(loaded, tmp_path, name):
    config, _, params = loaded[name]
    (tmp_path / "from").mkdir()
    shutil.copy(GOLDEN / name / "config.json", tmp_path / "from")
    models.save(tmp_path / "to", config, params, base=tmp_path / "from", max_file_bytes=20_000)
    assert models.read_config(tmp_path / "to") == config
    files = sorted((tmp_path / "to").glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 25_000 for file in files)
    written = {k: v for file in files for k, v in load_file(file).items()}
    original = load_file(GOLDEN / name / "model.safetensors")
    assert written.keys() == original.keys()
    for key in original:
        np.testing.assert_array_equal(written[key], original[key], err_msg=key)
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "to", config), params)


def test_bf16_weights_survive_bit_equal(loaded, tmp_path):
    config, _, params = loaded["qwen3"]
    models.save(tmp_path, config, params, dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    half = models.load(tmp_path, config, param_dtype=jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), half, params)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"expert": 2, "fsdp": 2, "replica": 2}], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "llama3"])
def test_every_device_reads_its_own_shard(loaded, name, mesh):
    config, _, params = loaded[name]
    mesh = parallel.make_mesh(mesh)
    placed = parallel.shardings(models.logical_axes(config), params, mesh)
    sharded = models.load(GOLDEN / name, config, shardings=placed)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    assert jax.tree.map(lambda x: x.sharding, sharded) == placed


def test_a_shard_is_read_without_the_rest_of_its_tensor(monkeypatch):
    config = models.read_config(GOLDEN / "qwen3")
    largest = 0
    fetch = models.hf_loading.Folder.fetch

    def watch(self, name, index):
        nonlocal largest
        block = fetch(self, name, index)
        largest = max(largest, block.size)
        return block

    monkeypatch.setattr(models.hf_loading.Folder, "fetch", watch)
    mesh = parallel.make_mesh({"fsdp": 4, "tensor": 2})
    placed = parallel.shardings(models.logical_axes(config), models.abstract(config)[1], mesh)
    models.load(GOLDEN / "qwen3", config, shardings=placed)
    assert largest == 96 * 32 // 8  # the embedding, the largest tensor, in eight shards


def altered(tmp_path, name, change):
    tensors = load_file(GOLDEN / name / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    return lambda: models.load(tmp_path, models.read_config(tmp_path))


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
        tensors["model.norm.weight"] = np.zeros(31, np.float32)

    with pytest.raises(ValueError) as error:
        altered(tmp_path, "qwen3", change)()
    assert "1 missing: model.layers.1.self_attn.q_norm.weight" in str(error.value)
    assert "1 extra: model.layers.2.mlp.up_proj.weight" in str(error.value)
    assert "1 misshapen: model.norm.weight is (31,), not (32,)" in str(error.value)


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(loaded, tmp_path):
    def store(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    jax.tree.map(np.testing.assert_array_equal, altered(tmp_path, "qwen2", store)(), loaded["qwen2"][2])

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(ValueError, match="ties the embeddings, but lm_head.weight differs"):
        altered(tmp_path, "qwen2", differ)()


def test_a_folder_without_its_weight_files_says_which(tmp_path):
    shutil.copy(GOLDEN / "qwen2" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"lacks the weight files model\.safetensors"):
        models.load(tmp_path, models.read_config(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_golden_files_are_what_transformers_computes_and_it_loads_our_export(loaded, tmp_path, name):
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("transformers", reason="needs torch and transformers")
    spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).parent / "make_golden.py")
    make_golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_golden)
    config, _, params = loaded[name]
    models.save(tmp_path, config, params)
    golden = np.load(GOLDEN / name / "golden.npz")
    for folder in (GOLDEN / name, tmp_path):
        computed = make_golden.compute(make_golden.load(folder))
        np.testing.assert_allclose(computed["logits"], golden["logits"], atol=2e-5)  # another machine's f32
        np.testing.assert_array_equal(computed["greedy"], golden["greedy"])
