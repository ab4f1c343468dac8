"""The pages of the programmes are written by hand: here their tables and their results are computed from the data."""

import dataclasses
import functools
import itertools
import json
import math
import re

import numpy as np
import pytest

from experiments import kept
from experiments.completions import estimators as completions
from experiments.completions import exact, staleness
from experiments.completions import results as completion_results
from experiments.estimators import laboratory
from experiments.estimators import results as estimator_results
from experiments.objective import __main__ as objective
from experiments.objective import results as objective_results
from experiments.objective.design import BASELINE, SCAN, ObjectiveSettings
from experiments.objective.runs import MIDDLE, Runs, best_rates, own_regret
from experiments.pretrained import __main__ as pretrained_program
from experiments.pretrained import results as pretrained_results
from experiments.pretrained import runs as pretrained_runs
from rpg_jax.report.seeds import Mean, mean, paired_difference
from rpg_jax.reproduction.page import code_name
from rpg_jax.runs.config_files import ROOT

ONE_TOKEN, EXACT, STALENESS = laboratory.Settings(), exact.CompletionSettings(), staleness.StalenessSettings()


@functools.cache
def numbers(file: str) -> dict:
    settings = {"estimators/estimators": ONE_TOKEN, "completions/exact": EXACT, "completions/staleness": STALENESS}
    settings["completions/vocabulary"] = EXACT
    settings = settings[file]
    return kept.read(ROOT / "experiments" / f"{file}.json.gz", settings)


@functools.cache
def runs() -> Runs:
    return Runs(objective.read(objective.DATA).runs)


def pretrained() -> list[dict]:
    return pretrained_runs.read(pretrained_program.DATA)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tables_of(text: str) -> dict[str, str]:
    """{title of the section: its table} of a page."""
    found, title, lines = {}, "", []
    for line in [*text.splitlines(), ""]:
        title = line.lstrip("# ") if line.startswith("#") else title
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            assert title not in found, f"{title} has two tables"
            found[title], lines = "\n".join(lines), []
    return found


def absent(name: str, claims: list[str]) -> list[str]:
    """The claims that a page, on one line and without its tables, does not make. A claim counts once."""
    text, missing = prose(name), []
    for claim in claims:
        if claim in text:
            text = text.replace(claim, "", 1)
        else:
            missing.append(claim)
    return missing


def prose(name: str) -> str:
    lines = [line for line in page(name).splitlines() if not line.startswith("|")]
    return re.sub(r"\s+", " ", " ".join(lines).replace("**", ""))


@pytest.mark.parametrize("name", ["estimators", "objective", "pretrained"])
def test_every_table_of_the_page_is_that_of_the_data(name):
    expected = {
        "estimators": lambda: (
            estimator_results.tables(numbers("estimators/estimators"), ONE_TOKEN)
            | completion_results.exact_tables(numbers("completions/exact"), EXACT)
            | completion_results.vocabulary_table(numbers("completions/vocabulary"), EXACT)
            | staleness.tables(numbers("completions/staleness"), STALENESS)
        ),
        "objective": lambda: objective_results.tables(runs()),
        "pretrained": lambda: pretrained_results.tables(pretrained()),
    }[name]()
    assert tables_of(page(f"docs/{name}.md")) == expected


def test_the_sentences_on_one_token_have_the_settings_and_the_numbers_of_the_data():
    s = ONE_TOKEN
    claims = [
        f"the median over {s.scenes} random prompts (seed {s.seed}) of an expectation over all {s.tokens} tokens",
        f"π_ref is {s.reference_kl:g} nats from π_old",
        f"for {s.steps:,} updates with β = {s.fixed_point_kl_coef:g}; it shows the worst of {s.fixed_point_scenes}",
        f"β is {s.kl_coef:g}, ε that of the loss's method",
        f"The drift is {s.sampler_drift:g}; columns",
    ]
    assert absent("docs/estimators.md", claims) == []


def test_the_sentences_on_completions_have_the_settings_and_the_numbers_of_the_data():
    s, errors, ends = EXACT, *(numbers("completions/exact")[name] for name in ("errors", "ends"))
    whole = {
        e.key: [errors[e.key][f"{part}_largest"][f"completions_{e.meant}"] for part in ("kl_term", "whole")]
        for e in completions.ESTIMATORS
        if e.name.startswith(("sequence, weight W", "to-go, exact"))
    }
    reverse, forward = (
        errors[f"per token: {term}"]["kl_term"][f"completions_{divergence}"][0]
        for term, divergence in (("URKL", "reverse"), ("UFKL", "forward"))
    )

    def stays(name: str) -> str:
        return completion_results.regret(ends[f"{name}: URKL"]["offline"]["regret_reverse"][0])

    claims = [
        f"{s.actions} actions and completions of {s.length} actions; all {s.actions**s.length} completions are",
        f"The reward is 1 for {100 * s.rewarded:.0f} % of them",
        f"KL(π_old‖π_ref) is {s.behaviour_kl:g}, and",
        f"Numbers are medians over {s.prompts} random prompts (seed {s.seed})",
        f"0 stands for less than {completion_results.EXACT:.0e}".replace("e-09", "e-9"),
        f"Their largest error, with and without reward, is {np.max(list(whole.values())):.0e}.",
        f"On-policy it is {100 * reverse:.0f} % off the completions' gradient for KL(π_θ‖π_ref)",
        f"and {100 * forward:.0f} % off for KL(π_ref‖π_θ)",
        f"J = E[R] − βD, with β = {s.kl_coef:g}",
        f"for {s.end_steps:,} updates, with a cosine decay of the learning rate from {s.learning_rate:g} to 0, from a "
        f"π_old with KL(π_old‖π_ref) = {s.behaviour_kl:g}",
        f"(the last two columns, {s.offline_steps:,} updates)",
        f"Numbers are means over {s.end_prompts} prompts (seed {s.seed}), with the largest in brackets",
        f"; 0 stands for less than {completion_results.REACHED / 2:g}",
        f"the regret is below {completion_results.REACHED:g} for every β and prompt",
        f"its regret is {stays('sequence, weight 1')} with the baseline of π_old and {stays(completions.LOG_VARIANCE)} "
        "with the present one",
    ]
    assert absent("docs/estimators.md", claims) == []


def test_the_sentences_on_staleness_have_the_settings_and_the_numbers_of_the_data():
    s, found = STALENESS, numbers("completions/staleness")
    few, some = s.completions[:2]
    at = {f"{drift:g}": j for j, drift in enumerate(s.drifts)}
    token, capped, exact_rule = (
        found[f"{name}: URKL"] for name in ("per token", "sequence, weight min(W, 2)", "to-go, exact")
    )
    every = {key: staleness.error(row, few)[-1] for key, row in found.items()}
    noises = {key: row["noise"][-1][at["0.1"]] for key, row in found.items()}
    noise = exact_rule["noise"][-1]
    k3, none = found["per token (GRPO): k₃"]["bias"][-1], found["no KL term: none"]["bias"][-1]
    errors = {key: staleness.error(row, some)[-1] for key, row in found.items()}
    stale = range(at["0.01"], len(s.drifts))
    claims = [
        f"completions of {s.lengths[0]} to {s.lengths[-1]} actions",
        f"Numbers are medians over {s.prompts} random prompts (seed 0), by exact sums over up to "
        f"{s.actions ** s.lengths[-1]:,} completions",
        f"With {few} completions of {s.lengths[-1]} tokens every row's error is above "
        f"{math.floor(10 * min(map(min, every.values()))) / 10}",
        f"at 12 tokens from {noise[0]:.1f} to {noise[at['0.03']]:.1f} at {12 * 0.03:.2f} nats and {noise[-1]:.1f} at",
        f"{staleness.error(capped, some)[-1][at['0.03']]:.2f} at 0.03, where URKL per token has "
        f"{staleness.error(token, some)[-1][at['0.03']]:.2f}",
    ]
    assert absent("docs/estimators.md", claims) == []
    assert all(min(every, key=lambda key, j=j: every[key][j]) == "per token: URKL" for j in range(at["0.01"] + 1))
    assert max(every["no KL term: none"][: at["0.01"] + 1] - every["per token: URKL"][: at["0.01"] + 1]) < 0.05
    fresh = {key: row["noise"][-1][: at["0.01"] + 1] for key, row in found.items() if key != "no KL term: none"}
    assert all(min(fresh, key=lambda key, j=j: fresh[key][j]) == "per token: URKL" for j in range(at["0.01"] + 1))
    many = {key: staleness.error(row, s.completions[-1]) for key, row in found.items()}
    least = sum((many["to-go, exact: URKL"] <= np.minimum.reduce(list(many.values()))).ravel())
    assert (
        absent("docs/estimators.md", [f"the least error in {least} of the {many['per token: URKL'].size} cells"]) == []
    )
    assert min(noises, key=noises.get) == "sequence, weight min(W, 2): URKL"
    assert capped["bias"][-1][at["0.03"]] < 0.5 * found["sequence, weight w: URKL"]["bias"][-1][at["0.03"]]
    assert all(min(errors, key=lambda key, j=j: errors[key][j]) == "sequence, weight min(W, 2): URKL" for j in stale)
    assert [a > b for a, b in zip(k3, none, strict=True)] == [j >= at["0.03"] for j in range(len(s.drifts))]


def test_the_sentences_on_the_vocabulary_have_the_numbers_of_the_data():
    def noise(key: str) -> str:
        return f"{numbers('completions/vocabulary')['errors'][key]['noise'][0]:.2g}"

    token, chain, whole = "per token", "to-go, exact", "KL over the vocabulary: RKL"
    claims = [
        f"the sum has a noise of {noise(f'{token}, {whole}')} where URKL per token has {noise(f'{token}: URKL')}, and "
        f"{noise(f'{chain}, {whole}')} where the exact chain rule has {noise(f'{chain}: URKL')}.",
        f"The baseline of the prefix has {noise(f'{token}, baseline of the prefix (vOPD): URKL')}, more than URKL",
    ]
    assert absent("docs/estimators.md", claims) == []


def test_the_sentences_on_the_objective_have_the_settings_and_the_numbers_of_the_runs():
    s, found, of_file = ObjectiveSettings(), runs(), objective.read(objective.DATA)
    task = s.task

    def quantity(row: str, name: str) -> dict[int, float]:
        records = found.get("strengths", row)
        return {seed: own_regret(r) if name == "regret" else r[name] for seed, r in records.items()}

    def interval(m: Mean, sign: str = "") -> str:
        return f"{m.value:{sign}.3f} ± {m.half:.3f}"

    def against(row: str) -> str:
        change = {
            name: interval(paired_difference(quantity(row, name), quantity(BASELINE, name)), "+")
            for name in ("regret", "kl", "reward")
        }
        return f"a regret of {change['regret']} (KL {change['kl']} nats, reward {change['reward']})"

    first = {b: found.get("strengths", BASELINE, b).values() for b in found.kl_coefs("strengths")}
    best = {b: mean([r["best_reward"] - b * r["best_kl"] for r in records]).value for b, records in first.items()}
    mass = mean([r["mass"] for r in found.all if r["experiment"] == "strengths"]).value
    chosen = best_rates(found.all)
    scan = [r for r in found.all if r["experiment"] == SCAN]
    at_an_end = sum(rate in (min(s.rates), max(s.rates)) for rate in chosen.values())
    code = sorted({f"{code_name(x)}, {x['platform']}" for x in of_file.code})
    hours = sum(r["cpu_seconds"] for r in found.all) / 3600
    first_regret = mean(list(quantity(BASELINE, "regret").values()))
    claims = [
        f"A Qwen3 model of {task.layers} layers of width {task.width} draws paths of {task.length} symbols out of "
        f"{task.symbols}.",
        f"gives right paths {100 * mass:.0f} % of its probability",
        f"A run has {task.updates:,} updates of {task.groups} groups of {task.group} completions",
        f"the least regret of {', '.join(f'{rate:g}' for rate in s.rates)}, on other seeds",
        f"by exact sums over all {task.symbols**task.length:,} completions of each prompt",
        f"Numbers are means over {len(s.seeds)} seeds",
        f"{len(found.all):,} runs, {hours:.1f} hours of one core; {len(code)} versions of the code: {'; '.join(code)}.",
        f"At β = {MIDDLE:g} the KL term of whole completions ends {interval(first_regret)} below"
        f" the best possible J. Against it, URKL per token has {against('per token: URKL')}, and GRPO's k₃ has "
        f"{against('per token (GRPO): k₃')}.",
        f"J* is {', '.join(f'{value:.3f} at β = {b:g}' for b, value in best.items())}.",
        f"the standard error of one run's regret is at most {max(r.get('regret_error', 0) for r in found.all):.3f}",
        f"Mean regret on seeds {', '.join(map(str, sorted({r['seed'] for r in scan})))} at β = {MIDDLE:g}",
        f"For {at_an_end} of {len(chosen)} rows it lies at an end of the range",
    ]
    assert absent("docs/objective.md", claims) == []
    assert prose("docs/objective.md").count("±") == sum(claim.count("±") for claim in claims) + 1, (
        "± half of a 95 % interval"
    )
    assert not any(x["uncommitted_changes"] for x in of_file.code)
    assert of_file.settings == json.loads(json.dumps(dataclasses.asdict(s)))
    loses = {
        row: interval(paired_difference(quantity(row, "regret"), quantity(BASELINE, "regret")))
        for row in ("per token: URKL", "per token (GRPO): k₃", "to-go, weight w: URKL")
    }
    readme = [
        f"ends {interval(first_regret)} below the best possible J. URKL per token has a regret of",
        f"{loses['per token: URKL']} more, GRPO's k₃ of {loses['per token (GRPO): k₃']} more",
        f"loses {loses['to-go, weight w: URKL']}",
    ]
    assert absent("experiments/objective/README.md", readme) == []
    assert min(r["reward"] for r in found.all if r["experiment"] == "iterative") > 0.99


def test_the_sentences_on_the_pretrained_model_have_the_numbers_of_the_runs():
    every = [run for run in pretrained() if run["row"] != "start"]
    start = next(run for run in pretrained() if run["row"] == "start")
    found = {(run["row"], run["kl_coef"]): run for run in every if run["seed"] == 0}
    none, completions_, k3 = "no KL", "completions: RKL", "per token (GRPO): k₃"
    token, reward = "per token: URKL", "KL in the reward"
    kinds = (completions_, "to-go: URKL", token, k3, reward)

    def objective_of(row: str, beta: float) -> str:
        run = found[row, beta]
        error = (run["reward_se"] ** 2 + (beta * run["kl_se"]) ** 2) ** 0.5
        return f"{run['reward'] - beta * run['kl']:.2f} ± {error:.2f}".replace("-", "−")

    def of(row: str, beta: float, name: str, digits: int = 2) -> str:
        return f"{found[row, beta][name]:.{digits}f}"

    def seeds(row: str, name: str) -> dict[int, float]:
        beta = 0.0 if row == none else 0.1
        return {run["seed"]: run[name] for run in every if (run["row"], run["kl_coef"]) == (row, beta)}

    def against(row: str) -> str:
        m = paired_difference(seeds(row, "reward"), seeds(none, "reward"))
        return f"{m.value:.2f} ± {m.half:.2f}".replace("-", "−")

    def less(row: str) -> str:
        m = paired_difference(seeds(none, "lost"), seeds(row, "lost"))
        return f"{m.value:.3f} ± {m.half:.3f}"

    def mean_of(row: str, name: str, digits: int = 2) -> str:
        m = mean(list(seeds(row, name).values()))
        return f"{m.value:.{digits}f} ± {m.half:.{digits}f}"

    def ranks(a: str, b: str) -> str:
        places = [np.argsort(np.argsort([run[name] for run in every])) for name in (a, b)]
        return f"rank correlation {np.corrcoef(places)[0, 1]:.2f} over the {len(every)} runs"

    hours = sum(run["train_seconds"] + run["judge_seconds"] for run in every) / 3600
    to_come = sorted(of(row, 0.3, "reward") for row in (completions_, "to-go: URKL", reward))
    facts = sorted(f"{run['facts']:.2f}" for run in every if run["seed"])
    first_none = found[none, 0.0]
    claims = [
        f"{len(every)} runs, {hours:.1f} hours",
        f"in all rows ({ranks('kl', 'reward')})",
        f"Without it the reward is {mean_of(none, 'reward')}. Against that, the KL of completions has "
        f"{against(completions_)}, URKL per token {against(token)}, k₃ {against(k3)} and KL in the reward "
        f"{against(reward)}; to-go has {against('to-go: URKL')}, not resolved",
        f"({to_come[0]} to {to_come[-1]} of reward, the start has {start['reward']:.2f})",
        f"URKL per token has {of(token, 0.3, 'reward')} and k₃ {of(k3, 0.3, 'reward')}.",
        f"completions has {objective_of(completions_, 0.03)}, k₃ {objective_of(k3, 0.03)} and no KL term "
        f"{first_none['reward'] - 0.03 * first_none['kl']:.2f}.",
        f"k₃ has {objective_of(k3, 0.3)}, the KL of completions {objective_of(completions_, 0.3)}.",
        f"{start['perplexity']:.2f} before and at most {max(run['perplexity'] for run in every):.2f} after",
        f"no KL term loses {mean_of(none, 'lost', 3)}; at β = 0.1 the KL of completions loses {less(completions_)} "
        f"less, URKL per token {less(token)}, k₃ {less(k3)} and KL in the reward {less(reward)} less",
        f"grows with the reward ({ranks('reward', 'lost')})",
        f"the start answers {start['facts']:.2f}",
        f"the other two seeds answer {facts[0]} to {facts[-1]}. Over three seeds no KL term has "
        f"{mean_of(none, 'facts')}",
    ]
    assert absent("docs/pretrained.md", claims) == []
    assert min(run["facts"] for run in found.values()) > start["facts"]
    for a, b in itertools.combinations(kinds, 2):
        for name in ("reward", "kl", "lost"):
            m = paired_difference(seeds(a, name), seeds(b, name))
            assert abs(m.value) < m.half, (a, b, name)
    assert {run["seed"] for run in every if run["kl_coef"] not in (0.0, 0.1)} == {0}
