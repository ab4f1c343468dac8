"""Evaluations on held-out sets: scores in the middle of training; whole evaluations, whose file survives a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from rpg_jax import storage
from rpg_jax.data import Group, Problem, RolloutBatch
from rpg_jax.data.groups import last_shown
from rpg_jax.parallel import hosts
from rpg_jax.report import scores, screen
from rpg_jax.report.progress import Progress
from rpg_jax.report.scores import clustered_standard_error
from rpg_jax.rewards import callables, verifiers
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rollout import Rollout, capacity
from rpg_jax.runs import run_folder
from rpg_jax.runs.arguments import own_code, reward_arguments
from rpg_jax.runs.experiment import Experiment, evaluation_generator, make_rollout, make_scorer
from rpg_jax.runs.inputs import problems_digest
from rpg_jax.runs.logs import RunLog, completion_entries
from rpg_jax.runs.memory import make_decoding
from rpg_jax.runs.policy import Policy
from rpg_jax.storage import naming, write_atomically
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.storage.files import read_object, to_json
from rpg_jax.training.collect import Collector
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.state import TrainState
from rpg_jax.types import Rows

Record = dict[str, Any]


@dataclasses.dataclass
class Drift:
    """The entropy of a policy, and its KL to the initial policy: KL(π_θ‖π_initial) of completions, not of tokens.

    The estimate of the KL is the mean over completions x ~ π_θ of Σ_t log π_θ(x_t) − log π_initial(x_t). This mean is
    unbiased where the completions are drawn at the temperature of `logprobs`, and can be negative by chance.

    Attributes:
      snapshots: hold the trained arrays of the initial policy as number 0.
      like: the `ShapeDtypeStruct`s of the trained arrays, with shardings.
      pack: groups -> micro-batches.
      logprobs: (trained arrays, rows) -> (log-probs f32[B, C], entropies f32[B, C], a value that is not read).
      start: the step before the run's first step; 0, or the step of the parent that the run begins from.
    """

    snapshots: Snapshots
    like: Any
    pack: Callable[[Sequence[Group]], RolloutBatch]
    logprobs: Callable[[Any, Rows], tuple[jax.Array, jax.Array, Any]]
    start: int = 0

    def begin(self, params: Any) -> None:
        """Starts to write `params`, the initial policy's trained arrays, as snapshot 0. Raises StorageFailure."""
        self.snapshots.save(0, params)

    def metrics(self, groups: Sequence[Group], params: Any) -> dict[str, float]:
        """The "entropy" (nats per token), "initial_kl" and its standard error "initial_kl_error" (nats per completion).

        `params`, the trained arrays, have sampled the `groups`. All processes call together. The error is clustered by
        prompt, and nan for one group. Raises Refused (a ValueError) or StorageFailure if the snapshot is bad."""
        batch, initial = self.pack(groups), self.snapshots.restore(0, self.like)
        rows = [b.rows.unrouted for b in batch.batches]
        present, entropies = zip(*(self.logprobs(params, own)[:2] for own in rows), strict=True)
        before = (self.logprobs(initial, own)[0] for own in rows)
        ratios = [new - old for new, old in zip(present, before, strict=True)]
        kl = [np.mean([x.sum() for x in group]) for group in batch.of_sampled(ratios)]
        tokens = [x for group in batch.of_sampled(entropies) for x in group]
        return {
            "entropy": float(np.concatenate(tokens).mean()),
            "initial_kl": float(np.mean(kl)),
            "initial_kl_error": clustered_standard_error(np.array(kl)),
        }


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Scores the optimizer's evaluation weights on every held-out set, in the middle of training.

    Attributes:
      sets: problems by the name of their set.
      generate: draws and scores groups, by the rollout of training, with random numbers that training does not use.
      optimizer: says which weights to evaluate: those of the state, or an average.
      drift: measures how far the policy is from the policy before the first step; None measures nothing.
      log: gets some of the completions; None: no log gets any.
    """

    sets: Mapping[str, Sequence[Problem]]
    generate: GroupGenerator
    optimizer: Optimizer
    drift: Drift | None = None
    log: RunLog | None = None

    def evaluate(self, step: int, state: TrainState, collector: Collector) -> dict[str, float]:
        """Returns the scores after step `step`, as `scores_of` has them. All processes call together.

        Sampling by `collector` pauses meanwhile. Afterwards the rollout has the weights of `state`. The evaluation
        before the run's first step saves the initial policy for `drift`. Raises RolloutError, or as `Drift.metrics`."""
        version = int(state.updates)
        with collector.exclusive():
            params = self.optimizer.evaluation_params(state.opt_state, state.params)
            if params is not state.params or collector.lags:
                self.generate.rollout.sync_weights(params, version)
            if self.drift is not None and step == self.drift.start:
                self.drift.begin(params)
            values = self.scores_of(params, step)
            collector.sync(state.params, version)
        return values

    def scores_of(self, params: Any, step: int) -> dict[str, float]:
        """The scores of `params`, the rollout's weights, after step `step`: metrics "eval/<set>/<score>" of all sets,
        and two means over the sets, "eval/reward", and "eval/accuracy", which is the mean of "mean_at_k". Both are nan
        if there is no set. The first process says on stderr how many completions have no verdict."""
        values: dict[str, float] = {}
        for name, problems in self.sets.items():
            beat(f"the evaluation of {name} after step {step}")
            groups = self.generate(problems, step=step)
            if self.log is not None:
                self.log.append_samples(step, groups)
            own = records(name, groups, self.generate.scorer)
            if hosts.is_first() and (note := scores.without_verdict(name, own)):
                print(note, file=sys.stderr)
            found = scores.metrics(own) | ({} if self.drift is None else self.drift.metrics(groups, params))
            values |= {f"eval/{name}/{key}": value for key, value in found.items()}

        def mean(score: str) -> float:
            return float(np.mean([value for key, value in values.items() if key.endswith(f"/{score}")]))

        return {"eval/accuracy": mean("mean_at_k"), "eval/reward": mean("reward"), **values}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Problems of the set named `set` that are sampled together, `samples` completions of each."""

    set: str
    problems: Sequence[Problem]
    samples: int

    @property
    def keys(self) -> list[tuple[str, int, int]]:
        """(set, prompt_id, index of the completion from 0) of every record, in order."""
        return [(self.set, p.prompt_id, i) for p in self.problems for i in range(self.samples)]


def plan(sets: Mapping[str, Sequence[Problem]], samples: Callable[[Problem], int], *, completions: int) -> list[Chunk]:
    """Chunks of at most `completions` completions, or of one problem that has more, in the order of sets and problems.
    A chunk is of one set, and its problems have equally many completions: `samples(problem)`."""
    chunks: list[Chunk] = []
    for name, problems in sets.items():
        for k, alike in itertools.groupby(problems, key=samples):
            own, size = list(alike), max(1, completions // k)
            chunks += [Chunk(name, own[first : first + size], k) for first in range(0, len(own), size)]
    return chunks


def complete(
    file: Path, chunks: Sequence[Chunk], generate: GroupGenerator, scorer: Scorer, *, step: int
) -> Iterator[tuple[Chunk, list[Record]]]:
    """Yields each chunk with its records, in order. `file` then holds these records, one JSON object a line.

    The first chunks are read, as long as the file holds them whole. The rest of the file, which a kill may have cut
    short, is removed, and the other chunks are sampled by `generate` as of step `step`, scored by `scorer` and
    appended. A separate call of the rollout samples each chunk, so the bytes do not depend on the time of a kill."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    size = 0
    for chunk in chunks:
        own = [record for record in map(_parsed, lines[: len(chunk.keys)]) if record is not None]
        if [(r.get("set"), r.get("prompt_id"), r.get("index")) for r in own] == chunk.keys:
            size += sum(map(len, lines[: len(own)]))
            lines = lines[len(own) :]
        else:
            lines = []
            own = records(chunk.set, generate(chunk.problems, step=step, group_size=chunk.samples), scorer)
            text = "".join(to_json(record) + "\n" for record in own).encode()
            with naming(file), file.open("r+b" if file.exists() else "wb") as out:
                out.truncate(size)
                out.seek(size)
                out.write(text)
            size += len(text)
        yield chunk, own


def records(name: str, groups: Sequence[Group], scorer: Scorer) -> list[Record]:
    """One record for each completion of the groups of the held-out set `name`, in the order of the groups. A record is
    a dict for JSON: prompt, reference, completion, the answer that `scorer` reads (None: no answer), verdict ("right",
    "wrong" or a kind of failure), reward, the number of sampled tokens, finish reason, digest, and more."""
    found = []
    given = scorer.answers([group.problem for group in groups], [[*map(last_shown, g.texts)] for g in groups])
    for group, answers in zip(groups, given, strict=True):
        right = [bool(a > 0.5) for a in group.accuracy]
        failures = group.failures or [None] * len(right)
        for i, completion in enumerate(group.completions):
            record: Record = {"set": name, "prompt_id": group.problem.prompt_id, "index": i}
            record |= {"system": group.problem.system} if group.problem.system else {}
            record |= {"prompt": group.problem.prompt, "reference": group.problem.answer}
            record |= {"completion": group.texts[i], "answer": answers[i]}
            record |= {"verdict": "right" if right[i] else failures[i] or "wrong", "reward": float(group.rewards[i])}
            found.append(record | completion_entries(completion) | {"digest": completion.digest})
    return found


def _parsed(line: bytes) -> Record | None:
    """The record of a line; None if the line is no object of JSON, or a kill cut it short, before its line feed."""
    with contextlib.suppress(ValueError, RecursionError):
        if line.endswith(b"\n") and isinstance(record := json.loads(line), dict):
            return record
    return None


_COMPLETIONS_PER_SLOT = 4  # in one call: enough that the slots rarely idle at its end


def evaluate(
    policy: Policy,
    name: str,
    home: storage.Folder,
    *,
    k: int | None,
    out: str | None,
    server: str | None,
    certificate: str | None = None,
    api_key_file: str | None = None,
) -> dict[str, Any] | None:
    """Evaluates `policy` on the held-out sets of its config, prints the scores, and writes a folder of results. Returns
    {set: its scores}, or None if Ctrl-C stopped the sampling: an equal call continues. Closes the policy's experiment.

    Args:
      name: the policy's name in titles and file names.
      home: without `out`, the results are in a folder inside its folder `evaluations`.
      k: completions per problem. None: as often as the source has the problem, if more than once; else `evaluation.k`.
      out: the folder of the results; None: in `home`, with a hash of the settings in its name.
      server: the address http://HOST:PORT of a server that samples; None: a rollout in this process samples.
      certificate: a PEM file to trust for the server; None: the system's.
      api_key_file: a file with the server's API key; None: the variable RPG_JAX_API_KEY, if it is set.

    Raises ValueError as `open_folder`, if another process writes the folder, or if the server cannot be used; and
    RolloutError if sampling fails."""
    experiment = policy.experiment
    if server and experiment.stage is not None:
        raise ValueError("--server draws completions of one turn: leave it out, and the environment is played here")
    run_folder.use_compilation_cache()
    print("".join(f"{note}\n" for note in experiment.task.notes), end="")
    slots = make_decoding(experiment.layout).slots * experiment.layout.decoding_hosts
    with experiment.layout.activate():
        if server:
            own = _connected(experiment, server, certificate, api_key_file, parallel=slots)
        else:
            own = make_rollout(experiment.layout, policy.params)
        try:
            settings = settings_of(policy, name, k, f"{own.weights.checksum():016x}")
            folder = open_folder(out, home.files / "evaluations" / f"{name}-step-{policy.step}", settings)
            with storage.files.locked(folder):
                file = folder / "completions.jsonl"
                records = sample(experiment, own, file, policy.step, k, _COMPLETIONS_PER_SLOT * slots)
        except KeyboardInterrupt:
            print("stopped; what was sampled is kept, and the same command continues")
            return None
        finally:
            own.close()
            experiment.close()
    by_set = show(f"{name}, step {policy.step}" if policy.step else name, settings, records, folder)
    found = f"every problem: {folder / 'scores.md'}\nevery completion with its verdict: {folder / 'completions.jsonl'}"
    print(home.shown(found))
    return by_set


def _connected(
    experiment: Experiment, server: str, certificate: str | None, api_key_file: str | None, *, parallel: int
) -> Rollout:
    """The rollout of a server, which samples `parallel` completions at a time. Raises ValueError if none answers."""
    from rpg_jax.rollout.servers.rollout import connect  # needs aiohttp, which other evaluations may lack
    from rpg_jax.rollout.serving.access import ApiKey

    return connect(
        server,
        certificate=certificate,
        key=ApiKey.find(api_key_file),
        parallel=parallel,
        capacity=capacity(experiment.config.task.max_prompt_tokens, experiment.config.rollout.max_tokens),
        vocab_size=experiment.layout.model.vocab_size,
    )


def settings_of(policy: Policy, name: str, k: int | None, weights: str) -> dict[str, Any]:
    """The settings on which completions and verdicts depend, as JSON values, with the digests of the code that judges.
    `weights` is the checksum of the weights in hexadecimal digits, `name` the name of the policy, `k` the completions
    of each problem (None: as the source or the config says)."""
    c, held_out = policy.experiment.config, policy.experiment.task.held_out
    parts, model = reward_arguments(c)[0], to_json(dataclasses.asdict(policy.experiment.layout.model))
    code = verifiers.paths(parts) + [name for name, field in own_code(c).items() if field.startswith("environment.")]
    uses = {"rewards": True, "judge": verifiers.JUDGE in parts, "environment": c.environment.name is not None}
    return {
        "policy": name,
        "step": policy.step,
        "weights": weights,
        "model": hashlib.sha256(model.encode()).hexdigest()[:16],
        "sets": {
            name: f"{len(problems)} problems, {problems_digest(problems)[:16]}" for name, problems in held_out.items()
        },
        "k": k or f"as often as the source has a problem, else {c.evaluation.k}",
        "seed": c.seed,
        "temperature": c.evaluation.temperature,
        **{name: c.rollout[name] for name in ("top_p", "top_k", "min_p", "max_tokens", "int8", "int8_kv")},
        "dtype": c.model.compute_dtype,
        **{name: c.task[name] for name in ("thinking", "max_prompt_tokens", "too_long")},
        "tokenizer": policy.experiment.tokenizer.digest()[:16],
        **{section: c[section].to_dict() for section, used in uses.items() if used},
        "code": {name: digest[:16] for path in code for name, digest in callables.source_digests(path).items()},
    }


def open_folder(out: str | None, stem: Path, settings: dict[str, Any]) -> Path:
    """Makes or reopens the folder of an evaluation, writes `settings` into its settings.json, and returns the folder.
    The folder is `out`, or without `out` `stem` with a hash of `settings` and of a secret of the user. So without `out`
    the completions of another person's run are never taken over. Raises ValueError if the folder holds another
    evaluation (the message names what differs) or completions.jsonl alone, or a link is in the way."""
    text = to_json(settings, indent=1) + "\n"
    digest = hashlib.sha256(storage.files.secret() + text.encode()).hexdigest()[:8]
    folder = Path(out) if out else stem.with_name(f"{stem.name}-{digest}")
    file = folder / "settings.json"
    there = folder.iterdir() if folder.is_dir() else ()
    if links := [p for p in ([*there] if out else [folder.parent, folder, *there]) if p.is_symlink()]:
        raise ValueError(f"{links[0]} is a link, and nothing is written through it: remove it, or give another --out")
    if (folder / "completions.jsonl").exists() and not file.exists():
        raise ValueError(f"{folder} has a completions.jsonl of something else (no settings.json): give another --out")
    now = json.loads(text)
    known = read_object(file) if file.exists() else now
    differing = [f"{k} was {known.get(k)!r}, now {v!r}" for k, v in now.items() if known.get(k) != v]
    if differing:
        raise ValueError(f"{folder} holds another evaluation: {'; '.join(differing)}. Choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return folder


def sample(
    experiment: Experiment, rollout: Rollout, file: Path, step: int, k: int | None, completions: int
) -> dict[str, list[Record]]:
    """{set: its records}. The records that `file` lacks are sampled by `rollout` and added to the file: `k` completions
    of a problem (None: as `evaluate` says), and a chunk of `plan` with at most `completions` in a call of the rollout.
    The random numbers depend on `step`. Shows the progress. Raises RolloutError if sampling fails."""
    c = experiment.config
    chunks = plan(
        experiment.task.held_out,
        lambda problem: k or (problem.samples if problem.samples > 1 else c.evaluation.k),
        completions=completions,
    )
    records: dict[str, list[Record]] = {chunk.set: [] for chunk in chunks}
    total, done, right = sum(len(chunk.keys) for chunk in chunks), 0, 0
    with make_scorer(c) as scorer, Progress(total, title="evaluation", unit="completion") as progress:
        generate = evaluation_generator(experiment, rollout, scorer)
        for chunk, own in complete(file, chunks, generate, scorer, step=step):
            records[chunk.set] += own
            done, right = done + len(own), right + sum(r["verdict"] == "right" for r in own)
            progress.update(done, {"accuracy": right / done})
    return records


def show(title: str, settings: dict[str, Any], records: dict[str, list[Record]], folder: Path) -> dict[str, Any]:
    """Writes scores.json and scores.md to `folder`, and returns {set: its scores}. Prints a table named `title`, with a
    row for each set, and how many completions have no verdict."""
    by_set = {name: scores.summarise(own) for name, own in records.items()}
    write_atomically(folder / "scores.json", to_json({"settings": settings, "sets": by_set}, indent=1) + "\n")
    write_atomically(folder / "scores.md", scores.markdown(title, settings, by_set))
    first, *rows = scores.one_row_a_set(by_set)
    table = Table(*first, title=title)
    for row in rows:
        table.add_row(*row)
    screen.console().print(table)
    print("".join(f"{note}\n" for name, own in records.items() if (note := scores.without_verdict(name, own))), end="")
    return by_set
