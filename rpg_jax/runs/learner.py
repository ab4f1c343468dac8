"""Makes from a config the weights that training begins with, and the parts that update them.

The parts are the optimizer, the learned baseline, the layout of the train state, the jitted programs, and the rule by
which the reference moves. With adapters, the weights are the adapters and the frozen base beside them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import data, losses, models, storage
from rpg_jax.models.lora import init_adapters, load_adapters, merged
from rpg_jax.models.weights import quantized
from rpg_jax.runs.arguments import loss_arguments
from rpg_jax.runs.checkpointing import Parent
from rpg_jax.runs.layout import Layout, abstract_model, reference_layout, teacher_folder
from rpg_jax.runs.resolve import lags
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training.critic import Critic
from rpg_jax.training.objective import Objective, mean_fn, policy_loss_fn
from rpg_jax.training.optimizer import Optimizer, make_optimizer
from rpg_jax.training.reference import Taught, make_rule
from rpg_jax.training.state import TrainState, abstract_state, create_state, in_host_memory, shardings_of
from rpg_jax.training.step import Programs, make_programs
from rpg_jax.types import Count


@dataclasses.dataclass(frozen=True)
class Learner:
    """How weights are updated: `optimizer`, the learned baseline `critic` (None: there is none), and `like`, a train
    state with a `ShapeDtypeStruct` and sharding for each array, into which a checkpoint is restored."""

    optimizer: Optimizer
    critic: Critic | None
    like: TrainState

    def create(self, params: Any) -> TrainState:
        """The state before the first update. It has copies of `params`, the trained weights, which stay valid."""
        return create_state(params, self.optimizer, self.like, self.critic)


def make_learner(layout: Layout, *, supervised: bool = False, **optimizer_changes: Any) -> Learner:
    """The learner of the layout's config, without making an array. A `supervised` learner has no learned baseline.
    `optimizer_changes` replace arguments of `make_optimizer` for the policy. Raises ValueError for a wrong
    field of the optimizer, or a learned baseline beside adapters."""
    optimizer = make_optimizer(**{**optimizer_arguments(layout.config), **optimizer_changes})
    critic = None if supervised else _make_critic(layout)
    offload = "optimizer" in layout.config.offload
    like = abstract_state(layout.trained, optimizer, layout.replicated, critic, offload=offload)
    return Learner(optimizer, critic, like)


def optimizer_arguments(config: ConfigDict) -> dict[str, Any]:
    """The keyword arguments of `make_optimizer` for the policy, from the config's `optimizer` and `train`. An unset
    `optimizer.decay_until` is `train.steps`. Raises ValueError if this field or `optimizer.warmup` is no count."""
    given, c = config.optimizer.to_dict(), config.train
    until = Count.parse(given["decay_until"] or f"{c.steps} steps", "optimizer.decay_until")
    given |= {"warmup": Count.parse(given["warmup"], "optimizer.warmup"), "decay_until": until}
    return {**given, "updates_per_step": c.updates_per_step * c.epochs}


def _make_critic(layout: Layout) -> Critic | None:
    """The learned baseline; None if the advantages need none. Raises ValueError if they do and there are adapters."""
    config, c = layout.config, layout.config.critic
    if config.loss.advantage not in losses.LEARNED_ADVANTAGES:
        return None
    if layout.lora is not None:
        raise ValueError(
            f"loss.advantage={config.loss.advantage} needs a critic, whose weights are all trained, and "
            "model.lora.rank freezes them: choose another advantage, or model.lora.rank=0"
        )
    trunk = dataclasses.replace(layout.model, tie_embeddings=True)  # no output embedding
    return Critic(
        graphdef=abstract_model(config, trunk)[0],
        optimizer=make_optimizer(**{**optimizer_arguments(config), "learning_rate": c.learning_rate}),
        **{name: c[name] for name in ("gamma", "gae_lambda")},
    )


def policy_objective(config: ConfigDict, critic: Critic | None = None, *, on_policy: bool = False) -> Objective:
    """The config's loss and entropy bonus, and the loss of `critic`, the learned baseline (None: there is none).
    `on_policy`: the update itself takes the old log-probs from the policy in training, without a pass before it."""
    c, (name, hyperparameters) = config.loss, loss_arguments(config)
    return Objective(
        policy_loss_fn(losses.find_loss(name), **hyperparameters),
        mean=mean_fn(c.aggregate, c.constant_length),
        entropy_coef=c.entropy_coef,
        critic=critic,
        on_policy=on_policy,
    )


def is_on_policy(layout: Layout) -> bool:
    """Whether a step is one update, on completions of the weights before this update, and no pass before the update
    computes log-probs. False with a critic, a mixture of experts, or `rpg` at the level "sequence": they need the pass.
    False if groups are carried over, sampled ahead or sampled in parts: their tokens are of older weights."""
    c, (name, hyperparameters) = layout.config, loss_arguments(layout.config)
    carries = c.dynamic_sampling.enabled and c.dynamic_sampling.surplus == "carry"
    baseline = name == "rpg" and hyperparameters.get("level") == "sequence"
    reads = baseline or layout.model.experts is not None or c.loss.advantage in losses.LEARNED_ADVANTAGES
    return c.train.updates_per_step * c.train.epochs == 1 and not (carries or reads or lags(c))


def learner_programs(
    layout: Layout,
    learner: Learner,
    objective: Objective | None = None,
    *,
    base: models.Base | None = None,
    temperature: float | None = None,
) -> Programs:
    """The jitted programs of training, for example the log-prob pass and the update; nothing is compiled yet.
    `objective` None: the config's. `temperature` divides logits where log-probs are taken; None: `rollout.temperature`.
    `base` are the frozen weights beside adapters; None: all weights are trained."""
    objective = objective or policy_objective(layout.config, learner.critic, on_policy=is_on_policy(layout))
    return make_programs(
        layout.graphdef,
        learner.optimizer,
        objective,
        temperature=layout.config.rollout.temperature if temperature is None else temperature,
        state=learner.like,
        batch_sharding=layout.row_sharding,
        base=base,
    )


def reference_differs(config: ConfigDict) -> bool:
    """Whether a step needs a pass for the reference's log-probs: the reference may differ from the policy at the start
    of the step, and servers do not have it."""
    if config.reference.path and not teacher_folder(config):
        return False
    return make_rule(config.reference).differs(config.train.updates_per_step * config.train.epochs)


def open_teacher(layout: Layout, tokenizer: data.Tokenizer, *, offload: bool) -> Taught | None:
    """The teacher of a run: the model `reference.path`, with its weights on devices, or with `offload` in host memory.
    None: there is no teacher, or servers have it. Raises ValueError if the model is missing, damaged or not supported,
    has a smaller vocabulary or context than the policy needs, or another tokenizer than `tokenizer`, the policy's;
    StorageFailure if a bucket cannot be read."""
    if not (path := teacher_folder(layout.config)):
        return None
    own = reference_layout(layout)
    folder = models.local_folder(path)
    check_tokenizer(path, data.load_tokenizer(folder), tokenizer)
    dtype = own.config.model.param_dtype
    whole = own.without_adapters(dtype=dtype, model=models.read_config(folder))
    params = models.load(folder, whole.model, param_dtype=jnp.dtype(dtype), shardings=shardings_of(whole.weights))
    if whole.model != own.model:  # the first entries of the vocabulary
        cut = {name: x[: own.model.vocab_size] for name, x in params.items() if name in ("embed", "lm_head")}
        params = jax.device_put(params | cut, shardings_of(own.weights))
    if offload:
        params = jax.device_put(params, jax.tree.map(lambda x: in_host_memory(x.sharding), own.weights))
    programs = learner_programs(own, make_learner(own, supervised=True))
    return Taught(params, programs)


def check_tokenizer(path: str, found: data.Tokenizer, own: data.Tokenizer) -> None:
    """Raises ValueError unless `found`, the teacher's tokenizer, has the same text for every token of `own`, the
    policy's. The message names `path`, the address of the teacher, and the first token that differs."""
    for token in range(own.vocab_size):
        names = [t.name(token) if token < t.vocab_size else "" for t in (found, own)]
        if names[0] != names[1]:
            raise ValueError(
                f"reference.path={path} has another tokenizer than the policy: token {token} is {names[0]!r} there and "
                f"{names[1]!r} here, and a teacher scores the tokens of the policy. Choose a teacher with the policy's "
                "tokenizer, or set model.tokenizer to the teacher's for a policy that begins with random weights"
            )


Draw = Callable[[Layout], Any]
"""The weights of a layout without adapters, before any training by reinforcement."""


def init_params(layout: Layout) -> Any:
    """The weights of `model.path`, or random weights by `warm_start.seed`, made straight in their shards: a nested dict
    of arrays in `model.param_dtype`, without adapters. Raises ValueError if the model is missing or damaged,
    StorageFailure if a bucket cannot be read."""
    m, where = layout.config.model, shardings_of(layout.weights)
    how: dict[str, Any] = {"param_dtype": jnp.dtype(m.param_dtype), "shardings": where}
    if m.path:
        return models.load(models.local_folder(m.path), layout.model, **how)
    return models.init(layout.model, seed=layout.config.warm_start.seed, **how)[1]


def no_params(layout: Layout) -> Any:
    """Zeros in place of the trained arrays, for a run whose checkpoint has these arrays. `model.path` is not read."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.trained)

    return jax.jit(zeros, out_shardings=shardings_of(layout.trained))()


def open_base(
    layout: Layout, folder: storage.Folder, draw: Draw, *, begins: bool, parent: Parent | None = None
) -> models.Base | None:
    """The frozen weights of a run with adapters; None if all weights are trained. All processes call together.

    Weights of `model.path` without a warm start are read by `draw` each time. Random or warm-started weights come from
    `draw` when the run `begins`, or from the `parent` of a branch, and are then written to `base` in `folder`; a run
    that goes on reads them there. Raises Refused, a ValueError, if the weights in `base` are missing or damaged,
    StorageFailure if storage fails."""
    if layout.lora is None:
        return None
    if not _keeps_base(layout.config):
        return new_base(layout, draw)
    kept, like = Snapshots(folder.home / "base"), layout.base
    assert like is not None
    if not begins:
        return dataclasses.replace(like, weights=kept.restore(0, like.weights))
    base = new_base(layout, draw) if parent is None else dataclasses.replace(like, weights=parent.base(like.weights))
    kept.save(0, base.weights)
    kept.close()
    return base


def new_base(layout: Layout, draw: Draw) -> models.Base:
    """The weights that `draw` gives for the layout without adapters, frozen in `model.compute_dtype`, or in 8 bits with
    `model.lora.int8`. The layout must have adapters."""
    m, like = layout.config.model, layout.base
    assert like is not None, "a layout without adapters has no base"
    params = draw(layout.without_adapters(dtype=m.param_dtype if _keeps_base(layout.config) else m.compute_dtype))

    def freeze(params: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(m.compute_dtype), params)
        return quantized(params) if m.lora.int8 else params

    if m.lora.int8 or any(x.dtype != m.compute_dtype for x in jax.tree.leaves(params)):
        params = jax.jit(freeze, out_shardings=shardings_of(like.weights))(params)
    return dataclasses.replace(like, weights=params)


def _keeps_base(config: ConfigDict) -> bool:
    """Whether the run's folder keeps the base of its adapters. Without warm start `model.path` has the base."""
    return not config.model.path or config.warm_start.enabled


def first_adapters(layout: Layout) -> Any:
    """The adapters before the first update, in their shards, a nested dict of arrays in `model.param_dtype`: those of
    `model.lora.path`, or new adapters by `config.seed`, which leave the policy as it is. The layout must have adapters.
    Raises ValueError if the adapters at this path are missing or do not fit, StorageFailure as `init_params`."""
    c, lora = layout.config, layout.lora
    assert lora is not None, "a layout without adapters trains all weights"
    how: dict[str, Any] = {"dtype": jnp.dtype(c.model.param_dtype), "shardings": shardings_of(layout.adapters)}
    if c.model.lora.path:
        return load_adapters(models.local_folder(c.model.lora.path), layout.model, lora, **how)
    return init_adapters(layout.model, lora, seed=c.seed, **how)


def merged_layout(layout: Layout, base: models.Base | None, adapters: Any) -> tuple[Layout, Any]:
    """Merges adapters into the weights: (a layout without adapters, its weights W + (alpha / rank) A B in the compute
    dtype). `base`, which must not be None, has the W, and is donated unless `model.lora.int8` is set. `adapters` have
    the A and B, and stay valid."""
    whole = layout.without_adapters(dtype=layout.config.model.compute_dtype)

    def merge(base: models.Base, adapters: Any) -> Any:
        return merged(base.policy(adapters))

    donated = () if layout.config.model.lora.int8 else (0,)  # bytes of another width cannot be used again
    return whole, jax.jit(merge, out_shardings=shardings_of(whole.weights), donate_argnums=donated)(base, adapters)
