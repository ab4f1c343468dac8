"""A teacher: the model of `reference.path`, which anchors the KL term and is never trained.

A teacher may have another family and other widths than the policy. It lies on the policy's mesh by the same rules.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax import data, models
from rpg_jax.runs.layout import Layout, teacher_folder
from rpg_jax.runs.learner import learner_programs, make_learner
from rpg_jax.training.reference import Taught
from rpg_jax.training.state import in_host_memory


def reference_layout(layout: Layout) -> Layout:
    """The layout of the reference: of the teacher in the compute dtype, or without a teacher the policy's own.

    A teacher's vocabulary is cut to the entries that the policy has. Published models of one tokenizer differ in the
    number of entries that no token has.

    Raises:
      ValueError: the teacher's architecture is not supported, it has fewer entries than the policy, or its context is
        too short.
    """
    if not (path := teacher_folder(layout.config)):
        return layout
    config, own = layout.config, models.read_config(models.local_folder(path, weights=False))
    wanted, given = layout.model.vocab_size, own.vocab_size
    if given < wanted:
        raise ValueError(
            f"reference.path={path} has {given} entries in its vocabulary, and the policy has {wanted}: the KL of an "
            "entry that only the policy has is infinite; choose a teacher with the policy's vocabulary"
        )
    longest = config.task.max_prompt_tokens + config.rollout.max_tokens
    if longest > own.rope.max_position_embeddings:
        raise ValueError(
            f"reference.path={path} has positions for {own.rope.max_position_embeddings} tokens, and a prompt with its "
            f"completion may have {longest}: lower task.max_prompt_tokens or rollout.max_tokens"
        )
    model = dataclasses.replace(own, vocab_size=wanted)
    return layout.without_adapters(dtype=config.model.compute_dtype, model=model)


def open_teacher(layout: Layout, tokenizer: data.Tokenizer, *, offload: bool) -> Taught | None:
    """The teacher of a run, with its weights on devices, or with `offload` in the memory of their hosts; or None.

    Raises:
      ValueError: the teacher has another tokenizer, and as `reference_layout` does.
    """
    if not (path := teacher_folder(layout.config)):
        return None
    own = reference_layout(layout)
    folder = models.local_folder(path)
    check_tokenizer(path, data.load_tokenizer(folder), tokenizer)
    dtype = own.config.model.param_dtype
    whole = own.without_adapters(dtype=dtype, model=models.read_config(folder))
    params = models.load(folder, whole.model, param_dtype=jnp.dtype(dtype), shardings=whole.param_shardings)
    if whole.model != own.model:  # the first entries of the vocabulary
        cut = {name: x[: own.model.vocab_size] for name, x in params.items() if name in ("embed", "lm_head")}
        params = jax.device_put(params | cut, own.param_shardings)
    if offload:
        params = jax.device_put(params, jax.tree.map(in_host_memory, own.param_shardings))
    programs = learner_programs(own, make_learner(own, supervised=True))
    return Taught(params, programs)


def check_tokenizer(path: str, found: data.Tokenizer, own: data.Tokenizer) -> None:
    """Raises ValueError unless `found`, the teacher's tokenizer, has the same text for every token of the policy's."""
    for token in range(own.vocab_size):
        names = [t.name(token) if token < t.vocab_size else "" for t in (found, own)]
        if names[0] != names[1]:
            raise ValueError(
                f"reference.path={path} has another tokenizer than the policy: token {token} is {names[0]!r} there and "
                f"{names[1]!r} here, and a teacher scores the tokens of the policy. Choose a teacher with the policy's "
                "tokenizer, or set model.tokenizer to the teacher's for a policy that begins with random weights"
            )
