"""A GGUF file is read as transformers reads it, or refused by name. The files are made here, from the golden models.

`golden/gguf.json` has what transformers 5.24.0 with gguf 0.19.0 reads from these very files:
`python tests/models/tiny_gguf.py` writes it.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

from rpg_jax import data, models

gguf = pytest.importorskip("gguf", reason="needs the package gguf, of requirements-dev.txt")

from rpg_jax.models import gguf_files  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gguf import CASES, GOLDEN, TEXTS, messages, write  # noqa: E402

READ = json.loads((GOLDEN / "gguf.json").read_text(encoding="utf-8")) if (GOLDEN / "gguf.json").exists() else {}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(folder, tokens):
    config = models.read_config(folder)
    graphdef, _ = models.abstract(config)
    module = nnx.merge(graphdef, models.load(folder, config))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(module.logits(module(tokens, positions, jnp.ones_like(tokens))))


@pytest.mark.parametrize("name", CASES)
def test_an_unquantised_file_has_the_weights_of_the_folder_it_came_from(tmp_path, name):
    folder = models.local_folder(write(tmp_path / "tiny.gguf", name))
    assert models.read_config(folder) == models.read_config(GOLDEN / name)
    found, expected = (load_file(path / "model.safetensors") for path in (folder, GOLDEN / name))
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


@pytest.mark.parametrize("name", READ)
def test_logits_of_a_quantised_file_are_those_of_transformers(tmp_path, name):
    folder = models.local_folder(write(tmp_path / "tiny.gguf", name, quantised=True))
    tokens = jnp.asarray(READ[name]["tokens"], jnp.int32)
    found, expected = logits(folder, tokens), np.asarray(READ[name]["logits"])
    # Relative to the largest logit: both sum in f32, in different orders.
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", READ)
def test_ids_and_the_chat_template_are_those_of_transformers(tmp_path, name):
    tokenizer = data.load_tokenizer(models.local_folder(write(tmp_path / "tiny.gguf", name), weights=False))
    assert [tokenizer.encode(text) for text in TEXTS] == READ[name]["ids"]
    assert tokenizer.chat(messages()) == READ[name]["rendered"]
    assert [tokenizer.decode(ids) for ids in READ[name]["ids"]] == [
        text.replace("<|start|>", "").replace("<|end|>", "") for text in TEXTS
    ]
    assert tokenizer.stop_token_ids == (1,)


def test_the_file_is_converted_once_and_again_after_a_change(tmp_path, capsys):
    file = write(tmp_path / "tiny.gguf", "llama")
    described = models.local_folder(file, weights=False)
    assert not list(described.glob("*.safetensors")) and models.read_config(described)
    folder = models.local_folder(str(file))
    assert folder == described and "float32" in capsys.readouterr().err
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.local_folder(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    os.utime(file, ns=(1, 1))
    assert models.local_folder(file, weights=False) != folder


def test_many_files_of_weights_have_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "_FILE_BYTES", 20_000)
    size = gguf_files.convert(write(tmp_path / "tiny.gguf", "llama3"), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == size
    config = models.read_config(tmp_path / "out")
    parts = (models.load(path, config) for path in (tmp_path / "out", GOLDEN / "llama3"))
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_weights_that_cannot_be_written_are_an_error_of_the_system_that_names_the_file(tmp_path):
    (tmp_path / "out" / ".model.safetensors.partial").mkdir(parents=True)
    with pytest.raises(OSError, match=r"out/model\.safetensors cannot be written: .*I/O error"):
        gguf_files.convert(write(tmp_path / "tiny.gguf", "llama"), tmp_path / "out")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not read from GGUF, only llama, "),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type = 'linear' is not supported"),
        ({"llama.attention.sliding_window": 512}, "llama.attention.sliding_window = 512"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4"),
        ({"llama.block_count": 3}, "missing: blk.2.attn_k.weight"),
        ({"llama.block_count": None}, "no field 'block_count'"),
        ({"llama.attention.head_count": 0}, "by zero"),
        ({"llama.feed_forward_length": 50}, r"ffn_down.weight is \(32, 48\), not \(32, 50\)"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer .* is not read from GGUF, only byte-level BPE"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre 'tekken'"),
        ({"tokenizer.ggml.tokens": ["a"] * 90}, "90 tokens, 1 of them distinct"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, metadata, message):
    file = write(tmp_path / "tiny.gguf", "llama", metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        models.local_folder(file)
    assert str(file) in str(error.value)


def test_frequencies_that_are_not_those_of_llama3_are_refused(tmp_path):
    file = write(tmp_path / "tiny.gguf", "llama", tensors={"rope_freqs.weight": np.asarray([1, 2, 3, 4], np.float32)})
    with pytest.raises(ValueError, match="rope_freqs.weight is not llama3"):
        models.local_folder(file)


def test_an_extra_tensor_is_named(tmp_path):
    file = write(tmp_path / "tiny.gguf", "llama", tensors={"blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(ValueError, match="1 extra: blk.0.attn_q.bias"):
        models.local_folder(file)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such format" * 100])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.gguf is damaged or no GGUF file"):
        models.local_folder(tmp_path / "bad.gguf")


def test_a_file_that_was_cut_short_is_named(tmp_path):
    file = write(tmp_path / "tiny.gguf", "llama")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"tiny\.gguf"):
        models.local_folder(file)


def test_a_missing_file_or_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no local file .*none\.gguf"):
        models.local_folder(tmp_path / "none.gguf")
    file = write(tmp_path / "tiny.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'rpg_jax\[gguf\]'$"):
        models.local_folder(file)


def test_rows_are_put_back_in_the_order_of_pairs():
    rows = np.arange(8.0)[:, None]  # two heads of size 4: their pairs are (0, 1), (2, 3) in GGUF
    assert gguf_files.unpermuted(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_digits_and_blanks_are_split_as_each_family_does(pre):
    split = [piece for piece, _ in gguf_files._SPLITTERS[pre]().pre_tokenize_str("a\n\n12345")]
    expected = {"smollm": ["1", "2", "3", "4", "5"], "llama-bpe": ["123", "45"], "qwen2": ["1", "2", "3", "4", "5"]}
    assert split == ["a", "ĊĊ", *expected[pre]]


@pytest.mark.slow
def test_smollm2_as_published_answers(tmp_path):
    """The real weights: RPG_JAX_SMOLLM2 names the folder that `python -m launch.pretrained` has written."""
    folder = os.environ.get("RPG_JAX_SMOLLM2")
    if not folder:
        pytest.skip("RPG_JAX_SMOLLM2 names no folder: python -m launch.pretrained smollm2-135m")
    tokenizer, config = data.load_tokenizer(folder), models.read_config(folder)
    assert config == models.size("smollm2-135m")
    text = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    graphdef, _ = models.abstract(config)
    params = models.load(folder, config)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")  # transformers' greedy tokens
    prompt = tokenizer.encode(text)
    tokens = jnp.asarray([prompt + answer], jnp.int32)

    @jax.jit
    def chosen(params):
        module = nnx.merge(graphdef, params)
        hidden = module(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
        return module.logits(hidden).argmax(-1)

    assert np.asarray(chosen(params))[0, len(prompt) - 1 : -1].tolist() == answer
    assert isinstance(tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json"), tokenizers.Tokenizer)
