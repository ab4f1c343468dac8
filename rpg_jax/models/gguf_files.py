"""GGUF files, the format of llama.cpp, as folders in Hugging Face layout: weights, config, tokenizer, chat template."""

import fcntl
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import normalizers, pre_tokenizers, processors

from rpg_jax.models.config import DecoderConfig, Llama3, Rope
from rpg_jax.models.hf_config import write_config
from rpg_jax.models.hf_layout import file_names, in_files, layout, mismatch, write_index
from rpg_jax.models.layers import llama3_divisors
from rpg_jax.storage.files import cache_folder, write_atomically

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_VERSION = 1  # version of the kept folders; with another number they are made again
_FILE_BYTES = 2**30  # the most bytes of a file of weights
_FIX = "take the model's folder in Hugging Face layout instead"
_KNOWN = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length"),
    *("attention.value_length", "rope.dimension_count", "rope.freq_base"),
}
_OFF = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens


def kept_folder(file: Path, *, weights: bool = True) -> Path:
    """Returns the folder in Hugging Face layout of a GGUF file, in this host's cache. Converts the file if there is no
    folder: one process of a host converts, and others wait. A file whose path, size or time has changed gets a new
    folder; the old folder stays. `weights` False asks for config and tokenizer alone. A line on stderr names the folder
    after the weights were written. Raises the errors of `convert`, and FileNotFoundError if there is no file."""
    found = file.resolve().stat()
    about = [str(file.resolve()), found.st_size, found.st_mtime_ns, _VERSION]
    target = cache_folder() / "gguf" / f"{file.stem}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / ("weights.done" if weights else "config.json")).exists():
            size = convert(file, target, weights=weights)
            if weights:
                print(f"{file}: {size / 1e9:.2f} GB of weights in float32 are kept in {target}", file=sys.stderr)
                (target / "weights.done").touch()
    return target


def convert(file: Path, folder: Path, *, weights: bool = True) -> int:
    """Writes the model of a GGUF file into a folder that transformers loads too; returns the bytes of the weights.

    The package gguf dequantises the weights to float32. Host memory holds one file of 1 GiB at a time, or one matrix if
    the matrix is larger. Files of the same names are replaced; config.json is written last. `weights` False writes
    config and tokenizer alone, and returns 0.

    Raises ValueError if the package gguf is not installed, or if the file is damaged or has something that is not
    computed here; the message names it. Raises OSError if the file cannot be opened or the folder written."""
    reader = _opened(file)
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(metadata, tensors)
        ids = {f"{name}_token_id": number for name, number in _special(metadata).items() if name != "unk"}
        fields = write_config(config, "float32", ids)
        needed = _needed(config, fields["model_type"], tensors)
        described = _tokenizer_files(metadata, fields)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        reason = f"it has no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: {reason}") from error
    folder.mkdir(parents=True, exist_ok=True)
    size = 0
    if weights:
        size = _write_weights(file, folder, config, fields["model_type"], needed)
    for name, content in (described | {"config.json": json.dumps(fields, indent=2) + "\n"}).items():
        write_atomically(folder / name, content)
    return size


def _opened(file: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError(f"{file}: reading GGUF needs the package gguf: pip install 'rpg_jax[gguf]'") from error
    try:
        return gguf.GGUFReader(file)
    except OSError:
        raise
    except Exception as error:  # the library checks little, and numpy raises errors of many kinds
        raise ValueError(f"{file} is damaged or no GGUF file: {' '.join(str(error).split())[:200]}") from error


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Returns the model's config. Raises ValueError for a feature that is not computed, KeyError for a missing key."""
    family = metadata["general.architecture"]
    if family not in ARCHITECTURES:
        raise ValueError(f"the architecture {family!r} is not read from GGUF, only {', '.join(ARCHITECTURES)}: {_FIX}")
    own = {k.removeprefix(f"{family}."): metadata[k] for k in metadata if k.startswith(f"{family}.")}
    for name in sorted(own.keys() - _KNOWN):
        if own[name] != _OFF.get(name, ...):
            raise ValueError(f"{family}.{name} = {own[name]!r} is not supported: {_FIX}")
    width, heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", width // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if own.get(name, head_dim) != head_dim:
            raise ValueError(f"{family}.{name} = {own[name]} is not supported, only the heads' size {head_dim}: {_FIX}")
    # Stored in f32: the shortest decimal number that rounds to it is the one that was written.
    eps, theta = (
        float(str(np.float32(x))) for x in (own["attention.layer_norm_rms_epsilon"], own.get("rope.freq_base", 1e4))
    )
    return DecoderConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        num_layers=own["block_count"],
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=own.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_dim=own["feed_forward_length"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=Rope(theta, own["context_length"], _llama3(tensors.get("rope_freqs.weight"), head_dim, theta)),
        rms_norm_eps=eps,
        tie_embeddings="output.weight" not in tensors,
    )


def _llama3(divisors: Any, head_dim: int, theta: float) -> Llama3 | None:
    """Returns the context extension of the tensor `divisors` f32[H/2], by which llama.cpp divides frequencies, or None
    for no tensor. Its largest number is the factor. `low_freq_factor` and `high_freq_factor` are 1 and 4 in every
    published Llama; the original context follows from the blended pairs. Raises ValueError unless all pairs agree."""
    if divisors is None:
        return None
    found, base = np.asarray(divisors.data, np.float64), theta ** -(np.arange(0, head_dim, 2) / head_dim)
    factor, context = float(found.max()), 8192
    blended = (found > 1) & (found < factor)
    if found.shape == base.shape and blended.any():
        kept = (1 / found - 1 / factor) / (1 - 1 / factor)
        context = max(round(float(np.median(((1 + 3 * kept) * 2 * np.pi / base)[blended]))), 1)
    extension = Llama3(factor, 1.0, 4.0, context)
    expected = llama3_divisors(base, extension)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):  # both rounded to f32
        raise ValueError(f"rope_freqs.weight is not llama3 with low_freq_factor 1 and high_freq_factor 4: {_FIX}")
    return extension


def _needed(config: DecoderConfig, family: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's tensor for each name in Hugging Face layout. Raises ValueError if names or shapes differ."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    shapes = {name: entry.tensor_shape for entry in layout(config) for _, name in entry.tensors()}
    names = get_tensor_name_map(MODEL_ARCH[family.upper()], config.num_layers)
    named: dict[str, Any] = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in shapes}
    found = {own: tuple(map(int, reversed(tensor.shape))) for own, tensor in tensors.items()}
    found.pop("rope_freqs.weight", None)
    if told := mismatch(found, {own: shapes[name] for name, own in named.items()}):
        raise ValueError(f"its tensors do not match its metadata: {told}")
    return {name: tensors[own] for name, own in named.items()}


def _write_weights(file: Path, folder: Path, config: DecoderConfig, family: str, needed: Mapping[str, Any]) -> int:
    """Writes safetensors of float32, and an index if there are several files. Returns the bytes of all numbers."""
    sizes = {name: 4 * int(np.prod(tensor.shape)) for name, tensor in needed.items()}
    parts = list(in_files(sizes, lambda name: sizes[name], _FILE_BYTES))
    files = dict(zip(file_names(len(parts)), parts, strict=True))
    total = sum(sizes.values())
    for last, names in files.items():
        held = {}
        for name in names:
            held[name] = _dequantised(file, needed[name])
            if family == "llama" and (which := re.search(r"\.([qk])_proj\.weight", name)):
                held[name] = unpermuted(held[name], config.num_heads if which[1] == "q" else config.num_kv_heads)
        try:
            save_file(held, folder / f".{last}.partial", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / last} cannot be written: {error}") from error
        (folder / f".{last}.partial").replace(folder / last)
    write_index(folder, {name: last for last, names in files.items() for name in names}, total)
    return total


def _dequantised(file: Path, tensor: Any) -> np.ndarray:
    from gguf import quants

    try:
        return np.ascontiguousarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"{file}: {tensor.name} is quantised as {kind}, which gguf does not read: {error}") from error


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a projection to q or k, [heads · H, D], in Hugging Face's order: pair i of a head is rows i
    and i + H/2. In `weight`, in llama.cpp's order for Llama's architecture, the rows of a pair are neighbours."""
    rows, width = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width))


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""The word of a special token's id in GGUF, by its word in Hugging Face layout."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _special(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of the file's special tokens by their names in Hugging Face layout, the keys of `_SPECIAL`."""
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    return {name: number for name, number in found.items() if number is not None}


def _by_regex(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(_SPLIT.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _single_digits,
    "llama-bpe": functools.partial(_by_regex, r"\p{N}{1,3}"),
    "qwen2": functools.partial(_by_regex, r"\p{N}"),
}
"""How a text is split before the merges, by the name in `tokenizer.ggml.pre`."""


def _tokenizer_files(metadata: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the contents of the tokenizer's files, by file name. `fields` are the fields of config.json. Raises
    ValueError for a damaged tokenizer or a kind that is not known here, KeyError for a missing key."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _SPLITTERS:
        raise ValueError(
            f"its tokenizer (tokenizer.ggml.model {kind!r}, pre {pre!r}) is not read from GGUF, only byte-level BPE "
            f"with pre {', '.join(_SPLITTERS)}: {_FIX}"
        )
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens) or len(tokens) > fields["vocab_size"]:
        raise ValueError(f"its tokenizer is damaged: {len(tokens)} tokens, {len(vocabulary)} of them distinct")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata["tokenizer.ggml.merges"])]
    try:
        # Llama 3 takes a word that is a token as this token, whatever its merges say.
        model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises this class
        raise ValueError(f"its tokenizer is damaged: {' '.join(str(error).split())[:200]}") from error
    made = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer, made.decoder = _SPLITTERS[pre](), tokenizers.decoders.ByteLevel()
    for token, one in zip(tokens, types, strict=True):
        if one in (_CONTROL, _USER_DEFINED):
            made.add_tokens([tokenizers.AddedToken(token, normalized=False, special=one == _CONTROL)])
    special = {f"{name}_token": tokens[number] for name, number in _special(metadata).items()}
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["max_position_embeddings"],
        **special,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    generation = {"eos_token_id": list(dict.fromkeys(stop for stop in stops if stop is not None))}
    return {
        "tokenizer.json": made.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
