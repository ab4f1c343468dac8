"""Tiny GGUF files, made of the golden models in Hugging Face layout and a byte-level tokenizer.

    python tests/models/tiny_gguf.py    # with torch, transformers and gguf: golden/gguf.json

The file in the repository has what torch 2.14.1, transformers 5.24.0 and gguf 0.19.0 read from them.
"""

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
CASES = ("llama", "llama3", "qwen2", "qwen3")
TEXTS = ["hello world", " the  hello\n\nlow", "<|start|>hello<|end|>", "12 + 3 = 15", "héllo wörld", ""]
TEMPLATE = "{% for m in messages %}{{ '<|start|>' + m['role'] + ' ' + m['content'] + '<|end|>' }}{% endfor %}"
_NAMES = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
_NAMES |= {"model.layers.": "blk.", "self_attn.": "attn_", "_proj.": ".", "attn_o.": "attn_output."}
_NAMES |= {"mlp.": "ffn_", "input_layernorm.": "attn_norm.", "post_attention_layernorm.": "ffn_norm."}
_PRE = {"llama": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello world"}]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: two special tokens, the bytes that occur in `TEXTS`, and words."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "t he", "Ġ the", "Ċ Ċ", "Ġ Ġ"]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+=<>|") | set("ĠĊÃ©¶"))
    tokens = ["<|start|>", "<|end|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    return tokens + [f"<unused{i}>" for i in range(96 - len(tokens))], merges


def write(path: Path, name: str, *, quantised: bool = False, metadata=None, tensors=None) -> Path:
    """A file of the golden model `name`.

    Args:
      quantised: matrices whose rows have a multiple of 32 numbers are Q8_0, others f16.
      metadata: values that replace those of the file; None leaves one out.
      tensors: further ones.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    family, rope = config["model_type"], config["rope_parameters"]
    tokens, merges = vocabulary()
    fields = {
        f"{family}.vocab_size": config["vocab_size"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE[name],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<|start|>", "<|end|>") else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    if config.get("head_dim"):
        size = config["head_dim"]
        fields |= {f"{family}.attention.{x}_length": size for x in ("key", "value")}
        fields[f"{family}.rope.dimension_count"] = size
    fields |= metadata or {}
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", family))
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str | bool | float):
            {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}[type(value)](key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    held = {}
    for key, value in load_file(GOLDEN / name / "model.safetensors").items():
        if family == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        for old, new in _NAMES.items():
            key = key.replace(old, new)
        held[key] = np.ascontiguousarray(value)
    if rope["rope_type"] == "llama3":
        held["rope_freqs.weight"] = divisors(config["head_dim"], rope)
    for key, value in (held | (tensors or {})).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if value.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F16
        if quantised and value.ndim > 1:
            writer.add_tensor(key, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def divisors(size: int, rope) -> np.ndarray:
    """What llama.cpp's converter writes for llama3, by its loop over wavelengths."""
    found = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, size, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / size) / (2 * np.pi)
        smooth = (turns - low) / (high - low)
        found.append(1.0 if turns > high else rope["factor"] if turns < low else None)
        if found[-1] is None:
            found[-1] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.asarray(found, np.float32)


def main() -> None:
    """Writes what transformers reads from the quantised files.

    It ignores the frequencies of "llama3", and the size of the heads of "qwen3".
    """
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {}
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12)).tolist()
    for name in ("llama", "qwen2"):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "tiny.gguf", name, quantised=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file="tiny.gguf", dtype=torch.float32, attn_implementation="eager"
            ).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
            with torch.no_grad():
                logits = model(torch.tensor(tokens)).logits.numpy()
            read[name] = {
                "tokens": tokens,
                "logits": np.round(logits.astype(np.float64), 7).tolist(),
                "ids": [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS],
                "rendered": tokenizer.apply_chat_template(messages(), tokenize=False),
            }
    (GOLDEN / "gguf.json").write_text(json.dumps(read) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
