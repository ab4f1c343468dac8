"""The shape of a decoder: every number and choice that its weights and its arithmetic depend on."""

import dataclasses

import numpy as np

# Beyond any model: a damaged config.json is refused before a million layers are laid out.
LARGEST = {"vocab_size": 2**24, "num_layers": 1000, "embed_dim": 2**20, "num_heads": 2**14, "num_kv_heads": 2**14}
LARGEST |= {"head_dim": 2**14, "hidden_dim": 2**24, "max_position_embeddings": 2**31 - 1}
_LARGEST_OF_EXPERTS = {"count": 2**16, "per_token": 2**16, "hidden_dim": 2**24}


def _check_size(name: str, value: object, least: int, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
        raise ValueError(f"{name} must be a whole number in [{least}, {largest}], got {value!r}")


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071) with the field names of Qwen's published configs. Frequencies that turn
    fewer than `beta_slow` times over the original context are divided by `factor`. Frequencies that turn more than
    `beta_fast` times are kept, and frequencies in between are blended. Queries and keys are scaled by
    `attention_factor` (None: 0.1 ln(factor) + 1). Raises ValueError for a factor below 1."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"YaRN factor must be >= 1 (1 leaves the context as it is), got {self.factor}")


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Context extension of Llama 3.1 and later (arXiv:2407.21783), with the field names of Llama's published configs.
    Frequencies that turn fewer than `low_freq_factor` times over the original context are divided by `factor`.
    Frequencies that turn more than `high_freq_factor` times are kept, and frequencies in between are blended. Raises
    ValueError unless factor >= 1 and 0 < low_freq_factor < high_freq_factor."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"llama3 factor must be >= 1 (1 leaves the context as it is), got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "llama3 needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: pair i of a head of size H turns by theta^(-2i/H) radians a position. `scaling`
    extends the context; None is plain RoPE. `max_position_embeddings` is the longest context, and computes nothing."""

    theta: float = 1_000_000.0
    max_position_embeddings: int = 32_768
    scaling: Yarn | Llama3 | None = None


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of SwiGLU experts in every layer: each token goes to `per_token` of `count` experts. An expert has
    `hidden_dim` hidden units. Softmax probabilities weight the outputs of the chosen experts. If `renormalise`, a
    token's weights are divided by their sum. Raises ValueError unless all three are whole numbers from 1 to a limit
    beyond any model, and per_token <= count."""

    count: int
    per_token: int
    hidden_dim: int
    renormalise: bool = True

    def __post_init__(self):
        for name, largest in _LARGEST_OF_EXPERTS.items():
            _check_size(f"experts {name}", vars(self)[name], 1, largest)
        if self.per_token > self.count:
            raise ValueError(f"experts per_token {self.per_token} must be in 1..{self.count}")

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned NumPy dtype that holds the numbers of the experts, 0 to `count` - 1."""
        return np.min_scalar_type(self.count - 1)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder with RMS norms, rotary positions, grouped-query attention and SwiGLU.

    Families differ in the last fields. Qwen2 and Qwen2.5 have biases on q, k and v. Qwen3 has norms on q and k instead,
    and Qwen3-MoE also has `experts`. Llama and SmolLM2 have neither biases nor norms there.

    Raises ValueError if a size is no whole number from 1 to its limit in `LARGEST`, or breaks a rule below; or if
    `rms_norm_eps`, `rope.theta` or a number of `rope.scaling` is not above 0 and finite.

    Attributes:
      embed_dim: width of the hidden states between layers.
      num_heads: query heads, a multiple of `num_kv_heads`, the key-value heads.
      head_dim: numbers in a query, key or value of one head; even.
      hidden_dim: width of the dense feed-forward layer; not used, and may be 0, if there are `experts`.
      qkv_bias: whether the projections to q, k and v add a bias.
      qk_norm: whether q and k pass an RMS norm over each head before the rotation.
      experts: the mixture that replaces the feed-forward layer; None is a dense model.
      tie_embeddings: whether the embedding is also the output head.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    qkv_bias: bool = False
    qk_norm: bool = True
    rope: Rope = Rope()
    experts: Experts | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self):
        for name, largest in LARGEST.items():
            _check_size(name, (vars(self) | vars(self.rope))[name], 0 if name == "hidden_dim" else 1, largest)
        extension = dataclasses.asdict(self.rope)["scaling"] or {}
        for name, number in {"rms_norm_eps": self.rms_norm_eps, "rope theta": self.rope.theta, **extension}.items():
            unset = name == "attention_factor" and number is None
            if not unset and not (isinstance(number, int | float) and 0 < number < float("inf")):
                raise ValueError(f"{name} must be a number above 0 and finite, got {number!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary embedding turns pairs), got {self.head_dim}")
        if self.experts is None and self.hidden_dim < 1:
            raise ValueError(f"a dense model needs hidden_dim >= 1, got {self.hidden_dim}")
