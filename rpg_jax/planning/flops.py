"""Floating-point operations of a model's mathematics; no program can do with fewer."""

from rpg_jax.models import DecoderConfig


def token_flops(config: DecoderConfig, *, tokens: float, attended: float, predicted: float) -> float:
    """Operations of a forward pass over `tokens` that attend to `attended` tokens each, in the mean.

    Logits are computed at `predicted` positions in all. Every multiply-add of a matrix product counts as two. Norms,
    rotations and softmax do not count.
    """
    scores_and_values = 2 * 2 * config.num_heads * config.head_dim * attended
    head = 2 * config.embed_dim * config.vocab_size
    return tokens * config.num_layers * (_layer(config) + scores_and_values) + predicted * head


def forward_flops(config: DecoderConfig, *, rows: int, length: int, predicted: int) -> float:
    """Operations of a forward pass over `rows` sequences of `length` tokens, with logits at `predicted` positions each.

    Causal attention counts half of the scores.
    """
    return token_flops(config, tokens=rows * length, attended=length / 2, predicted=rows * predicted)


def training_flops(
    config: DecoderConfig, *, rows: int, length: int, predicted: int, remat: str = "none", frozen: bool = False
) -> float:
    """Operations of a forward and a backward pass over sequences as in `forward_flops`."""
    sizes = {"tokens": rows * length, "attended": length / 2, "predicted": rows * predicted}
    return token_training_flops(config, **sizes, remat=remat, frozen=frozen)


def token_training_flops(
    config: DecoderConfig,
    *,
    tokens: float,
    attended: float,
    predicted: float,
    remat: str = "none",
    frozen: bool = False,
) -> float:
    """Operations of a forward and a backward pass: three forward passes, and recomputation.

    The logits of every chunk are computed again. A remat policy that keeps layer inputs only (`full`, `offload`) also
    computes the layers again, except the last product of each: no gradient needs its result. Attention's own backward
    pass then computes the scores once more. `frozen` weights have no gradient, which saves a third of their products.
    The products of adapters beside them are few and not counted.
    """
    forward = token_flops(config, tokens=tokens, attended=attended, predicted=predicted)
    layers = token_flops(config, tokens=tokens, attended=attended, predicted=0)
    again = 0.0
    if remat in ("full", "offload"):
        last = 2 * _hidden_units(config) * config.embed_dim
        scores = 2 * config.num_heads * config.head_dim * attended
        again = layers + tokens * config.num_layers * (scores - last)
    saved = token_flops(config, tokens=tokens, attended=0, predicted=predicted) if frozen else 0.0
    return 3 * forward + (forward - layers) + again - saved


def _layer(config: DecoderConfig) -> float:
    """Matrix products of one layer for one token, without scores and values of attention."""
    D, H = config.embed_dim, config.head_dim
    weights = 2 * D * config.num_heads * H + 2 * D * config.num_kv_heads * H
    if config.experts:
        weights += D * config.experts.count
    return 2.0 * (weights + 3 * D * _hidden_units(config))


def _hidden_units(config: DecoderConfig) -> int:
    """Hidden units of the feed-forward layer that a token sees; in a mixture the units of its experts."""
    return config.experts.per_token * config.experts.hidden_dim if config.experts else config.hidden_dim
