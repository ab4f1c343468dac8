"""The experiments on the objective: their task and judge against enumeration, their training, their kept runs."""

import dataclasses
import gzip
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.estimators.trees import forward_kl_optimum, kl, reverse_kl_optimum
from experiments.objective import __main__ as program
from experiments.objective import paths, results, runs
from experiments.objective.design import (
    BASELINE,
    EXACT,
    EXPERIMENTS,
    GRPO,
    NO_KL,
    ROWS,
    SCAN,
    TOKEN,
    Experiment,
    ObjectiveSettings,
    Schedule,
    count_units,
    units,
)
from experiments.objective.paths import PathSettings, Task
from experiments.objective.runs import Runs, best_rates
from experiments.objective.training import Lane, chosen, judge, train
from rpg_jax.report.seeds import Mean

SMALL = PathSettings(symbols=2, prompts=2, shortest=2, longest=4, width=8, groups=2, group=4, updates=16)
CODE = {"commit": "0123456789", "uncommitted_changes": False, "packages": {"jax": "0.10"}, "platform": "cpu"}


def task(*, wrong: bool = False, seed: int = 0) -> Task:
    """Prompt 0 forbids the step 0 → 1; prompt 1 forbids to end after 1."""
    allowed = np.ones((2, 2, 3), bool)
    allowed[0, 0, 1] = allowed[1, 1, 2] = False
    drawn = paths.make_task(SMALL, seed, wrong=wrong)
    return dataclasses.replace(drawn, allowed=jnp.asarray(allowed))


def policy(seed: int) -> jax.Array:
    """Another distribution for every state."""
    return jax.nn.log_softmax(jnp.asarray(np.random.default_rng(seed).normal(size=(*SMALL.shape, 3))))


def completions() -> list[tuple[int, ...]]:
    """All of them: paths that end with END = 2, and paths that are cut after four tokens."""
    ended = [(*x, 2) for n in range(4) for x in itertools.product(range(2), repeat=n)]
    return ended + list(itertools.product(range(2), repeat=4))


def along(table: np.ndarray, graph: np.ndarray, prompt: int, completion: tuple[int, ...]) -> tuple[float, bool]:
    """The log-probability of a completion, and whether it is right; written without the program's steps."""
    total, last, ok = 0.0, prompt, True
    for t, action in enumerate(completion):
        total += table[prompt, min(t, 1), last, int(ok), action]
        ok = ok and bool(graph[prompt, last, action])
        last = action
    return total, ok and completion[-1] == 2 and len(completion) >= 2


@pytest.mark.parametrize("wrong", [False, True])
def test_sums_over_states_are_sums_over_all_completions(wrong):
    with jax.enable_x64(True):
        of, ours, theirs = task(wrong=wrong), policy(1), policy(2)
        found = paths.visits(SMALL, of, ours)
        distance = paths.divergence(found, ours, theirs)
        for prompt in range(2):
            each = [(x, *along(np.asarray(ours), np.asarray(of.allowed), prompt, x)) for x in completions()]
            p = np.exp([logprob for _, logprob, _ in each])
            right = np.asarray([r for *_, r in each], float)
            paid = np.maximum(right, [wrong * (x == (2,)) for x, *_ in each])
            others = [along(np.asarray(theirs), np.asarray(of.allowed), prompt, x)[0] for x, *_ in each]
            expected = p @ right, p @ paid, p @ [len(x) for x, *_ in each], p @ (np.log(p) - others)
            got = found.right[prompt], found.paid[prompt], found.length[prompt], distance[prompt]
            assert p.sum() == pytest.approx(1, abs=1e-12)
            np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("kl_coef", [0.02, 0.1, 0.5])
def test_the_best_objective_is_that_of_the_best_distribution_of_completions(kl_coef):
    with jax.enable_x64(True):
        reference, rewards = jnp.log(jnp.asarray([0.6, 0.25, 0.1, 0.05])), jnp.asarray([0.0, 1.0, 0.0, 1.0])
        best = reverse_kl_optimum(reference, rewards, kl_coef)
        value = jnp.exp(best) @ rewards - kl_coef * kl(best, reference)
        np.testing.assert_allclose(paths.best_reverse(jnp.asarray(0.3), jnp.asarray(kl_coef)), value, rtol=1e-9)
        slope = jax.grad(paths.best_reverse, argnums=1)(jnp.asarray(0.3), jnp.asarray(kl_coef))
        np.testing.assert_allclose(-slope, kl(best, reference), rtol=1e-7)
        best = forward_kl_optimum(reference, rewards, kl_coef)
        value = jnp.exp(best) @ rewards - kl_coef * kl(reference, best)
        np.testing.assert_allclose(paths.best_forward(jnp.asarray(0.3), jnp.asarray(kl_coef)), value, rtol=1e-6)


def test_samples_have_the_probabilities_of_the_sums_and_their_log_probabilities():
    of, ours = task(wrong=True), policy(1).astype(jnp.float32)
    prompts = np.repeat(np.arange(2), 4_096)
    drawn = jax.jit(paths.draw, static_argnums=0)(SMALL, of, ours, prompts, jax.random.key(0))
    found = paths.visits(SMALL, of, ours)
    for sampled, exact in ((drawn.right, found.right), (drawn.paid, found.paid), (drawn.mask.sum(1), found.length)):
        each = np.asarray(sampled).reshape(2, -1)
        assert np.all(np.abs(each.mean(1) - exact) < 4 * each.std(1) / 64)
    logprobs = np.sum(np.asarray(chosen(ours, drawn) * drawn.mask), axis=1)
    for i in range(0, len(prompts), 97):
        completion = tuple(np.asarray(drawn.actions)[i][np.asarray(drawn.mask)[i] == 1].tolist())
        expected, right = along(np.asarray(ours), np.asarray(of.allowed), int(prompts[i]), completion)
        assert logprobs[i] == pytest.approx(expected, abs=1e-5) and drawn.right[i] == right


def test_graphs_have_about_the_wanted_share_of_right_completions():
    s = PathSettings()
    for seed in range(3):
        of = paths.make_task(s, seed)
        found = paths.visits(s, of, of.reference)
        assert 0.3 * s.mass < np.mean(found.right) < 2 * s.mass
        np.testing.assert_allclose(found.length, s.tokens, rtol=1e-5)


def end(row: str, s: PathSettings, kl_coef: float = 0.3, n: int = 8, reference_batches: int = 0, mean: bool = False):
    lane = Lane(task(), 0, kl_coef, 0.03, mean, reference_batches)
    trained = jax.jit(lambda lane: train(ROWS.get(row), s, n, lane))(lane)
    return judge(s, lane.task, trained, jnp.float32(kl_coef))


@pytest.mark.slow
def test_large_batches_end_where_the_exact_gradient_ends_and_tokens_elsewhere():
    s = dataclasses.replace(SMALL, groups=256, group=8, updates=160)
    exact = end(EXACT, s)
    for row in (
        BASELINE,
        "sequence, weight W: URKL",
        "to-go, exact: URKL",
        "to-go, exact, KL over the vocabulary: RKL",
    ):
        found = end(row, s)
        assert abs(found["reward"] - exact["reward"]) < 0.005 and abs(found["kl"] - exact["kl"]) < 0.02, row
    assert exact["regret"] < 0.03
    assert end(TOKEN, s)["regret"] > exact["regret"] + 0.005
    assert end(NO_KL.key, s)["kl"] > exact["kl"] + 0.3
    assert end(BASELINE, s, reference_batches=1)["kl"] > exact["kl"] + 0.1
    assert 1e-4 < abs(end(BASELINE, s, mean=True)["kl"] - end(BASELINE, s)["kl"]) < 0.05


def record(experiment: str, row: str, values: dict[str, list], **other: object) -> dict:
    """A unit of three seeds; `values` are [seed][β]."""
    shape = {"schedule": dataclasses.asdict(Schedule()), "task": dataclasses.asdict(PathSettings())}
    made = {"experiment": experiment, "row": row, "unit": f"{experiment} {row}", "kl_coefs": [0.1], "seeds": [0, 1, 2]}
    numbers = {name: [[[x] for x in betas] for betas in of_seeds] for name, of_seeds in values.items()}
    return made | shape | {"rates": [0.01], "values": numbers, "cpu_seconds": 4.0} | other


def strengths(row: str, regrets: list[float], reward: float, kl: float) -> dict:
    each = {"regret": regrets, "reward": [reward] * 3, "kl": [kl] * 3, "length": [5.0] * 3}
    return record("staleness", row, {name: [[x] for x in of_seeds] for name, of_seeds in each.items()})


RECORDS = [
    strengths(EXACT, [0.01] * 3, 0.99, 2.0),
    strengths(BASELINE, [0.10, 0.11, 0.12], 0.9, 2.0),
    strengths(TOKEN, [0.15, 0.16, 0.17], 0.85, 2.5),
    strengths(GRPO, [0.20, 0.19, 0.18], 0.8, 1.5),
]


def kept(folder):
    path = folder / runs.DATA.name
    settings = json.loads(json.dumps(dataclasses.asdict(ObjectiveSettings())))
    runs.write(path, settings, [{"record": record, "made_with": CODE} for record in RECORDS])
    return path


def test_each_row_takes_the_rate_of_the_least_regret_of_its_own_objective_at_its_staleness():
    forward, shape = "per token: UFKL", {"rates": [0.003, 0.01], "kl_coefs": [0.1], "seeds": [100]}
    numbers = {"regret": [[[0.1, 0.2]]], "regret_forward": [[[0.2, 0.1]]]}
    scan = [record(SCAN, row, {}, **shape) | {"values": numbers} for row in (TOKEN, forward)]
    stale = record(SCAN, TOKEN, {}, **shape) | {"values": {"regret": [[[float("nan"), 0.9]]]}}
    stale["schedule"] = {"updates_a_batch": 64}
    assert best_rates([*scan, stale]) == {(TOKEN, 8): 0.003, (forward, 8): 0.01, (TOKEN, 64): 0.01}


def test_rewards_are_compared_with_the_best_possible_at_their_own_distance():
    with jax.enable_x64(True):
        share, betas = np.asarray([0.1, 0.3]), jnp.asarray([0.05, 0.2, 0.7])
        best = jax.vmap(lambda b: jnp.mean(paths.best_reverse(jnp.asarray(share), b)))
        kl = -jax.vmap(jax.grad(lambda b: jnp.mean(paths.best_reverse(jnp.asarray(share), b))))(betas)
        np.testing.assert_allclose(paths.frontier(share)(np.asarray(kl)), best(betas) + betas * kl, atol=1e-5)
    values = {"kl": [[3.0, 1.0], [4.0, 2.5], [2.0, 1.0]], "reward": [[0.9, 0.5], [1.0, 0.7], [0.8, 0.4]]}
    found = Runs([record("staleness", TOKEN, values, kl_coefs=[0.1, 0.5])])
    lost = found.lost(TOKEN, 1.5, 8)
    of = paths.make_task(PathSettings(), 2)
    near, far = paths.frontier(np.asarray(paths.visits(PathSettings(), of, of.reference).paid))(np.asarray([1.0, 2.0]))
    assert lost.keys() == {0, 2} and lost[2] == pytest.approx(((near - 0.4) + (far - 0.8)) / 2, abs=1e-5)


def test_a_verdict_needs_the_whole_interval():
    assert results.verdict(Mean(0.004, 0.005, 20)) == "equal"
    assert results.verdict(Mean(0.02, 0.005, 20)) == "different"
    assert results.verdict(Mean(0.02, 0.03, 20)) == ""


def test_the_kept_runs_are_written_as_they_were_read_and_other_settings_are_refused(tmp_path):
    path = kept(tmp_path)
    assert [line["record"] for line in runs.read(path)[1]] == RECORDS
    runs.write(tmp_path / "again.gz", *runs.read(runs.DATA))
    assert gzip.decompress((tmp_path / "again.gz").read_bytes()) == gzip.decompress(runs.DATA.read_bytes())
    with pytest.raises(ValueError, match="other settings: choose another --out"):
        runs.run_objective(ObjectiveSettings(seeds=(0,)), path, jobs=1)


def test_the_tables_have_paired_differences_and_come_from_the_kept_runs_alone(tmp_path):
    path, out = kept(tmp_path), tmp_path / "page"
    assert program.main([f"--from-data={path}", f"--out={out}"]) == 0
    text = (out / "tables.md").read_text(encoding="utf-8")
    assert "| per token | URKL | 0.160 ± 0.025 | +0.050 ± 0.000 different |" in text
    assert "| per token (GRPO) | k₃ | 0.190 ± 0.025 | +0.080 ± 0.050 different |" in text
    assert (out / "objective.png").stat().st_size > 10_000
    assert list(results.tables(Runs(RECORDS))) == ["By staleness", "At equal distance", "The strength of the KL term"]
    assert program.main([f"--from-data={out / 'tables.md'}", f"--out={out}"]) == 2


def test_every_experiment_names_rows_and_compares_with_the_first():
    s = ObjectiveSettings()
    for name, experiment in EXPERIMENTS.items():
        assert {*experiment.rows} <= {EXACT, *ROWS} and (BASELINE in experiment.rows or name == "clipped")
        rates = dict.fromkeys(itertools.product([EXACT, *ROWS], (1, 8, 64)), 0.01)
        names = [unit.name for unit in units(s, name, rates)]
        assert len({*names}) == len(names)
    assert count_units(s) == (58 + 14) + 2 * 58 + 2 * 20 + 2 * 8 + 3 * 19 + 14 + 12


@pytest.mark.slow
def test_the_quick_programme_leaves_tables_and_a_figure(tmp_path, monkeypatch):
    few = {
        "staleness": dataclasses.replace(program.QUICK.experiments["staleness"], rows=(EXACT, BASELINE, program.TOKEN))
    }
    task = dataclasses.replace(program.QUICK.task, updates=64)
    monkeypatch.setattr(program, "QUICK", dataclasses.replace(program.QUICK, task=task, experiments=few))
    assert program.main(["--quick", f"--out={tmp_path}", "--jobs=2"]) == 0
    assert "| per token | URKL |" in (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert (tmp_path / "objective.png").stat().st_size > 10_000


@pytest.mark.slow
def test_runs_are_made_continued_and_equal_alone_and_together(tmp_path):
    s = ObjectiveSettings(
        task=SMALL,
        seeds=(0, 1),
        rates=(0.01,),
        scan_seeds=(100,),
        experiments={"staleness": Experiment((EXACT, BASELINE), (0.1, 0.5))},
    )
    made = runs.run_objective(s, tmp_path / runs.DATA.name, jobs=1)
    again = runs.run_objective(s, tmp_path / runs.DATA.name, jobs=1)
    assert made == again and len(made) == 4
    more = dataclasses.replace(s, experiments={**s.experiments, "longer": Experiment((EXACT,), (0.5,))})
    assert len(runs.run_objective(more, tmp_path / runs.DATA.name, jobs=1)) == 5
    with pytest.raises(ValueError, match="other settings"):
        runs.run_objective(s, tmp_path / runs.DATA.name, jobs=1)  # it would drop an experiment
    _, unit = units(s, "staleness", {(EXACT, 8): 0.01, (BASELINE, 8): 0.01})
    alone = runs.run_unit(dataclasses.replace(unit, seeds=(1,)))
    both = next(r for r in made if (r["experiment"], r["row"]) == ("staleness", BASELINE))
    np.testing.assert_allclose(alone["values"]["regret"][0], both["values"]["regret"][1], atol=2e-5)
