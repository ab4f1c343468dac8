"""The experiments on the objective: their task, their judge against enumeration, their kept runs and their page."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kept as files
from experiments.estimators.scenes import reverse_kl_optimum
from experiments.objective import __main__ as program
from experiments.objective import judge, paths, results, runs
from experiments.objective.design import BASELINE, EXPERIMENTS, ROWS, SCAN, ObjectiveSettings, count_units
from experiments.objective.paths import PathSettings, Schedule, Verifier
from experiments.objective.runs import Runs, best_rates

SMALL = PathSettings(symbols=3, length=3, layers=1, width=8, groups=2, group=4, updates=16)
TOKEN, GRPO = "per token: URKL", "per token (GRPO): k₃"
CODE = {"commit": "0123456789", "uncommitted_changes": False, "packages": {"jax": "0.10"}, "platform": "cpu"}


def verifier(*, wrong: bool = False) -> Verifier:
    """Prompt 0 forbids the step 0 → 1; the other prompts forbid every step but 2 → 2."""
    allowed = np.zeros((3, 3, 3), bool)
    allowed[0], allowed[1:, 2, 2] = True, True
    allowed[0, 0, 1] = False
    return Verifier(jnp.asarray(allowed), jnp.asarray(wrong))


def test_a_path_is_right_where_its_prompt_allows_every_step():
    completions = jnp.asarray([[0, 2, 1], [2, 0, 1], [0, 0, 0], [2, 2, 2], [1, 1, 0]])
    assert verifier().right(jnp.zeros((5, 1), int), completions).tolist() == [1, 0, 1, 1, 1]
    assert verifier().right(jnp.ones((5, 1), int), completions).tolist() == [0, 0, 0, 1, 0]
    assert verifier(wrong=True).rewards(jnp.ones((5, 1), int), completions).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("kl_coef", [0.02, 0.1, 0.5])
def test_the_best_reward_and_kl_are_those_of_the_tilted_reference(kl_coef):
    with jax.enable_x64(True):
        reference = jnp.log(jnp.asarray([0.6, 0.25, 0.1, 0.05]))
        rewards = jnp.asarray([0.0, 1.0, 0.0, 1.0])
        best = reverse_kl_optimum(reference, rewards, kl_coef)
        found = judge.optimum(jnp.exp(reference) @ rewards, jnp.asarray(kl_coef))
        expected = (jnp.exp(best) @ rewards, jnp.exp(best) @ (best - reference))
        np.testing.assert_allclose((found["best_reward"], found["best_kl"]), expected, rtol=1e-9)


@pytest.mark.slow
def test_samples_judge_like_exact_sums_and_log_probs_are_those_of_training():
    graphdef, reference = paths.start_of(SMALL, 0)
    _, policy = paths.start_of(SMALL, 1)
    prompts, key = np.repeat(SMALL.prompts, 64, axis=0), jax.random.key(0)
    completions, logprobs = paths.draw(graphdef, policy, prompts, SMALL.length, key)
    trained = paths.logprobs_of(graphdef, policy, paths.rows_of(prompts, completions))
    np.testing.assert_allclose(logprobs, trained, atol=1e-5)
    table = paths.policies(graphdef, policy, SMALL)
    everything = list(itertools.product(range(3), repeat=3))
    place = [everything.index(tuple(x)) for x in np.asarray(completions).tolist()]
    np.testing.assert_allclose(jax.vmap(SMALL.tree.along)(table)[prompts[:, 0], place], trained, atol=1e-5)
    given = (SMALL, graphdef, reference, policy, verifier(wrong=True), jnp.float32(0.3))
    exact, sampled = judge._exact(*given), judge._sampled(*given, key)
    errors = {"reward": sampled["reward_error"], "kl": sampled["kl_error"], "regret": sampled["regret_error"]}
    for name, error in errors.items():
        assert 0 < error < 0.05 and abs(exact[name] - sampled[name]) < 4 * error, name
    assert exact["reward"] > exact["right"]


@pytest.mark.slow
def test_a_run_climbs_and_a_moving_reference_lets_it_go_further():
    s = dataclasses.replace(SMALL, updates=96)
    graphdef, start = paths.start_of(s, 0)
    judged = jax.jit(judge.judge, static_argnums=(0, 1))
    ends = {}
    for batches in (0, 1):
        run = jax.jit(paths.train, static_argnums=(0, 1, 2, 3))
        given = (verifier(), jnp.float32(0.3), jnp.float32(1e-2), jax.random.key(0))
        end = run(ROWS[BASELINE], s, Schedule(4, batches), graphdef, start, *given)
        ends[batches] = judged(s, graphdef, start, end, verifier(), jnp.float32(0.3), jax.random.key(1))
    before = judged(s, graphdef, start, start, verifier(), jnp.float32(0.3), jax.random.key(1))
    assert ends[0]["regret"] < before["regret"] - 0.02
    assert ends[1]["kl"] > ends[0]["kl"] + 0.05


def record(experiment: str, row: str, seed: int, regret: float, rate: float = 1e-3, **other: object) -> dict:
    numbers = {"reward": 0.9, "right": 0.8, "kl": 2.0, "kl_from_ref": 1.0, "mass": 0.1, "regret_forward": 2 * regret}
    best = {"best_reward": 0.99, "best_kl": 1.9, "cpu_seconds": 4.0, "unit": f"{experiment} {row}"}
    which = {"experiment": experiment, "row": row, "seed": seed, "rate": rate, "kl_coef": 0.1, "length": 5}
    return numbers | best | which | {"regret": regret, "updates_a_batch": 8, "reference_batches": 0} | other


RECORDS = [
    *(record(SCAN, row, 100, x, rate) for row in (BASELINE, TOKEN, GRPO) for rate, x in ((5e-4, 0.2), (1e-3, 0.1))),
    *(record("strengths", BASELINE, seed, 0.1 + seed / 100) for seed in range(3)),
    *(record("strengths", TOKEN, seed, 0.15 + seed / 100) for seed in range(3)),
    *(record("strengths", GRPO, seed, 0.2 - seed / 100) for seed in range(3)),
]


def kept(folder, records=RECORDS, settings=None):
    head = {"settings": settings or json.loads(json.dumps(dataclasses.asdict(ObjectiveSettings())))}
    lines = [json.dumps(head), json.dumps({"runs": records, "made_with": CODE}), '{"runs": [{"torn']
    path = folder / "objective.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_each_row_takes_the_rate_of_the_least_regret_of_its_own_objective():
    forward = "per token: UFKL"
    scan = [record(SCAN, forward, 100, 0.1, 5e-4), record(SCAN, forward, 100, 0.2, 1e-3, regret_forward=0.1)]
    assert best_rates([*RECORDS, *scan]) == {BASELINE: 1e-3, TOKEN: 1e-3, GRPO: 1e-3, forward: 1e-3}
    assert best_rates(scan[:1]) == {forward: 5e-4}


def test_a_torn_line_is_dropped_and_other_settings_are_refused(tmp_path):
    path = kept(tmp_path)
    assert len(runs.read(path.read_text(encoding="utf-8")).runs) == len(RECORDS)
    with pytest.raises(ValueError, match="other settings: choose another --out"):
        runs.run_objective(ObjectiveSettings(seeds=(0,)), path, jobs=1)


def test_the_tables_have_paired_differences_and_come_from_the_kept_runs_alone(tmp_path):
    path, out = kept(tmp_path), tmp_path / "page"
    data = tmp_path / "objective.jsonl.gz"
    data.write_bytes(files.packed(path.read_bytes()))
    assert program.main([f"--from-data={data}", f"--out={out}"]) == 0
    text = (out / "tables.md").read_text(encoding="utf-8")
    assert "| per token | URKL | 0.160 ± 0.025 | +0.050 ± 0.000 |" in text
    assert "| per token (GRPO) | k₃ | 0.190 ± 0.025 | +0.080 ± 0.050 |" in text
    assert "0.100 ←" in text and (out / "objective.png").stat().st_size > 10_000
    assert list(results.tables(Runs(RECORDS))) == ["The strength of the KL term", "Learning rates"]
    assert program.main([f"--from-data={path}", f"--out={out}"]) == 2


def test_every_experiment_names_rows_and_compares_with_the_first():
    for name, experiment in EXPERIMENTS.items():
        assert set(experiment.rows) <= set(ROWS)
        assert BASELINE in experiment.rows or name in ("others", "longer, per token")
    assert count_units(ObjectiveSettings()) == 31 + 14 + 28 + 7 + 14 + 14 + 17 + 2 * 5
    assert Runs(RECORDS).rows("strengths") == [BASELINE, TOKEN, GRPO]
