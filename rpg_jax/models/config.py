"""The shape of a Qwen model: every number that its weights and its arithmetic depend on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071) with the field names of Qwen's published configs.

    Rotation frequencies that turn fewer than `beta_slow` times over the original context are divided by `factor`,
    those that turn more than `beta_fast` times are kept, and those between are blended; queries and keys are scaled
    by `attention_factor` (None: 0.1 ln(factor) + 1).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"YaRN factor must be >= 1 (1 leaves the context as it is), got {self.factor}")


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """A Qwen2, Qwen2.5, Qwen3 or Qwen3-MoE decoder.

    Qwen2 and 2.5 have `attention_bias` (on q, k and v) and no `qk_norm`; Qwen3 the reverse. `num_experts` 0 means a
    dense feed-forward layer of width `hidden_dim`; otherwise every layer routes a token to `experts_per_token` of
    `num_experts` experts of width `moe_hidden_dim`, weighted by their softmax probabilities, renormalised over the
    chosen ones where `norm_topk_prob`.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 32_768
    rope_scaling: Yarn | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_hidden_dim: int = 0
    norm_topk_prob: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary embedding turns pairs), got {self.head_dim}")
        if self.num_experts:
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ValueError(f"experts_per_token {self.experts_per_token} must be in 1..{self.num_experts}")
            if self.moe_hidden_dim < 1:
                raise ValueError(f"a model with experts needs moe_hidden_dim >= 1, got {self.moe_hidden_dim}")
        elif self.hidden_dim < 1:
            raise ValueError(f"a dense model needs hidden_dim >= 1, got {self.hidden_dim}")
