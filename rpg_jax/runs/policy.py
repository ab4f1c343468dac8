"""A policy that is sampled and not trained: the checkpoint of a run, or the weights that a config names."""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import data, models, storage
from rpg_jax.data.tokenizer import IncrementalDecoder, check_unicode
from rpg_jax.rollout import Request
from rpg_jax.rollout.decoding import capacity, power_of_two
from rpg_jax.rollout.drivers import LockstepRollout, make_rollout
from rpg_jax.rollout.engine import DecodeEngine
from rpg_jax.runs import cli, config_files, run_folder
from rpg_jax.runs.arguments import check_trusted
from rpg_jax.runs.experiment import Experiment, open_experiment
from rpg_jax.runs.inputs import check_inputs
from rpg_jax.runs.layout import Layout, shares_prompts
from rpg_jax.runs.learner import (
    first_adapters,
    init_params,
    learner_programs,
    make_learner,
    merged_layout,
    new_base,
    open_base,
)
from rpg_jax.runs.memory import cache_bytes, make_decoding
from rpg_jax.runs.processes import fast_dtype
from rpg_jax.runs.resolve import resolve
from rpg_jax.storage import integrity
from rpg_jax.training.objective import Objective, supervised_loss
from rpg_jax.training.state import for_evaluation
from rpg_jax.types import Completion, FinishReason, Sampling

Changes = Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]
NONE: Changes = MappingProxyType({})


class Sample(NamedTuple):
    """One completion of a prompt. `text` is without special tokens. `tokens` i32[n] are the sampled ids, with the stop
    token if one was drawn. `logprobs` f32[n] are the log-probabilities, in nats, with which the ids were drawn, after
    temperature, top-k, top-p and min-p; 0 for greedy ids. `finish_reason` is "stop", for a stop token, or "length"."""

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


_CACHE = 4 << 30  # bytes of keys and values on a device, at most
_ROWS = 4  # rows of a device in one pass of `Policy.logprobs`
_ROW = 512  # tokens of a row that completions share, unless one completion needs more
_MULTIPLE = 128  # the tokens of a row are a multiple: few shapes to compile, and all kernels take it


def _shape(groups: Sequence[data.Group], layout: Layout) -> data.RowShape:
    """The shape of rows that hold `groups`, at least one. Completions of a prompt share a row where `layout` allows."""
    one = max(len(g.prompt) + len(c.tokens) for g in groups for c in g.completions)
    group = max(len(g.prompt) + sum(len(c.tokens) for c in g.completions) for g in groups)
    shared = group > one and shares_prompts(layout)
    length = -(-(max(one, min(group, _ROW)) if shared else one) // _MULTIPLE) * _MULTIPLE
    return data.RowShape(_ROWS * layout.mesh.size, length, length, packed=shared, shared=shared)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A language model to sample from, to score with and to export.

    Attributes:
      experiment: tokenizer, problems, model and mesh.
      params: the weights as a nested dict of arrays, layers stacked on the first axis; None if they are not loaded.
        Only a policy with `params` samples, scores and exports.
      step: the step of the checkpoint; 0 without a checkpoint.
    """

    experiment: Experiment
    params: Any
    step: int

    @staticmethod
    def from_run(run: str | Path, *, step: int | None = None, overrides: Changes = NONE) -> Policy:
        """The policy of a run's checkpoint, with adapters merged into their base. No code of the user is imported.

        Args:
          run: the run's folder, local or gs://BUCKET/….
          step: the step of the checkpoint; None: the last one.
          overrides: values of config fields, by dotted name, that replace the run's, as {"rollout.max_tokens": 64}.

        Raises ValueError if there is no such run, checkpoint or field (the message names near ones), a value is of
        another type, or tokenizer or model are not the run's. Sets JAX's cache, and calls `cli.prepare_libraries`."""
        cli.prepare_libraries()
        run_folder.use_compilation_cache()
        with run_folder.opened(str(run)) as folder:
            return of_run(folder, step, overrides)

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        max_prompt_tokens: int = 1024,
        max_tokens: int = 1024,
        config: str = "base",
        overrides: Changes = NONE,
    ) -> Policy:
        """The policy of a model in Hugging Face layout: in bfloat16 on devices that compute it fast, else in float32.

        Args:
          model: a folder, OWNER/NAME on the hub, gs://BUCKET/FOLDER, or a local FILE.gguf.
          max_prompt_tokens, max_tokens: the limits of prompts and completions. The config's own limits do not count.
          config: a shipped config's name, or a config file, for the other fields. Its dtypes do not count either.
          overrides: values of config fields by dotted name, {"rollout.slots": 8}. Overrides win over other arguments.
            `model.compute_dtype` is the dtype of weights and products.

        Raises ValueError if the model is missing or damaged, and says what is missing, or if the config, a field or a
        field's value is wrong; StorageFailure if a bucket fails. Calls `cli.prepare_libraries` and sets JAX's cache.
        """
        cli.prepare_libraries()
        run_folder.use_compilation_cache()
        if "model.compute_dtype" not in overrides:
            overrides = {"model.compute_dtype": fast_dtype()[0], **overrides}
        limits = {"task.max_prompt_tokens": max_prompt_tokens, "rollout.max_tokens": max_tokens}
        changes = {"model.path": str(model), **limits, **overrides}
        loaded = config_files.changed(config_files.load(config).config, changes)
        with tempfile.TemporaryDirectory() as scratch:
            return of_config(loaded, Path(scratch))

    def sample(
        self,
        prompts: str | Messages | Sequence[str | Messages],
        *,
        k: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[Any]:
        """Draws `k` completions of each prompt. Returns each prompt's list of `Sample`; for a single prompt, its list.

        A prompt is a text, or the messages of a conversation, [{"role": "user", "content": "…"}, …]. Prompts pass the
        chat template, if the tokenizer has one. Temperature 0 is greedy; top_p, top_k and min_p are the config's. A
        completion has at most `max_tokens` tokens; None, and any larger number, is the config's `rollout.max_tokens`.
        Lines on stderr name a text's characters that the tokenizer does not know, and say if answers are written
        backwards. Equal arguments give equal completions. Raises ValueError if a prompt is empty, malformed or longer
        than `task.max_prompt_tokens`, or if `k`, `max_tokens` or `temperature` is out of its range.
        """
        single = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], Mapping))
        asked: Sequence[Any] = [prompts] if single else prompts
        if not isinstance(k, int | np.integer) or k < 1:
            raise ValueError(f"k={k!r}: give a whole number of completions, 1 or more")
        tokens, tokenizer = self.encode(asked), self.experiment.tokenizer
        for line in self._surprises(asked):
            print(line, file=sys.stderr)
        sampling = self._sampling(temperature, max_tokens)
        with self.experiment.layout.activate():
            rollout = self._rollout(len(tokens) * k, max(map(len, tokens), default=1) + sampling.max_tokens)
            groups = rollout.generate(Request(tokens, range(len(tokens)), k, sampling, seed, self.step))
        stops = set(tokenizer.stop_token_ids)

        def text(ids: np.ndarray) -> str:
            return tokenizer.decode([t for t in ids.tolist() if t not in stops])

        found = [[Sample(text(c.tokens), c.tokens, c.logprobs, c.finish_reason) for c in group] for group in groups]
        return found[0] if single else found

    def chat(
        self, messages: str | Messages, *, temperature: float = 1.0, max_tokens: int | None = None, seed: int = 0
    ) -> Iterator[str]:
        """Yields the policy's answer to a text, or to a conversation [{"role": "user", "content": "…"}, …], piece by
        piece, as it is decoded. The other arguments are as in `sample`. Joined, the pieces are the text of `sample`.
        To go on, append {"role": "assistant", "content": answer} and the next message to `messages`, and call again.
        The first `next` raises the errors of `sample`. Read the iterator to its end, or close it: until then other
        calls wait, in the same thread for ever."""
        [tokens], tokenizer = self.encode([messages]), self.experiment.tokenizer
        sampling, stops = self._sampling(temperature, max_tokens), set(tokenizer.stop_token_ids)
        decoder = IncrementalDecoder(tokenizer)
        with self.experiment.layout.activate():
            rollout = self._rollout(1, len(tokens) + sampling.max_tokens)
        pieces = rollout.stream(Request([tokens], [0], 1, sampling, seed, self.step))
        while True:
            with self.experiment.layout.activate():  # and not while the caller, with a mesh of its own, has a piece
                if (piece := next(pieces, None)) is None:
                    break
            yield decoder.push([t for t in piece.tolist() if t not in stops])
        yield decoder.flush()

    def _sampling(self, temperature: float, max_tokens: int | None) -> Sampling:
        own = self.experiment.sampling(temperature)
        return own if max_tokens is None else dataclasses.replace(own, max_tokens=min(max_tokens, own.max_tokens))

    def _rollout(self, rows: int, length: int) -> LockstepRollout:
        """A rollout with room for `rows` completions of `length` tokens, prompts included. Calls that need equal room
        share a rollout, and all share the weights. A single completion is decoded token by token: `chat` shows each."""
        c, layout = self.experiment.config, self.experiment.layout
        most = capacity(c.task.max_prompt_tokens, c.rollout.max_tokens)
        decoding = dataclasses.replace(make_decoding(layout), capacity=min(power_of_two(length), most))
        if c.rollout.slots is None:
            devices = decoding.slots if decoding.mesh is None else decoding.mesh.size
            one = dataclasses.replace(decoding, slots=devices, threads=1)
            fit = max(1, min(decoding.slots // devices, int(_CACHE // cache_bytes(layout, one))))
            decoding = dataclasses.replace(one, slots=min(power_of_two(-(-rows // devices)), fit) * devices)
        if rows == 1:
            decoding = dataclasses.replace(decoding, steps_per_dispatch=1)
        key = (decoding.slots, decoding.capacity, decoding.steps_per_dispatch)
        if key not in self._rollouts:
            model = layout.model, layout.graphdef
            first = next(iter(self._rollouts.values()), None) or make_rollout("lockstep", *model, self.params, decoding)
            engine = DecodeEngine(*model, first.weights, decoding)
            self._rollouts[key] = LockstepRollout(engine)
        return self._rollouts[key]

    @functools.cached_property
    def _rollouts(self) -> dict[tuple[int, ...], LockstepRollout]:
        return {}

    def logprobs(
        self, prompts: Sequence[str], completions: Sequence[str | Sample | Sequence[int]], *, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Returns one f32[n] for each i: log π(token | prompt, tokens before it), in nats, of every token of
        `completions[i]` after `prompts[i]`, which passes the chat template. The logits are divided by `temperature`,
        above 0. A completion is a text, to which no stop token is added, a `Sample` or token ids. Neighbouring
        completions with equal prompts share the prompt's work. Raises ValueError if the two lists differ in length, a
        prompt is too long, or a completion has no token, or a token that the model does not have."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: give one prompt for each")
        layout, tokenizer = self.experiment.layout, self.experiment.tokenizer
        encoded, shared = self.encode(prompts), list[tuple[int, list[Completion]]]()
        for i, given in enumerate(completions):
            if isinstance(given, str):
                check_unicode(given, f"completion {i}")
            ids = tokenizer.encode(given) if isinstance(given, str) else given
            tokens = np.asarray(ids.tokens if isinstance(ids, Sample) else ids)
            if tokens.ndim != 1 or not len(tokens):
                raise ValueError(f"completion {i} has no token; its shape is {tokens.shape}")
            if tokens.dtype.kind not in "iu":
                raise ValueError(f"completion {i} is a text, a Sample or token ids, got {str(given)[:100]}")
            if tokens.min() < 0 or tokens.max() >= layout.model.vocab_size:
                raise ValueError(f"completion {i} has a token outside 0..{layout.model.vocab_size - 1}")
            if not shared or prompts[i] != prompts[i - 1]:
                shared.append((i, []))
            unknown = np.zeros(len(tokens), np.float32)
            shared[-1][1].append(Completion(tokens.astype(np.int32), unknown, "stop", 0))
        if not shared:
            return []
        scored = [data.unscored(_asked(i, prompts[i]), encoded[i], own) for i, own in shared]
        packed = data.pack(scored, _shape(scored, layout), pad_id=tokenizer.pad_id, sharding=layout.row_sharding)
        with layout.activate():
            learner, objective = make_learner(layout, supervised=True), Objective(supervised_loss)  # no loss is needed
            programs = learner_programs(layout, learner, objective, temperature=temperature)
            found = [programs.logprobs(self.params, batch.rows)[0] for batch in packed.batches]
        return [own for group in packed.gather(found) for own in group]

    def encode(self, prompts: Sequence[str | Messages]) -> list[np.ndarray]:
        """The token ids i32[n] of each prompt, a text or messages, inside the chat template if the tokenizer has one.
        Raises ValueError if a prompt has more tokens than `task.max_prompt_tokens`, or a message no role or text."""
        tokenizer, task = self.experiment.tokenizer, self.experiment.config.task
        problems = [_asked(i, prompt) for i, prompt in enumerate(prompts)]
        tokens = [data.encode_prompt(p, tokenizer, thinking=task.thinking) for p in problems]
        for text, ids in zip(prompts, tokens, strict=True):
            if len(ids) > task.max_prompt_tokens:
                limit = f"task.max_prompt_tokens={task.max_prompt_tokens}"
                raise ValueError(f"{text!r} has {len(ids)} tokens, more than {limit}")
        return tokens

    def _surprises(self, prompts: Sequence[str | Messages]) -> Iterator[str]:
        """A line on each text with characters that the tokenizer does not know; a line if answers are backwards."""
        config = self.experiment.config
        for text in [prompt for prompt in prompts if isinstance(prompt, str)]:
            if unknown := self.experiment.tokenizer.unknown(text):
                yield f"{text!r}: the run's tokenizer does not know {', '.join(map(repr, unknown))}"
        if config.task.name == "arithmetic" and config.task.reverse and not config.model.path:
            yield "answers are written from the lowest digit (task.reverse): 24 is 42"

    def export(self, out: str | Path, *, dtype: str | None = None) -> None:
        """Writes the weights, the model's config and the tokenizer as a folder in Hugging Face layout.

        Args:
          out: a local folder that is empty or not there. The files appear in it together, when all are written.
          dtype: the dtype of the weights, "float32" or "bfloat16"; None keeps the dtype of `params`.

        Raises ValueError if `out` holds files already, or is no local folder.
        """
        out = free_folder(out)
        layout, tokenizer = self.experiment.layout, self.experiment.tokenizer
        path = self.experiment.config.model.path
        base = models.local_folder(path, weights=False) if path else None
        ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        taken: dict[str, Any] = {"fields": ids} if base is None else {"base": base}
        with storage.files.whole(out) as folder, layout.activate():
            models.save(folder, layout.model, self.params, dtype=dtype and jnp.dtype(dtype), **taken)
            tokenizer.save(folder)


def _asked(number: int, prompt: str | Messages) -> data.Problem:
    """A prompt as a problem with the id `number`. Raises ValueError for messages without a role or a text."""
    if isinstance(prompt, str):
        check_unicode(prompt, f"prompt {number}")
        return data.Problem(number, prompt, answer="", source="prompt")
    for message in prompt if isinstance(prompt, Sequence) else [prompt]:
        if not isinstance(message, Mapping) or any(not isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f'a prompt is a text, or messages {{"role": "user", "content": "…"}}, got {message!s:.99}')
        check_unicode(message["content"], f"prompt {number}")
    return data.Problem(number, "", answer="", source="prompt", messages=tuple(prompt))


def free_folder(out: str | Path) -> Path:
    """`out` as a local path. Raises ValueError if it is a file, holds files already, or is no local address."""
    folder = storage.local(out)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} already holds files; choose another folder")
    return folder


def of_run(
    folder: storage.Folder,
    step: int | None = None,
    changes: Changes = NONE,
    held_out: bool = False,
    weights: bool = True,
    merge: bool = True,
    trust: bool = False,
) -> Policy:
    """The policy of a run's checkpoint after step `step`, by default the last. `folder` is an open, fetched folder.
    `changes` are values of config fields, by dotted name, that replace the run's. `held_out` loads the problems of
    evaluations. Somebody else may have written the config: if it names code to import, other than rewards of `changes`,
    or a judge to ask, `held_out` needs `trust`. Without `weights` no checkpoint is looked for, and `Policy.params` is
    None. `merge` adds adapters to their base; without `merge` the params are the adapters. Raises ValueError if the
    folder has no run, a field does not exist, `trust`, the tokenizer or the checkpoint is missing, or, with `weights`,
    the tokenizer or the model is not the run's."""
    config = config_files.changed(run_folder.read_config(folder.files), changes)
    if held_out:
        check_trusted(config, folder.home, trust=trust, given=changes.get("rewards.parts", ""))
    if not (config.model.tokenizer or config.model.path or (folder.files / "tokenizer.model").is_file()):
        raise ValueError(f"{folder.home} has no tokenizer.model: copy the run again from where it came")
    experiment = open_experiment(config, folder.files, train=False, held_out=held_out)
    if not weights:
        return Policy(experiment, None, step or 0)
    only = dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, train=[], held_out={}))
    check_inputs(only, folder.files, begins=False)  # the tokenizer and the model; problems may be any
    directory = storage.absolute(folder.home / "checkpoints")
    step = run_folder.checkpoint_step(folder, step)
    with experiment.layout.activate():
        learner = make_learner(experiment.layout)
        needed = for_evaluation(learner.like, learner.optimizer)  # the optimizer's moments are twice the weights
        restored = integrity.restored(directory / str(step) / "state", needed)
        params = learner.optimizer.evaluation_params(restored.opt_state, restored.params)
        if merge and experiment.layout.lora is not None:
            base = open_base(experiment.layout, folder, init_params, begins=False)
            layout, params = merged_layout(experiment.layout, base, params)
            experiment = dataclasses.replace(experiment, layout=layout)
        return Policy(experiment, params, step)


def of_config(
    config: ConfigDict, scratch: Path, changes: Changes = NONE, held_out: bool = False, weights: bool = True
) -> Policy:
    """The policy of `model.path`, or one with random weights, in `model.compute_dtype`. The adapters of
    `model.lora.path` are merged into the weights; new adapters change nothing, and are left out. `changes` are values
    of config fields by dotted name. A loss and an advantage "module:function" are imported; `held_out` loads the
    problems of evaluations, and may import a task and an environment. A config without tokenizer and `model.path` needs
    `held_out`: a tokenizer is trained on the problems, and written to the folder `scratch`. Without `weights`,
    `Policy.params` is None. Raises ValueError if the config does not fit."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict({"model.param_dtype": config.model.compute_dtype, **changes})
    if not changed.model.lora.path:
        changed.model.lora.rank = 0
    experiment = open_experiment(resolve(changed), scratch, train=False, held_out=held_out)
    with experiment.layout.activate():
        if not weights:
            return Policy(experiment, None, 0)
        if experiment.layout.lora is None:
            return Policy(experiment, init_params(experiment.layout), 0)
        base, adapters = new_base(experiment.layout, init_params), first_adapters(experiment.layout)
        layout, params = merged_layout(experiment.layout, base, adapters)
        return Policy(dataclasses.replace(experiment, layout=layout), params, 0)
