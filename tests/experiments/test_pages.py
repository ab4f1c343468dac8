"""The pages of the programmes are written by hand: here their tables and their results are computed from the data."""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from experiments import kept
from experiments.estimators import __main__ as estimators
from experiments.estimators import results as estimator_results
from experiments.estimators import staleness
from experiments.estimators.estimators import ESTIMATORS, LOG_VARIANCE
from experiments.objective import results as objective_results
from experiments.objective import runs as objective_runs
from experiments.objective.design import (
    BASELINE,
    BOUND,
    CAPPED,
    EXACT,
    GRPO,
    IN_REWARD,
    K1,
    NO_KL,
    TO_GO,
    TOKEN,
    ObjectiveSettings,
)
from experiments.objective.results import LENGTHS, LOST, verdict
from experiments.objective.runs import Runs, best_rates, regret_of
from experiments.pretrained import __main__ as pretrained_program
from experiments.pretrained import results as pretrained_results
from rpg_jax.report.run_files import read_jsonl
from rpg_jax.report.seeds import Mean, mean, paired_difference
from rpg_jax.report.tables import markdown_table
from rpg_jax.reproduction.page import code_name
from rpg_jax.runs.config_files import ROOT

WHOLE = "sequence, weight W: URKL"
PREFIX, TO_GO_EXACT = "per token, weight W of the prefix (CTPO): URKL", "to-go, exact: URKL"
VOCABULARY_TO_GO = "to-go, exact, KL over the vocabulary: RKL"
ONE_TOKEN, COMPLETIONS, STALENESS = estimators.SETTINGS


@functools.cache
def numbers(part: str) -> dict:
    settings = {"token": ONE_TOKEN, "exact": COMPLETIONS, "vocabulary": COMPLETIONS, "staleness": STALENESS}
    return kept.read(ROOT / "experiments" / "estimators" / f"{part}.json.gz", settings[part])


@functools.cache
def runs() -> Runs:
    return Runs([line["record"] for line in objective_runs.read(objective_runs.DATA)[1]])


def pretrained() -> list[dict]:
    return read_jsonl(pretrained_program.DATA)


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
            estimator_results.token_tables(numbers("token"), ONE_TOKEN)
            | estimator_results.exact_tables(numbers("exact"), COMPLETIONS)
            | estimator_results.vocabulary_table(numbers("vocabulary"), COMPLETIONS)
            | staleness.tables(numbers("staleness"), STALENESS)
        ),
        "objective": lambda: objective_results.tables(runs()) | {OTHERS: trained_table()},
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
    s, errors, ends = COMPLETIONS, *(numbers("exact")[name] for name in ("errors", "ends"))
    whole = {
        e.key: [errors[e.key][f"{part}_largest"][f"completions_{e.meant}"] for part in ("kl_term", "whole")]
        for e in ESTIMATORS
        if e.name.startswith(("sequence, weight W", "to-go, exact"))
    }
    reverse, forward = (
        errors[f"per token: {term}"]["kl_term"][f"completions_{divergence}"][0]
        for term, divergence in (("URKL", "reverse"), ("UFKL", "forward"))
    )

    def stays(name: str) -> str:
        return estimator_results.regret(ends[f"{name}: URKL"]["offline"]["regret_reverse"][0])

    claims = [
        f"{s.actions} actions and completions of {s.length} actions; all {s.actions**s.length} completions are",
        f"The reward is 1 for {100 * s.rewarded:.0f} % of them",
        f"KL(π_old‖π_ref) is {s.behaviour_kl:g}, and",
        f"Numbers are medians over {s.prompts} random prompts (seed {s.seed})",
        f"0 stands for less than {estimator_results.EXACT:.0e}".replace("e-09", "e-9"),
        f"Their largest error, with and without reward, is {np.max(list(whole.values())):.0e}.",
        f"On-policy it is {100 * reverse:.0f} % off the completions' gradient for KL(π_θ‖π_ref)",
        f"and {100 * forward:.0f} % off for KL(π_ref‖π_θ)",
        f"J = E[R] − βD, with β = {s.kl_coef:g}",
        f"for {s.end_steps:,} updates, with a cosine decay of the learning rate from {s.learning_rate:g} to 0, from a "
        f"π_old with KL(π_old‖π_ref) = {s.behaviour_kl:g}",
        f"(the last two columns, {s.offline_steps:,} updates)",
        f"Numbers are means over {s.end_prompts} prompts (seed {s.seed}), with the largest in brackets",
        f"; 0 stands for less than {estimator_results.REACHED / 2:g}",
        f"the regret is below {estimator_results.REACHED:g} for every β and prompt",
        f"its regret is {stays('sequence, weight 1')} with the baseline of π_old and {stays(LOG_VARIANCE)} "
        "with the present one",
    ]
    assert absent("docs/estimators.md", claims) == []


def test_the_sentences_on_staleness_have_the_settings_and_the_numbers_of_the_data():
    s, found = STALENESS, numbers("staleness")
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
        return f"{numbers('vocabulary')['errors'][key]['noise'][0]:.2g}"

    token, chain, whole = "per token", "to-go, exact", "KL over the vocabulary: RKL"
    claims = [
        f"the sum has a noise of {noise(f'{token}, {whole}')} where URKL per token has {noise(f'{token}: URKL')}, and "
        f"{noise(f'{chain}, {whole}')} where the exact chain rule has {noise(f'{chain}: URKL')}.",
        f"The baseline of the prefix has {noise(f'{token}, baseline of the prefix (vOPD): URKL')}, more than URKL",
    ]
    assert absent("docs/estimators.md", claims) == []


OTHERS = "Others' own functions, and a pretrained model"


def trained_by_others() -> dict[str, Any]:
    return json.loads((ROOT / "tests/external/trained.json").read_text(encoding="utf-8"))


def parted(row: Mapping[str, Any], of: str, than: str) -> Mean:
    """The paired difference in regret after 1,600 updates of two of `theirs`, `ours` and `twin`."""
    return paired_difference(*(dict(enumerate(row[name]["1600"])) for name in (of, than)))


def trained_table() -> str:
    """Where runs end whose loss is another library's own function."""
    found = trained_by_others()
    rows = []
    for row in found["rows"]:
        library = row["called"][0]["library"]
        names = "; ".join(f"`{x['function']}` ({x['where']})" for x in row["called"])
        changes = [interval(parted(row, "theirs", "ours"), "+")]
        changes += [f"{np.abs(np.subtract(row[x]['1600'], row['ours']['1600'])).max():.3f}" for x in ("theirs", "twin")]
        ends = interval(mean(row["theirs"]["1600"]))
        rows.append([f"{library} {found['versions'][library]}", names, row["term"], row["row"], ends, *changes])
    head = [
        "library",
        "functions",
        "KL term",
        "row of this page",
        "regret",
        "beyond ours",
        "largest of a seed",
        "twin's",
    ]
    return markdown_table(head, rows, numbers=range(4, 8))


def objective_claims() -> list[str]:
    """What docs/objective.md says, beside its tables."""
    s, found, (settings, lines) = ObjectiveSettings(), runs(), objective_runs.read(objective_runs.DATA)
    task, made_with = s.task, [line["made_with"] for line in lines]

    def regret(row: str, n: int = 8, experiment: str = "staleness") -> str:
        return interval(mean([*found.of(experiment, row, "own_regret", updates_a_batch=n).values()]))

    def beyond(row: str, n: int = 8, experiment: str = "staleness", than: str = BASELINE) -> Mean:
        ours, first = (found.of(experiment, r, "own_regret", updates_a_batch=n) for r in (row, than))
        return paired_difference(ours, first)

    def by_mean(row: str, n: int, beta: float) -> Mean:
        """What the mean over tokens changes."""
        return paired_difference(*(found.of(e, row, "own_regret", beta, n) for e in ("token mean", "staleness")))

    def lost(row: str, kl: float, n: int = 8) -> str:
        return interval(mean([*found.lost(row, kl, n).values()]))

    def by_rate(row: str, rate: float) -> dict[int, float]:
        return found.of("longer, by rate", row, "regret", updates_a_batch=64, rate=rate)

    def best(row: str) -> str:
        return interval(min((mean([*by_rate(row, rate).values()]) for rate in s.rates), key=lambda m: m.value))

    def missed(row: str) -> int:
        """Runs that are lost at the largest rate."""
        return sum(x > LOST for x in by_rate(row, max(s.rates)).values())

    def right(row: str, beta: float, quantity: str = "right") -> str:
        return interval(mean([*found.of("wrong verifier", row, quantity, beta).values()]))

    def grows(row: str) -> Mean:
        return paired_difference(*(found.of("staleness", row, "own_regret", updates_a_batch=n) for n in (64, 8)))

    def larger(row: str) -> Mean:
        return paired_difference(*(found.of(e, row, "own_regret") for e in ("longer", "staleness")))

    longer_beyond = {r: beyond(r, 64, "longer", CAPPED) for r in (WHOLE, f"{TO_GO}: URKL", IN_REWARD)}
    capped_against = {row: beyond(row, 64, than=CAPPED) for row in (WHOLE, IN_REWARD, TOKEN, GRPO)}
    code = sorted({f"{code_name(x)}, {x['platform']}" for x in made_with})
    hours = sum(r["cpu_seconds"] for r in found.all) / 3600
    trained = [1 if r["row"] == NO_KL.key else len(r["kl_coefs"]) for r in found.all]
    made = sum(len(r["seeds"]) * n * len(r["rates"]) for r, n in zip(found.all, trained, strict=True))
    chosen = best_rates(found.all)
    at_an_end = sum(rate in (min(s.rates), max(s.rates)) for rate in chosen.values())
    stale_worst = max(found.of("staleness", BASELINE, "regret", updates_a_batch=64).values())
    stale_middle = float(np.median([*found.of("staleness", BASELINE, "regret", updates_a_batch=64).values()]))
    stale_longer = [*found.of("longer", BASELINE, "regret", updates_a_batch=64).values()]
    reverse = [r for r in found.rows("token mean") if regret_of(r) == "regret" and r not in (NO_KL.key, K1)]
    by_means = [by_mean(row, n, beta) for row in reverse for n in (1, 8, 64) for beta in found.kl_coefs("token mean")]
    verdicts = [verdict(m) for m in by_means]
    fresh = [beyond(row, n) for n in (1, 8) for row in (WHOLE, CAPPED)]
    discounted = [
        beyond(row, n, than=than)
        for n in (1, 8)
        for row, than in ((f"{TO_GO}, λ = 0.9: URKL", f"{TO_GO}: URKL"), (TO_GO_DISCOUNTED, TO_GO_EXACT))
    ]
    assert all(m.within(BOUND) for m in discounted)
    assert missed(CAPPED) == missed(with_clip(CAPPED)) == 0
    assert chosen[with_clip(BASELINE), 64] == max(s.rates) and LOST == 0.3
    different = [m for m, words in zip(by_means, verdicts, strict=True) if words == "different"]
    largest = [by_mean(row, 64, beta) for row, beta in ((IN_REWARD, 1.0), (IN_REWARD, 0.2), (TO_GO_DISCOUNTED, 0.2))]
    assert sorted(different, key=size)[-3:] == sorted(largest, key=size)
    by_mean_text = [interval(m, "+") for m in largest]
    assert all(m.within(BOUND) for m in fresh)
    assert all(clipped_grows(CLIPS[name]).within(BOUND) for name in ("w", "min(W, 2)", "to-go"))
    assert not any(x["uncommitted_changes"] for x in made_with)
    assert settings == json.loads(json.dumps(dataclasses.asdict(s)))
    early = [np.abs(np.subtract(r["theirs"]["48"], r["ours"]["48"])).max() for r in trained_by_others()["rows"]]
    *others, of_k1 = trained_by_others()["rows"]
    assert not any(parted(row, "theirs", "ours").excludes_zero for row in others)
    assert of_k1["row"] == K1 and not parted(of_k1, "theirs", "twin").excludes_zero
    return [
        f"After 48 updates the regret of no seed differs from ours by more than {1e6 * max(early):.0f}e-6.",
        f"with k₁ Tunix' runs end {interval(parted(of_k1, 'theirs', 'ours'))} farther from J* than ours, and so do "
        f"the twins, {interval(parted(of_k1, 'twin', 'ours'))}; Tunix' differ from the twins by "
        f"{interval(parted(of_k1, 'theirs', 'twin'), '+')}",
        f"draws paths of {task.symbols} symbols and ends them itself, after at most {task.longest} tokens",
        f"{task.tokens:.1f} tokens in the mean",
        f"{task.updates:,} updates of {task.groups} groups of {task.group} completions",
        f"of {', '.join(f'{rate:g}' for rate in s.rates)} on seeds {min(s.scan_seeds)} to {max(s.scan_seeds)}",
        f"means over {len(s.seeds)} seeds",
        f"within ±{BOUND:g}",
        f"{made:,} runs, {hours:.1f} hours of one core; {'; '.join(code)}.",
        f"{at_an_end} of {len(chosen)} chosen rates lie at an end of the range",
        # What to use.
        f"{regret(BASELINE)} with w and {regret(CAPPED)} with min(W, 2)",
        f"the exact gradient, which needs no samples, ends {regret(EXACT)} below J*",
        f"gives {best(with_clip(BASELINE))} with w and the clip (`RPG-SEQ-RKL`), {best(with_clip(CAPPED))} with "
        f"min(W, 2) and the clip, {best(with_clip(f'{TO_GO}: URKL'))} for to-go with it and "
        f"{best(with_clip(IN_REWARD))} for a KL in the reward with it; without a clip {best(CAPPED)} "
        "with min(W, 2) (`loss.weight=capped`), "
        f"{best(BASELINE)} with w, {best(WHOLE)} with W and {best(IN_REWARD)} for a KL in the reward",
        "At the largest of the three it ends "
        f"{interval(mean([*by_rate(CAPPED, max(s.rates)).values()]))} below J* without a clip",
        f"There w loses {missed(BASELINE)}, W {missed(WHOLE)}, to-go {missed(f'{TO_GO}: URKL')} and a KL in the reward "
        f"{missed(IN_REWARD)}; with the clip w loses {missed(with_clip(BASELINE))}.",
        f"{regret(TOKEN)} for URKL per token and {regret(GRPO)} for GRPO's k₃",
        f"GRPO's k₃ loses {lost(GRPO, 1)} of reward at 1 nat and {lost(GRPO, 2)} at 2 nats, URKL per token "
        f"{lost(TOKEN, 1)} and {lost(TOKEN, 2)}, the KL of completions {lost(BASELINE, 1)} and {lost(BASELINE, 2)}",
        # Staleness.
        f"min(W, 2) loses {interval(grows(CAPPED))} with 64 updates a batch against 8",
        f"a regret of {stale_worst:.2f}, and their median is {stale_middle:.3f}",
        "Against min(W, 2), a comparison that was chosen after the runs, W has "
        f"{interval(capped_against[WHOLE], '+')}, the KL in the reward {interval(capped_against[IN_REWARD], '+')}, "
        f"URKL per token {interval(capped_against[TOKEN], '+')} and k₃ {interval(capped_against[GRPO], '+')}",
        f"per token it is {interval(grows(TOKEN), '+')}, for k₃ {interval(grows(GRPO), '+')}",
        "from 8 to 64 updates a batch the regret changes by "
        f"{', '.join(f'{interval(clipped_grows(row), chr(43))} ({name})' for name, row in CLIPS.items())}",
        # The prefix and the vocabulary.
        f"CTPO's weight of the prefix changes URKL per token by {interval(beyond(PREFIX, than=TOKEN), '+')} with 8 "
        f"updates a batch and by {interval(beyond(PREFIX, 64, than=TOKEN), '+')} with 64",
        f"{interval(beyond(VOCABULARY_TO_GO, than=TO_GO_EXACT), '+')} for the exact chain rule",
        # k1.
        f"k₁ in the loss is {interval(beyond(K1, than=NO_KL.key), '+')} from no KL term with 8 updates a batch",
        # Token mean.
        f"of the {len(by_means)} differences of rows with the reverse KL, but no KL and k₁, {verdicts.count('equal')} "
        f"are equal and {verdicts.count('different')} different. The largest of these are {by_mean_text[0]} and "
        f"{by_mean_text[1]}, of the KL in the reward at 64 updates a batch, and {by_mean_text[2]}, of to-go with W and "
        "λ = 0.9",
        # Lengths, wrong verifier, moving reference, longer runs.
        f"{found.tokens('short'):.1f}, {found.tokens('staleness'):.1f} and {found.tokens('long'):.1f} tokens",
        *(f"{name} {', '.join(interval(beyond(row, experiment=e), '+') for e in LENGTHS)}" for name, row in
          (("URKL per token loses", TOKEN), ("k₃", GRPO), ("to-go with weight w", f"{TO_GO}: URKL"))),
        f"right completions at β = 0.5: {right(EXACT, 0.5)} for the exact gradient, {right(BASELINE, 0.5)} for the KL "
        f"of completions, {right(TOKEN, 0.5)} for URKL per token, {right(GRPO, 0.5)} for k₃",
        "Against the KL of completions J is lower by "
        f"{', '.join(f'{interval(pretrained_j(row))} ({name})' for row, name in PRETRAINED.items())}",
        f"the first row's median is {np.median(stale_longer):.3f} and its worst run has {max(stale_longer):.2f}. "
        f"Beyond min(W, 2), a comparison that was chosen after the runs, W has {interval(longer_beyond[WHOLE], '+')}, "
        f"to-go {interval(longer_beyond[f'{TO_GO}: URKL'], '+')} and the KL in the reward "
        f"{interval(longer_beyond[IN_REWARD], '+')}",
        f"after 6,400 updates by {interval(larger(BASELINE), '+')} for the KL of completions and "
        f"{interval(larger(EXACT), '+')} for the exact gradient; by {interval(larger(TOKEN), '+')} per token and "
        f"{interval(larger(GRPO), '+')} for k₃",
    ]  # fmt: skip


CLIPS = {"w": BASELINE, "min(W, 2)": CAPPED, "to-go": f"{TO_GO}: URKL", "KL in the reward": IN_REWARD}
CLIPS |= {"URKL per token": TOKEN}
TO_GO_DISCOUNTED = "to-go, weight W, λ = 0.9: URKL"
PRETRAINED = {"per token: URKL": "URKL per token", "per token (GRPO): k₃": "k₃", "KL in the reward": "KL in the reward"}


def with_clip(row: str) -> str:
    return row.replace(": URKL", ", clip: URKL")


def size(m: Mean) -> float:
    return abs(m.value)


def clipped_grows(row: str) -> Mean:
    """What 64 updates a batch cost a row with a clip against 8."""
    return paired_difference(*(runs().of("clipped", with_clip(row), "own_regret", updates_a_batch=n) for n in (64, 8)))


def pretrained_j(row: str) -> Mean:
    """J at β = 0.1 of the KL of completions minus that of a row, on the pretrained model."""

    def of(row: str) -> dict[int, float]:
        found = (run for run in pretrained() if (run["row"], run["kl_coef"]) == (row, 0.1))
        return {run["seed"]: run["reward"] - 0.1 * run["kl"] for run in found}

    m = paired_difference(of("completions: RKL"), of(row))
    assert m.value > 0 and not m.excludes_zero
    return m


def objective_readme() -> list[str]:
    ends = {row: runs().of("staleness", row, "own_regret") for row in (BASELINE, EXACT, TOKEN, GRPO)}
    own = {row: interval(mean([*of_seeds.values()])) for row, of_seeds in ends.items()}
    more = {row: interval(paired_difference(of_seeds, ends[BASELINE])) for row, of_seeds in ends.items()}
    return [
        f"ends {own[BASELINE]} below the best possible J, and the exact gradient {own[EXACT]}.",
        f"URKL per token loses {more[TOKEN]} more, twice as much where completions are twice as long, and GRPO's k₃ "
        f"{more[GRPO]}.",
    ]


def interval(m: Mean, sign: str = "") -> str:
    return f"{m.value:{sign}.3f} ± {m.half:.3f}".replace("-", "−")


def test_the_sentences_on_the_objective_have_the_settings_and_the_numbers_of_the_runs():
    claims = objective_claims()
    assert absent("docs/objective.md", claims) == []
    assert absent("experiments/objective/README.md", objective_readme()) == []
    assert prose("docs/objective.md").count("±") == sum(claim.count("±") for claim in claims) + 1, (
        "± half of a 95 % interval"
    )


def test_the_sentences_on_the_pretrained_model_have_the_numbers_of_the_runs():
    claims, apart = pretrained_claims()
    assert absent("docs/pretrained.md", claims) == []
    assert apart == {
        (0.03, "completions: RKL", "per token (GRPO): k₃", "reward"),
        (0.03, "per token: URKL", "per token (GRPO): k₃", "reward"),
        (0.03, "per token: URKL", "KL in the reward", "reward"),
        (0.03, "per token (GRPO): k₃", "KL in the reward", "reward"),
        (0.3, "completions: RKL", "KL in the reward", "kl"),
        (0.3, "completions: RKL", "per token: URKL", "kl"),
        (0.3, "completions: RKL", "per token (GRPO): k₃", "lost"),
    }


def pretrained_claims() -> tuple[list[str], set[tuple[float, str, str, str]]]:
    """The sentences with numbers, and the differences between two kinds whose interval excludes 0: (β, a, b, what)."""
    every = [run for run in pretrained() if run["row"] != "start"]
    start = next(run for run in pretrained() if run["row"] == "start")
    none, completions_, to_go = "no KL", "completions: RKL", "to-go: URKL"
    token, k3, reward = "per token: URKL", "per token (GRPO): k₃", "KL in the reward"
    kinds = (completions_, to_go, token, k3, reward)

    def seeds(row: str, name: str, beta: float = 0.1) -> dict[int, float]:
        of_row = [run for run in every if (run["row"], run["kl_coef"]) == (row, 0.0 if row == none else beta)]
        return {run["seed"]: run["reward"] - beta * run["kl"] if name == "J" else run[name] for run in of_row}

    def apart(a: str, b: str, name: str, beta: float = 0.1, digits: int = 2) -> str:
        return text(paired_difference(seeds(a, name, beta), seeds(b, name, beta)), digits)

    def mean_of(row: str, name: str, beta: float = 0.1, digits: int = 2) -> str:
        return text(mean(list(seeds(row, name, beta).values())), digits)

    def each(row: str, name: str) -> str:
        return ", ".join(f"{value:.2f}" for _, value in sorted(seeds(row, name, 0.3).items()))

    def text(m: Mean, digits: int) -> str:
        return f"{m.value:.{digits}f} ± {m.half:.{digits}f}".replace("-", "−")

    def first(name: str, beta: float) -> str:
        of_kinds = sorted(seeds(kind, name, beta)[0] for kind in kinds)
        return f"{of_kinds[0]:.2f} to {of_kinds[-1]:.2f}"

    def ranks(a: str, b: str) -> str:
        places = [np.argsort(np.argsort([run[name] for run in every])) for name in (a, b)]
        return f"rank correlation {np.corrcoef(places)[0, 1]:.2f} over the {len(every)} runs"

    hours = sum(run["train_seconds"] + run["judge_seconds"] for run in every) / 3600
    facts = sorted(f"{run['facts']:.2f}" for run in every if run["seed"])
    few = sorted(
        f"{value:.2f}" for row in (completions_, to_go, reward) for value in seeds(row, "reward", 0.3).values()
    )
    claims = [
        f"{len(every)} runs, {hours:.1f} hours",
        f"in all rows ({ranks('kl', 'reward')})",
        f"Without it the reward is {mean_of(none, 'reward')}. Against that, the KL of completions has "
        f"{apart(completions_, none, 'reward')}, URKL per token {apart(token, none, 'reward')}, k₃ "
        f"{apart(k3, none, 'reward')} and KL in the reward {apart(reward, none, 'reward')}; to-go has "
        f"{apart(to_go, none, 'reward')}, not resolved",
        f"{apart(completions_, none, 'reward', 0.03)} (completions), {apart(to_go, none, 'reward', 0.03)} (to-go), "
        f"{apart(token, none, 'reward', 0.03)} (URKL per token), {apart(k3, none, 'reward', 0.03)} (k₃) and "
        f"{apart(reward, none, 'reward', 0.03)} (KL in the reward)",
        f"k₃ has {apart(completions_, k3, 'reward', 0.03)} of reward less than the KL of completions, "
        f"{apart(token, k3, 'reward', 0.03)} less than URKL per token and {apart(reward, k3, 'reward', 0.03)} less "
        f"than KL in the reward, which has {apart(token, reward, 'reward', 0.03)} less than URKL per token",
        f"Against the KL of completions k₃ has {apart(k3, completions_, 'J', 0.03)} of J",
        f"({few[0]} to {few[-1]} of reward in three seeds, the start has {start['reward']:.2f})",
        f"k₃ has {each(k3, 'reward')}, URKL per token {each(token, 'reward')}",
        f"KL in the reward ends {apart(reward, completions_, 'kl', 0.3)} nats farther from the start than the KL of "
        f"completions, URKL per token {apart(token, completions_, 'kl', 0.3)}",
        f"the KL of completions has {mean_of(completions_, 'J', 0.03)}, URKL per token {mean_of(token, 'J', 0.03)}, "
        f"KL in the reward {mean_of(reward, 'J', 0.03)}, to-go {mean_of(to_go, 'J', 0.03)}, k₃ "
        f"{mean_of(k3, 'J', 0.03)} and no KL term {mean_of(none, 'J', 0.03)}",
        f"{start['perplexity']:.2f} before and at most {max(run['perplexity'] for run in every):.2f} after",
        f"no KL term loses {mean_of(none, 'lost', digits=3)}; at β = 0.1 the KL of completions loses "
        f"{apart(none, completions_, 'lost', digits=3)} less, URKL per token {apart(none, token, 'lost', digits=3)}, "
        f"k₃ {apart(none, k3, 'lost', digits=3)} and KL in the reward {apart(none, reward, 'lost', digits=3)} less",
        f"grows with the reward ({ranks('reward', 'lost')})",
        f"the start answers {start['facts']:.2f}",
        f"At 0.01 the five kinds have {first('reward', 0.01)} of reward and end {first('kl', 0.01)} nats from the "
        f"start, at 0.003 {first('reward', 0.003)} and {first('kl', 0.003)}; without a KL term this seed has "
        f"{seeds(none, 'reward')[0]:.2f} and {seeds(none, 'kl')[0]:.2f}",
        f"the other two seeds answer {facts[0]} to {facts[-1]}. Over three seeds no KL term has "
        f"{mean_of(none, 'facts')}",
    ]
    assert min(run["facts"] for run in every if run["seed"] == 0) > start["facts"]
    which = itertools.product((0.03, 0.1, 0.3), itertools.combinations(kinds, 2), ("reward", "kl", "lost"))
    return claims, {
        (beta, a, b, name)
        for beta, (a, b), name in which
        if paired_difference(seeds(a, name, beta), seeds(b, name, beta)).excludes_zero
    }
