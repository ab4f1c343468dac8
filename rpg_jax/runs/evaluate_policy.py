"""A whole evaluation: samples what is missing, scores it, writes and prints the tables."""

import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rpg_jax import data, storage
from rpg_jax.report import markdown, score_curve, scores
from rpg_jax.report.progress import Progress
from rpg_jax.rollout import Rollout
from rpg_jax.runs import evaluation, run_folder
from rpg_jax.runs.experiment import Experiment, evaluation_generator, make_rollout, make_scorer
from rpg_jax.runs.policy import Policy
from rpg_jax.runs.sampling_layout import make_decoding
from rpg_jax.storage import json_files, write_atomically

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
    """Evaluates `policy` on the held-out sets of its config; returns their scores, or None if Ctrl-C stopped it.

    Args:
      name: the policy's name in titles and file names.
      home: the folder in whose `evaluations` the results lie by default.
      k: completions per problem. None: as many as its source repeats it, else `evaluation.k`.
      out: the folder of the results.
      server: host:port of a server that samples in place of a rollout in this process.
      certificate, api_key_file: see `GrpcRollout.connect` and `ApiKey.find`.

    Raises:
      ValueError: `out` holds another evaluation; the message names what differs.
    """
    experiment = policy.experiment
    if server and experiment.stage is not None:
        raise ValueError("--server draws completions of one turn: leave it out, and the environment is played here")
    run_folder.use_compilation_cache(experiment.config)
    print("".join(f"{note}\n" for note in experiment.notes), end="")
    slots = make_decoding(experiment.layout).slots * experiment.layout.decoding_hosts
    with experiment.layout.activate():
        if server:
            from rpg_jax.rollout.serving.access import ApiKey
            from rpg_jax.rollout.serving.client import GrpcRollout  # needs JetStream, which other evaluations may lack

            key = ApiKey.find(api_key_file)
            rollout: Rollout = GrpcRollout.connect(server, certificate=certificate, key=key, parallel=slots)
        else:
            rollout = make_rollout(experiment.layout, policy.params)
        try:
            settings = settings_of(policy, name, k, server or f"{rollout.weights_checksum():016x}")
            folder = open_folder(out, home.files / "evaluations" / f"{name}-step-{policy.step}", settings)
            records = sample(
                experiment, rollout, folder / "completions.jsonl", policy.step, k, _COMPLETIONS_PER_SLOT * slots
            )
        except KeyboardInterrupt:
            print("stopped; what was sampled is kept, and the same command continues")
            return None
        finally:
            rollout.close()
            experiment.close()
    by_set = show(f"{name}, step {policy.step}" if policy.step else name, settings, records, folder)
    found = f"every problem: {folder / 'scores.md'}\nevery completion with its verdict: {folder / 'completions.jsonl'}"
    print(home.shown(found))
    return by_set


def settings_of(policy: Policy, name: str, k: int | None, weights: str) -> dict[str, Any]:
    """Everything that the completions and their verdicts depend on."""
    c, held_out = policy.experiment.config, policy.experiment.task.held_out
    return {
        "policy": name,
        "step": policy.step,
        "weights": weights,
        "sets": {
            name: f"{len(problems)} problems, {data.fingerprint(problems):08x}" for name, problems in held_out.items()
        },
        "k": k or f"as often as the source has a problem, else {c.evaluation.k}",
        "rewards": c.rewards.parts,
        "seed": c.seed,
        "temperature": c.evaluation.temperature,
        **{name: c.rollout[name] for name in ("top_p", "top_k", "min_p", "max_tokens")},
        "thinking": c.task.thinking,
        **({"environment": {k: v for k, v in c.environment.items() if k != "workers"}} if c.environment.name else {}),
    }


def open_folder(out: str | None, stem: Path, settings: dict[str, Any]) -> Path:
    """Makes or reopens the folder of an evaluation: `out`, or `stem` with a hash of `settings`, which it then holds.

    Raises:
      ValueError: it holds another evaluation; the message names what differs.
    """
    text = json_files.dumps(settings, indent=1) + "\n"
    folder = Path(out) if out else stem.with_name(f"{stem.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    file = folder / "settings.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else settings
    differing = [f"{k} was {known.get(k)!r}, now {v!r}" for k, v in settings.items() if known.get(k) != v]
    if differing:
        raise ValueError(f"{folder} holds another evaluation: {'; '.join(differing)}. Choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return folder


def sample(
    experiment: Experiment, rollout: Rollout, file: Path, step: int, k: int | None, completions: int
) -> dict[str, list[evaluation.Record]]:
    """The records of every set; samples records that `file` does not have yet, and adds them to it.

    A call of the rollout samples about `completions`.
    """
    c = experiment.config
    chunks = evaluation.plan(
        experiment.task.held_out,
        lambda problem: k or (problem.samples if problem.samples > 1 else c.evaluation.k),
        completions=completions,
    )
    records: dict[str, list[evaluation.Record]] = {chunk.set: [] for chunk in chunks}
    total, done, right = sum(len(chunk.keys) for chunk in chunks), 0, 0
    with make_scorer(c) as scorer, Progress(total, title="evaluation", unit="completion") as progress:
        generate = evaluation_generator(experiment, rollout, scorer)
        for chunk, own in evaluation.complete(file, chunks, generate, scorer, step=step):
            records[chunk.set] += own
            done, right = done + len(own), right + sum(r["verdict"] == "right" for r in own)
            progress.update(done, {"accuracy": right / done})
    return records


def show(
    title: str, settings: dict[str, Any], records: dict[str, list[evaluation.Record]], folder: Path
) -> dict[str, Any]:
    """Writes scores.json and scores.md, prints a row for each set, and returns the scores of the sets.

    It also prints how many completions have no verdict.
    """
    by_set = {name: scores.summarise(own) for name, own in records.items()}
    write_atomically(folder / "scores.json", json_files.dumps({"settings": settings, "sets": by_set}, indent=1) + "\n")
    write_atomically(folder / "scores.md", scores.markdown(title, settings, by_set))
    _print(title, scores.one_row_a_set(by_set))
    print("".join(f"{note}\n" for name, own in records.items() if (note := scores.without_verdict(name, own))), end="")
    return by_set


def show_curve(name: str, points: list[tuple[int, dict[str, Any]]], folder: Path) -> str:
    """Writes curve.md and curve.png of (step, scores of the sets), prints the table, and returns where they are."""
    rows = score_curve.rows(points)
    write_atomically(folder / "curve.md", f"# {name}\n\n{markdown.table(rows[0], rows[1:])}\n")
    write_atomically(folder / "curve.png", score_curve.draw(name, points))
    _print(f"{name}: Mean@k ± standard error", rows)
    return f"the curve: {folder / 'curve.png'}, {folder / 'curve.md'}"


def _print(title: str, rows: list[list[str]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)
