"""Reads `config.json` of a Hugging Face folder, as transformers 4 and 5 write it, and writes it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpg_jax.models.config import DecoderConfig, Experts, Llama3, Rope, Yarn
from rpg_jax.storage.files import read_object

FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
_FAMILY_WITH = {
    (True, False, False): "qwen2",
    (False, True, False): "qwen3",
    (False, True, True): "qwen3_moe",
    (False, False, False): "llama",
}
"""The family of a model by whether it has biases on q, k and v; norms on q and k; experts."""
_EXTENSIONS: dict[str, type[Yarn] | type[Llama3]] = {"yarn": Yarn, "llama3": Llama3}
_LLAMA_THETA = 1e4  # theta of Llama 2, whose older folders do not name theta
_KINDS = {
    "a number": (
        *("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "rms_norm_eps", "rope_theta"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size"),
        *("num_experts", "num_local_experts", "num_experts_per_tok"),
    ),
    "an object": ("rope_scaling", "rope_parameters"),
    "true or false": ("tie_word_embeddings", "norm_topk_prob"),
}
_TYPES = {"a number": int | float, "an object": dict, "true or false": bool}


def read_config(folder: Path | str) -> DecoderConfig:
    """Returns the config of the model that `folder`/config.json describes. Raises ValueError if there is no such file,
    the file is no JSON object, the folder is a run's, a field is missing or of a wrong type, or a field asks for what
    is not computed; the message names the file and the field."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a Hugging Face model folder: there is no {path}")
    fields = read_object(path)
    if {"rollout", "train"} <= fields.keys():
        raise ValueError(
            f"{folder} is a run and no model: --config.run.start_from={folder} begins a new run where it stands, with "
            f"its optimizer; python -m rpg_jax.export --run={folder} --out=FOLDER, then model.path=FOLDER takes its "
            "weights alone"
        )
    try:
        return parse_config(fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, ZeroDivisionError) as error:
        reason = f"it has no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: {reason}") from None


def parse_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config that the fields of a config.json describe. Raises ValueError for what is not computed,
    KeyError for a missing field, and perhaps TypeError, AttributeError or ArithmeticError for a wrong type or a 0."""
    model_type = fields.get("model_type")
    if "vision_config" in fields or "audio_config" in fields or "text_config" in fields:
        raise ValueError(f"model_type {model_type!r} has vision or audio parts; only text decoders are supported")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; the families are {', '.join(FAMILIES)}")
    for kind, names in _KINDS.items():
        for name in names:
            if fields.get(name) is not None and not isinstance(fields[name], _TYPES[kind]):
                raise ValueError(f"{name}={fields[name]!r:.60} must be {kind}")
    _refuse_what_is_not_computed(fields, model_type)
    heads, experts = fields["num_attention_heads"], None
    if model_type == "qwen3_moe":  # transformers 4 writes `num_experts`, transformers 5 `num_local_experts`
        experts = Experts(
            count=fields["num_experts" if "num_experts" in fields else "num_local_experts"],
            per_token=fields["num_experts_per_tok"],
            hidden_dim=fields["moe_intermediate_size"],
            renormalise=fields.get("norm_topk_prob", False),
        )
    return DecoderConfig(
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        embed_dim=fields["hidden_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        hidden_dim=fields["intermediate_size"],
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope=_rope(fields, _LLAMA_THETA if model_type == "llama" else None),
        experts=experts,
        rms_norm_eps=fields["rms_norm_eps"],
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write_config(config: DecoderConfig, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the fields of a config.json that transformers (4.51 and later) and `parse_config` read as `config`.
    Raises ValueError if no family of `FAMILIES` has these biases, norms, experts and sizes.

    Args:
      dtype: dtype of the weights in the same folder: "float32", "bfloat16" or "float16".
      base: the fields of the folder that the weights came from. Fields that do not describe the model (token ids,
        dropout, …) are taken over. None: no further fields.
    """
    experts = config.experts
    has = config.qkv_bias, config.qk_norm, experts is not None
    if has not in _FAMILY_WITH:
        raise ValueError(
            "transformers has no such model: biases on q, k and v (Qwen2), norms on q and k (Qwen3, Qwen3-MoE with "
            f"experts) or neither (Llama), got qkv_bias={has[0]}, qk_norm={has[1]}, experts={has[2]}"
        )
    model_type = _FAMILY_WITH[has]
    if model_type == "qwen2" and config.head_dim * config.num_heads != config.embed_dim:
        raise ValueError(f"a Qwen2 has head_dim = embed_dim / num_heads, got {config}")
    if model_type == "llama" and config.embed_dim % config.num_heads:
        raise ValueError(f"transformers reads a Llama only if num_heads divides embed_dim, got {config}")
    kept = {k: v for k, v in (base or {}).items() if k not in ("rope_parameters", "dtype", "num_local_experts")}
    fields = kept | {
        "architectures": [FAMILIES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.hidden_dim,
        "rope_theta": config.rope.theta,
        "rope_scaling": _written_scaling(config.rope),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.rope.max_position_embeddings,
        "torch_dtype": dtype,
    }
    if model_type == "llama":
        fields |= {"mlp_bias": False, "pretraining_tp": 1}
    else:
        fields["use_sliding_window"] = False
    if model_type != "qwen2":
        fields |= {"head_dim": config.head_dim, "attention_bias": False}
    if experts:
        fields |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.hidden_dim,
            "norm_topk_prob": experts.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return fields


def _written_scaling(rope: Rope) -> dict[str, Any] | None:
    """Returns the field `rope_scaling` of a config.json; None for plain RoPE."""
    if rope.scaling is None:
        return None
    [kind] = [name for name, extension in _EXTENSIONS.items() if isinstance(rope.scaling, extension)]
    return {"rope_type": kind} | {k: v for k, v in dataclasses.asdict(rope.scaling).items() if v is not None}


def _refuse_what_is_not_computed(fields: Mapping[str, Any], model_type: str) -> None:
    kinds = set(fields.get("layer_types") or ()) - {"full_attention"}
    if fields.get("use_sliding_window") or kinds:
        raise ValueError(f"sliding-window attention is unsupported (use_sliding_window or layer_types {sorted(kinds)})")
    expected: dict[str, Any] = {"hidden_act": "silu", "quantization_config": None}
    expected |= {"partial_rotary_factor": 1.0, "use_mrope": False}
    if model_type != "qwen2":
        expected["attention_bias"] = False
    if model_type == "llama":
        expected |= {"mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False}
    if model_type == "qwen3_moe":
        expected |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    for name, value in expected.items():
        if fields.get(name, value) not in (value, None):
            raise ValueError(f"{name} {fields[name]!r} is not supported for {model_type}, only {value!r}")


def _rope(fields: Mapping[str, Any], default_theta: float | None) -> Rope:
    """Reads the flat fields and `rope_scaling` of transformers 4, or the dict `rope_parameters` of 5. Theta may be
    missing if there is a `default_theta`. Raises ValueError for a missing field and for what is not computed."""
    positions = fields["max_position_embeddings"]
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", fields.get("rope_theta", default_theta))
    if theta is None:
        raise ValueError("neither rope_theta nor rope_parameters.rope_theta is given")
    old_name, new_name = rope.pop("type", None), rope.pop("rope_type", None)
    kind = new_name or old_name or "default"
    if kind == "default":
        return Rope(float(theta), positions)
    if kind not in _EXTENSIONS:
        raise ValueError(f"rope type {kind!r} is not supported, only 'default', {', '.join(map(repr, _EXTENSIONS))}")
    rope.setdefault("original_max_position_embeddings", positions)
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(_EXTENSIONS[kind])}
    unknown = {k: v for k, v in rope.items() if k not in known and v is not None}
    if unknown:
        raise ValueError(f"{kind} fields {unknown} are not supported; the known ones are {', '.join(sorted(known))}")
    if missing := [name for name, needed in known.items() if needed and rope.get(name) is None]:
        raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
    return Rope(float(theta), positions, _EXTENSIONS[kind](**{k: v for k, v in rope.items() if v is not None}))
