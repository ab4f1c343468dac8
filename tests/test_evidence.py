"""docs/evidence.md and README.md say what the kept data say: every interval on them is recomputed here."""

import functools
import gzip
import itertools
import json
import re
import subprocess
from collections.abc import Sequence

import pytest

from experiments.objective import runs as programme
from experiments.objective.design import BASELINE, CAPPED, EXACT, GRPO, IN_REWARD, K1, NO_KL, RATES, TOKEN
from experiments.objective.runs import Runs
from rpg_jax.report.seeds import Mean, mean, over_starts, paired_difference, pooled
from rpg_jax.reproduction import results, tables
from rpg_jax.runs.config_files import ROOT
from tests.report.test_seeds import detectable

DATA = ROOT / "docs" / "tables" / "data"
EVIDENCE, README = "docs/evidence.md", "README.md"
WHOLE, TO_GO = "sequence, weight W: URKL", "to-go, weight w: URKL"
OWN, STANDARDISED = "RPG-REINFORCE-URKL", "RPG-REINFORCE-URKL, DAPO's advantage"
RPG = tables.TABLES["reasoning"].pooled["the eight RPG rows"]
WITH_CLIP = BASELINE.replace(": URKL", ", clip: URKL")


@functools.cache
def objective() -> Runs:
    return Runs([line["record"] for line in programme.read(programme.DATA)[1]])


@functools.cache
def scores(table: str, what: str = "training") -> dict[str, dict[int, float]]:
    """{row: {seed: %}}: accuracy over the last third of training, or Last of a held-out set."""
    rows = results.load(DATA / f"{table}.json.gz").rows()
    if what == "training":
        return {row: {s: 100 * run.late("accuracy") for s, run in by.items()} for row, by in rows.items()}
    return {row: {s: 100 * run.scores()[what]["last"] for s, run in by.items()} for row, by in rows.items()}


def end(row: str, quantity: str = "own_regret", experiment: str = "staleness", **which) -> dict[int, float]:
    """{seed: quantity at the end of training} of a row of the objective, with 8 updates a batch unless stated."""
    return objective().of(experiment, row, quantity, **which)


def beyond(
    row: str, quantity: str = "own_regret", experiment: str = "staleness", than: str = BASELINE, **which
) -> Mean:
    """The paired difference of a row to `than`."""
    return paired_difference(end(row, quantity, experiment, **which), end(than, quantity, experiment, **which))


def lost(row: str, kl: float) -> Mean:
    """What a row lacks of the best possible reward beyond the first row, at a distance from the reference."""
    return paired_difference(objective().lost(row, kl, 8), objective().lost(BASELINE, kl, 8))


def clipped(row: str, experiment: str = "clipped") -> Mean:
    """The regret with a clip and 64 updates a batch."""
    return of(end(row.replace(": URKL", ", clip: URKL"), experiment=experiment, updates_a_batch=64))


def long_run(row: str, rate: float) -> dict[int, float]:
    return end(row, experiment="longer, by rate", updates_a_batch=64, rate=rate)


def best(row: str) -> Mean:
    """The least mean regret of three rates, 6,400 updates and 64 updates a batch."""
    return min((of(long_run(row, rate)) for rate in RATES), key=lambda m: m.value)


def missed(row: str) -> int:
    """Of the long runs at the largest rate: those that end more than 0.3 below J*."""
    return sum(x > 0.3 for x in long_run(row, max(RATES)).values())


def later(row: str) -> Mean:
    """What 64 updates a batch cost a row against 8."""
    return paired_difference(end(row, updates_a_batch=64), end(row))


def of(values: dict[int, float]) -> Mean:
    return mean(list(values.values()))


def points(table: str, row: str, other: str = "DAPO", what: str = "training") -> Mean:
    values = scores(table, what)
    return paired_difference(values[row], values[other])


def starts(row: str, other: str = "DAPO", what: str = "training") -> Mean:
    """A row minus another over three starts, each the mean of its seeds."""
    return over_starts(scores("starts", what), *([f"{name}, start {n}" for n in range(3)] for name in (row, other)))


def eight(table: str, what: str = "training") -> Mean:
    """The mean of the eight RPG rows minus DAPO."""
    values = scores(table, what)
    return paired_difference(pooled(values, RPG), values["DAPO"])


def signed(m: Mean, digits: int = 1) -> str:
    """A difference as pages write it, with a true minus sign."""
    return f"{m.value:+.{digits}f} ± {m.half:.{digits}f}".replace("-", "−")


def size(m: Mean, digits: int = 3) -> str:
    """A difference whose direction the sentence says."""
    return f"{abs(m.value):.{digits}f} ± {m.half:.{digits}f}"


def moving_pairs() -> tuple[int, int]:
    """Of all pairs of rows with a moving reference: those whose reward or KL differ by an interval without 0."""
    rows, found, pairs = objective().rows("iterative"), 0, 0
    for i, row in enumerate(rows):
        for other in rows[:i]:
            pairs += 1
            found += any(beyond(row, q, "iterative", other).excludes_zero for q in ("reward", "kl"))
    return found, pairs


def excluded(table: str, rows: Sequence[str], what: str = "training") -> int:
    return sum(points(table, row, what=what).excludes_zero for row in rows)


def negative(table: str, rows: Sequence[str], what: str = "training") -> int:
    return sum(points(table, row, what=what).value < 0 for row in rows)


def at_equal_completions(table: str, row: str, other: str = "DAPO") -> Mean:
    """Training accuracy of a row minus that of `other`, each at the last step within the completions of the cheaper."""
    rows = results.load(DATA / f"{table}.json.gz").rows()
    budget = min(mean([run.spent("completions") for run in rows[name].values()]).value for name in (row, other))
    accuracy = {
        name: {
            s: 100 * run.late("accuracy", run.last_step_within("completions", budget)) for s, run in rows[name].items()
        }
        for name in (row, other)
    }
    return paired_difference(accuracy[row], accuracy[other])


def cell(page: str, row: str, column: int) -> str:
    """A cell of the first table row that begins with `row`, on a page made by exact sums."""
    line = next(
        x for x in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if x.startswith(f"| {row} |")
    )
    return line.split("|")[column + 1].strip()


def cell_text(page: str, pattern: str) -> str:
    return re.search(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8"))[1]


def each(values: Sequence[Mean], digits: int = 3) -> str:
    """`a, b and c`"""
    texts = [size(m, digits) for m in values]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def claims() -> dict[str, tuple]:
    """{fragment of a page: what fills its braces}."""
    lengths = {row: [beyond(row, experiment=e) for e in ("short", "staleness", "long")] for row in (TOKEN, GRPO, TO_GO)}
    pairs = (STANDARDISED, OWN), (STANDARDISED, "DAPO"), (OWN, "DAPO")
    rows, ablated = list(RPG), scores("reasoning-ablations")

    def ablation(row: str, other: str = "as published") -> Mean:
        return points("reasoning-ablations", row, other)

    return {
        # Objective, 1,600 updates.
        "ends {} below the best possible": (size(of(end(BASELINE))),),
        "The exact gradient, without samples, ends {} below": (size(of(end(EXACT))),),
        "URKL per token loses {} more": (size(beyond(TOKEN)),),
        "k₃ {} more at the same β": (size(beyond(GRPO)),),
        "At 2 nats from the reference URKL per token lacks {} more reward and k₃ {}": (
            size(lost(TOKEN, 2)), size(lost(GRPO, 2))),
        "at 1 nat {} and {}": (size(lost(TOKEN, 1)), size(lost(GRPO, 1))),
        # Staleness.
        "With 64 updates a batch and the usual clip the KL of completions ends {} below": (size(clipped(BASELINE)),),
        "a KL in the reward {} and URKL per token {}": (size(clipped(IN_REWARD)), size(clipped(TOKEN))),
        "Without a clip min(W, 2) loses {} with 64 updates a batch against 8": (size(later(CAPPED)),),
        "After 6,400 updates the best of three rates gives {} with w and the clip, {} with min(W, 2) and no clip": (
            size(best(WITH_CLIP)), size(best(CAPPED))),
        "At the largest rate w then loses {} of 20 runs, with the clip {}": (missed(BASELINE), missed(WITH_CLIP)),
        "W {}, KL in the reward {}": (size(later(WHOLE)), size(later(IN_REWARD))),
        "{} (W) and {} (min(W, 2))": (signed(beyond(WHOLE), 3), signed(beyond(CAPPED), 3)),
        "KL in the reward by {}": (signed(beyond(IN_REWARD), 3),),
        "to-go by {}": (signed(beyond(TO_GO), 3),),
        # 6,400 updates.
        "With four times the updates the KL of completions ends {} below the best possible": (
            size(of(end(BASELINE, experiment="longer"))),),
        "per token loses {} more, k₃ {}": (
            size(beyond(TOKEN, experiment="longer")), size(beyond(GRPO, experiment="longer"))),
        # Lengths.
        "With {} tokens": (", ".join(f"{objective().tokens(e):.1f}" for e in ("short", "staleness", "long")),),
        "per token loses {} with growing length": (each(lengths[TOKEN]),),
        "k₃ {} with growing length": (each(lengths[GRPO]),),
        "to-go {} with growing length": (each(lengths[TO_GO]),),
        # A moving reference.
        "{} of {} pairs of rows differ in reward or in KL": moving_pairs(),
        # No KL term.
        "k₁ minus no KL term is {} in regret": (signed(beyond(K1, than=NO_KL.key), 3),),
        "a difference of {} would have been seen": (f"{detectable(beyond(K1, than=NO_KL.key)):.3f}",),
        # A wrong verifier.
        "URKL per token keeps {} more right completions at β = 0.1 than the KL of completions": (
            size(beyond(TOKEN, "right", "wrong verifier")),),
        "k₃ {} at 0.02": (size(beyond(GRPO, "right", "wrong verifier", kl_coef=0.02)),),
        "k₃ has {} fewer": (size(beyond(GRPO, "right", "wrong verifier", kl_coef=0.5)),),
        # β = 1e-4.
        "their mean is {} points from DAPO": (signed(eight("reasoning")),),
        "by seed {}": (", ".join(
            f"{pooled(scores('reasoning'), RPG)[s] - scores('reasoning')['DAPO'][s]:+.2f}".replace("-", "−")
            for s in sorted(scores("reasoning")["DAPO"])),),
        "from the lower start {}": (signed(eight("reasoning-low-start")),),
        "all {} rows of both pages are negative, and {} of {} intervals exclude 0": (
            negative("reasoning", rows) + negative("reasoning-low-start", rows),
            excluded("reasoning", rows) + excluded("reasoning-low-start", rows), 2 * len(rows)),
        "Held out it is not resolved ({}, and a difference of {} would have been seen)": (
            signed(eight("reasoning", "held out")), f"{detectable(eight('reasoning', 'held out')):.1f}"),
        "on short sums neither ({}, {})": (signed(eight("small")), f"{detectable(eight('small')):.1f}"),
        # Three starts.
        "RPG-REINFORCE-URKL with DAPO's advantage is {} points from the same row with its own": (
            signed(starts(STANDARDISED, OWN)),),
        "{} from DAPO": (signed(starts(STANDARDISED)),),
        "the row as it is {}": (signed(starts(OWN)),),
        "Held out nothing is resolved ({}, {} and {})": tuple(signed(starts(*pair, "held out")) for pair in pairs),
        "DAPO ends at {} %": (each([of(scores("starts")[f"DAPO, start {n}"]) for n in range(3)], 1),),
        # What matters there.
        "truncating the ratio without stopping the gradient leaves {} %, where the row has {}": (
            size(of(ablated["clip truncate"]), 1), size(of(ablated["as published"]), 1)),
        "no clip is not resolved ({})": (signed(ablation("clip none")),),
        "With a reference that moves, β of 0, 0.001, 0.01 and 0.1 is {} from 1e-4": (
            ", ".join(signed(ablation(f"β = {b}")) for b in ("0", "0.001", "0.01", "0.1")),),
        "with a fixed one β = 0.1 costs {} points": (size(ablation("β = 0.1, fixed"), 1),),
        "GRPO is {} points behind DAPO at equal updates and {} ahead at equal completions": (
            size(points("reasoning", "GRPO"), 1), size(at_equal_completions("reasoning", "GRPO"), 1)),
        "MaxRL {} behind and {} ahead": (
            size(points("reasoning", "MaxRL"), 1), size(at_equal_completions("reasoning", "MaxRL"), 1)),
        "GSPO is {} points behind, KL-in-reward with its β = 0.1 and fixed reference {}": (
            size(points("reasoning", "GSPO"), 1), size(points("reasoning", "KL-in-reward"), 1)),
        "rank 16 is {} points from full training, rank 4 {} and rank 1 {}": (
            *(signed(points("adapters", f"rank {n}", "full")) for n in (16, 4, 1)),),
        "DAPO keeps {} % of a skill that is not trained, and the eight RPG rows {}": (
            size(of(scores("reasoning", "old skill")["DAPO"]), 1),
            size(of(pooled(scores("reasoning", "old skill"), RPG)), 1)),
    }  # fmt: skip


def plain(page: str) -> str:
    """The text of a page without emphasis, on one line."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8").replace("**", ""))


def test_every_interval_of_the_page_is_that_of_the_kept_data():
    text, wrong = plain(EVIDENCE), []
    for fragment, values in claims().items():
        expected = fragment.format(*values)
        if expected in text:
            text = text.replace(expected, "")
        else:
            wrong.append(expected)
    assert wrong == [], "docs/evidence.md must say this"
    critic = cell_text("tables/reasoning.md", r"it explains ([\d.]+ ± [\d.]+) of the variance")
    left = text.replace(f"({critic} of the variance of returns)", "")
    assert re.findall(r".{40}\d ± .{10}", left) == [], "an interval that no claim computes"


def test_the_readme_says_the_same_as_the_page():
    text = plain(README)
    assert missed(CAPPED) == 0
    headline = [
        f"ends {size(of(end(BASELINE)))} below the best possible",
        f"Per token it loses {size(beyond(TOKEN))} more",
        f"k₃ loses {size(beyond(GRPO))} more",
        f"With 64 updates a batch min(W, 2) loses {size(later(CAPPED))} against 8, W {size(later(WHOLE))} and a KL in "
        f"the reward {size(later(IN_REWARD))}",
        f"the best of three rates ends {size(best(WITH_CLIP))} below with the clip, {size(best(CAPPED))} with "
        f"min(W, 2). At the largest rate the clip loses {missed(WITH_CLIP)} of 20 runs, min(W, 2) none",
        f"their mean is {signed(eight('reasoning'))} points from DAPO",
        f"held out that is not resolved ({signed(eight('reasoning', 'held out'))})",
    ]
    assert [x for x in headline if x not in text] == []


def test_the_numbers_by_exact_sums_are_those_of_the_laboratory():
    text = plain(EVIDENCE)
    reverse, forward = (f"{100 * float(cell('estimators.md', f'per token | {d}', 3)):.0f} %" for d in ("URKL", "FKL"))
    assert f"it is {reverse} off for reverse and {forward} for forward" in text
    exact, token = (cell("estimators.md", row, 11) for row in ("sequence, weight W | RKL, URKL", "per token | URKL"))
    assert f"{exact} times the mean gradient at a drift of 0.1 nats, where URKL per token has {token}" in text
    assert {cell("estimators.md", "sequence, weight W | RKL, URKL", n) for n in (3, 4, 5, 6)} == {"0"}


def test_a_held_out_score_of_512_problems_is_known_to_3_points():
    rows = results.load(DATA / "starts.json.gz").rows()
    runs = [run for by_seed in rows.values() for run in by_seed.values()]
    errors = [run.evaluations["held out"][-1]["standard_error"] for run in runs]
    assert len(errors) == 27 and 1.96 * max(errors) < 0.03


def test_runs_of_a_commit_that_is_not_here_were_made_again_to_the_last_digit():
    kept, again = (results.load(DATA / f"{name}.json.gz").rows() for name in ("reasoning", "starts"))
    for row, seed in itertools.product(("DAPO", OWN), range(3)):
        old, new = kept[row][seed], again[f"{row}, start 0"][seed]
        assert old.versions["commit"].startswith("ed295bd") and new.versions["commit"].startswith("7855e35")
        for metric in ("entropy", "clip_fraction", "groups_generated"):
            assert [r[metric] for r in old.trained] == [r[metric] for r in new.trained], (row, seed, metric)


def test_kept_runs_name_commits_of_this_repository():
    """But for one, whose runs were made again: see above."""
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True)
    if shallow.stdout != b"false\n":
        pytest.skip("needs the whole history")
    named = {run.versions["commit"] for path in DATA.glob("*.json.gz") for run in results.load(path).all_runs()}
    named |= {line["made_with"]["commit"] for line in programme.read(programme.DATA)[1]}
    laboratories = (ROOT / "experiments").rglob("*.json.gz")
    named |= {json.loads(gzip.decompress(path.read_bytes()))["made_with"]["commit"] for path in laboratories}

    def absent(commit: str) -> bool:
        asked = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        return subprocess.run(asked, cwd=ROOT, capture_output=True).returncode != 0

    assert [commit[:7] for commit in sorted(named) if absent(commit)] == ["ed295bd"]
