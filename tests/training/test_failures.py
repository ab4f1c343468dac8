"""A completion on which the machinery has failed changes nothing: no mask, no baseline, no group, no mean."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from rpg_jax import data, losses
from rpg_jax.data.groups import decode_groups, encode_groups
from rpg_jax.losses import ADVANTAGES, AGGREGATES
from rpg_jax.losses.regularized_pg import TOKEN_SUMS
from rpg_jax.rewards import callables
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rollout import Split
from rpg_jax.training.collect import Collected, DynamicSampling, collect
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.measures import sampling_metrics
from rpg_jax.training.objective import advantages_fn
from rpg_jax.types import Completion, Sampling, Turns


def group_of(scores, failed, lengths=None, prompt_id=0, paid=None, rng=None):
    """A group with these rewards; `paid` are the turns' rewards of conversations."""
    rng = rng or np.random.default_rng(0)
    lengths = lengths or [4] * len(scores)
    completions = []
    for i, n in enumerate(lengths):
        turns = None
        if paid is not None:
            observed = np.zeros(n, bool)
            observed[1 : 2 * len(paid[i]) - 1 : 2] = True
            turns = Turns(observed, np.float32(paid[i]), failed[i])
        tokens = rng.integers(4, 16, n).astype(np.int32)
        completions.append(Completion(tokens, rng.normal(size=n).astype(np.float32), "stop", 0, turns=turns))
    scores = np.float32(scores)
    parts = np.stack([scores, rng.normal(size=len(scores))], -1).astype(np.float32)
    known = ["?"] * len(scores), scores, (scores > 0).astype(np.float32), None, list(failed), parts, None, list(failed)
    return data.Group(data.Problem(prompt_id, "?", "!", "t"), np.array([3, 3]), completions, *known)


def without_the_failed(group):
    """The group as if what failed had never been sampled; None if it is not trained."""
    if not group.counted.any():
        return None
    keep = np.flatnonzero(group.counted)
    lists = {name: [getattr(group, name)[i] for i in keep] for name in ("completions", "texts", "failures")}
    arrays = {name: getattr(group, name)[keep] for name in ("rewards", "accuracy", "parts")}
    return dataclasses.replace(group, **lists, **arrays, failed=())


EIGHT = group_of([1] * 7 + [0], [None] * 7 + ["timeout"])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_of_eight_right_completions_one_that_timed_out_gives_none_an_advantage(name):
    batch = data.pack([EIGHT], data.RowShape(8, 6, 4))
    assert not EIGHT.informative and batch.trained == [[4] * 7 + [0]]
    parts = dataclasses.replace(EIGHT, parts=None)  # the second part is noise
    batch = dataclasses.replace(batch, groups=[parts])
    np.testing.assert_array_equal(advantages_fn(name, "ppo")(batch)["advantages"], 0)
    if name == "group_standardised":  # as it was trained before
        wrong = losses.advantages(name, EIGHT.rewards[None])[0]
        np.testing.assert_allclose([wrong[0], wrong[7]], [0.354, -2.475], atol=1e-3)


@pytest.mark.parametrize("credit", ["completion", "turn"])
def test_a_conversation_whose_environment_timed_out_gives_none_an_advantage(credit):
    """Three are paid 2; the fourth was paid 1 and its environment failed in its second turn."""
    paid = [[1, 1], [1, 1], [1, 1], [1, 0]]
    group = group_of([2, 2, 2, 0], [None] * 3 + ["timeout"], paid=paid)
    batch = data.pack([group], data.RowShape(4, 6, 4))
    found = advantages_fn("leave_one_out", "ppo", credit=credit, environment_weight=1.0)(batch)["advantages"]
    assert not np.concatenate([np.ravel(x) for x in found[0]]).any()
    assert batch.trained == [[3, 3, 3, 0]] and not group.informative


FAILED = [[1, 4], [0, 3], [2, 3], [0, 1, 2, 3]]  # of each group; of the last a single one is left
LENGTHS = [[3, 1, 4, 2, 2], [2, 5, 2, 1, 3], [1, 1, 6, 2, 4], [2, 2, 2, 2, 2]]


def batches(aggregate, loss, advantage, options, shape):
    """Loss, weight and gradient by completion: with what failed, and as if it had never been sampled."""
    rng = np.random.default_rng(7)
    groups = [
        group_of(rng.normal(size=5), ["timeout" if i in failed else None for i in range(5)], own, p, rng=rng)
        for p, (failed, own) in enumerate(zip(FAILED, LENGTHS, strict=True))
    ]
    columns = [[[rng.normal(size=n).astype(np.float32) / 3 for n in own] for own in LENGTHS] for _ in range(3)]
    length = {"constant_length": 7} if aggregate == "constant" else {}

    def of(chosen, columns):
        batch = data.pack(chosen, shape)
        old, ref, new = (batch.scatter(x) for x in columns)
        batch = batch.add(behaviour_logprobs=old, ref_logprobs=ref)
        given = advantages_fn(advantage, loss, [1.0, 0.5], **options)(batch)["advantages"]
        batch = batch.add(advantages=batch.scatter(given))
        hyper = {"aggregate": aggregate, **length, **options}
        sums, gradients = np.zeros(2), []
        for x, b in zip(new, batch.batches, strict=True):

            def total(x, b=b):
                total, weight, _ = losses.policy_loss(loss, logprobs=x, **b.loss_inputs, **hyper)
                return total, weight

            (value, weight), gradient = jax.value_and_grad(total, has_aux=True)(x)
            sums += [value, weight]
            gradients.append(gradient)
        return sums, batch.gather(gradients), given

    left = [(p, without_the_failed(g)) for p, g in enumerate(groups)]
    kept = [
        [[x[p][i] for i in np.flatnonzero(groups[p].counted)] for p, own in left if own is not None] for x in columns
    ]
    absent = of([own for _, own in left if own is not None], kept)
    return groups, of(groups, columns), absent


COMPLETIONS = {"divergence": "rkl", "clip": "none", "kl_coef": 0.3, "level": "sequence"}


@pytest.mark.parametrize(
    ("aggregate", "loss", "options", "shape"),
    [
        *((aggregate, "grpo", {"kl_coef": 0.1}, data.RowShape(3, 9, 6)) for aggregate in AGGREGATES),
        *(
            pytest.param(aggregate, "rpg", COMPLETIONS, data.RowShape(4, 24, 18, True), marks=pytest.mark.slow)
            for aggregate in TOKEN_SUMS
        ),
    ],
)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_loss_and_gradient_are_those_of_the_batch_in_which_what_failed_is_absent(
    aggregate, advantage, loss, options, shape
):
    groups, (sums, gradients, given), (sums_without, gradients_without, given_without) = batches(
        aggregate, loss, advantage, options, shape
    )
    # f32: sums over a group have zeros in between, and rows are in another order.
    np.testing.assert_allclose(sums, sums_without, rtol=2e-5, atol=2e-5)
    others = iter(zip(gradients_without, given_without, strict=True))
    for p, group in enumerate(groups):
        kept = np.flatnonzero(group.counted)
        for i in set(range(5)) - {*kept}:
            assert given[p][i] == 0 and not np.any(gradients[p][i])
        if len(kept):
            gradient, advantages = next(others)
            np.testing.assert_allclose(np.asarray(given[p])[kept], advantages, rtol=2e-5, atol=2e-6)
            for i, own in zip(kept, gradient, strict=True):
                np.testing.assert_allclose(gradients[p][i], own, rtol=5e-5, atol=2e-6)
    assert not groups[3].counted.any(), "a lone completion would be trained on its raw reward"


def test_a_lone_completion_of_several_is_left_out_and_a_group_of_one_is_not():
    alone, one = group_of([1, 0, 0], [None, "crash", "crash"]), group_of([1], [None])
    assert alone.judged.tolist() == [True, False, False] and not alone.counted.any() and not alone.informative
    assert one.counted.all() and not group_of([1], ["timeout"]).counted.any()
    for name in ADVANTAGES:
        counted = np.array([[True, False, False]])
        found = losses.advantages(name, [[1.0, 0.0, 0.0]], lengths=np.ones((1, 3), int), counted=counted)
        np.testing.assert_array_equal(found, 0)
    with pytest.raises(ValueError, match=r"counted must have the shape of rewards \(1, 3\), got \(3,\)"):
        losses.advantages("group_mean", [[1.0, 0.0, 0.0]], counted=[True, False, True])


def test_what_failed_is_the_same_after_a_checkpoint():
    groups = [EIGHT, group_of([1, 0], [None, None]), dataclasses.replace(group_of([1], [None]), failed=())]
    back = decode_groups(encode_groups(groups))
    assert [list(g.failed) for g in back] == [[None] * 7 + ["timeout"], [None, None], []]
    assert [g.counted.tolist() for g in back] == [g.counted.tolist() for g in groups]


def test_the_means_of_a_step_leave_out_what_failed():
    group = group_of([1, 0.5, 0], [None, None, "status"], [2, 4, 9])
    found = sampling_metrics(Collected([group, EIGHT, group_of([0, 0], ["crash"] * 2)], [], [group]))
    assert (found["reward"], found["accuracy"], found["failed"]) == (0.875, 1.0, 4 / 13)
    assert found["completion_length"] == ((2 + 4) / 2 + 4) / 2, "a mean over prompts, of those that have a verdict"
    assert found["completion_tokens"] == 2 + 4 + 9 + 32 + 8
    none = sampling_metrics(Collected([group_of([0, 0], ["crash"] * 2)], [], [group]))
    assert none["failed"] == 1 and "reward" not in none


def collected(groups, **how):
    made, ids = iter(groups), iter(range(100))
    take = lambda n: [data.Problem(next(ids), "?", "!", "t") for _ in range(n)]  # noqa: E731
    return collect(
        take,
        lambda problems, **_: [next(made) for _ in problems],
        prompts_per_step=2,
        step=4,
        **{"dynamic": None, **how},
    )


MIXED = group_of([1, 0, 1, 0], [None] * 4)


def test_a_group_in_which_nothing_is_left_to_train_is_not_trained():
    nothing = group_of([1, 0, 0, 0], [None, "timeout", "timeout", "timeout"])
    step = collected([nothing, MIXED], max_failures=0.5)
    assert step.trained == [MIXED] and step.generated == [nothing, MIXED]
    assert step.accounting()["groups_uninformative"] == 1
    for dynamic in (None, DynamicSampling(max_batches=1)):
        with pytest.raises(
            ValueError, match=r"^step 5: 6 of 8 .* \(6 timeout\), so that no group can be trained\. Look"
        ):
            collected([nothing, nothing], dynamic=dynamic, max_failures=1.0)


def test_a_failure_keeps_no_group_that_is_all_right_or_all_wrong():
    right, wrong = group_of([1, 1, 1, 0], [None] * 3 + ["timeout"]), group_of([0, 0, 0, 1], [None] * 3 + ["crash"])
    step = collected([right, wrong, MIXED, MIXED], dynamic=DynamicSampling(), max_failures=0.25)
    assert step.trained == [MIXED, MIXED] and step.accounting()["groups_uninformative"] == 2


@pytest.mark.parametrize("dynamic", [None, DynamicSampling()])
def test_more_failures_than_are_allowed_end_the_run_with_one_line(dynamic):
    half = group_of([1, 0, 0, 1], [None, None, "unreachable", "status"])
    with pytest.raises(ValueError) as raised:
        collected([half, MIXED, MIXED, MIXED], dynamic=dynamic, max_failures=0.2)
    assert str(raised.value) == (
        "step 5: 2 of 8 completions have no verdict (1 status, 1 unreachable), more than rewards.max_failures=0.2. "
        "Look at the judge, the verifier or the environment, then continue the run with the same command"
    )
    assert collected([half, MIXED], dynamic=None, max_failures=0.25).trained == [half, MIXED]


class Talk:
    """A rollout that says "a0", "a1", …."""

    def __init__(self, turns=(None, None, None)):
        self.split, self.turns = Split.SHARE, turns

    def generate(self, request, journal=None):
        for place, prompt in enumerate(request.prompts):
            tokens = [np.array([*prompt, ord(str(i)), 1], np.int32) for i in range(request.group_size)]
            group = [
                Completion(t, np.zeros(len(t)), "stop", 0, turns=own) for t, own in zip(tokens, self.turns, strict=True)
            ]
            request.on_group(place, group)


def generated(function, parts=1.0, turns=(None, None, None)):
    """The group and the failed verdicts of a function, beside `exact`, which decides accuracy."""
    name = callables.named(function)
    scorer = Scorer({"exact": 1.0, **{n: parts for n in name[1]}}, handed=name[1], deadline_s=0.2)
    with scorer:
        generate = GroupGenerator(
            Talk(turns),
            lambda problem: np.array([ord(c) for c in problem.prompt]),
            lambda ids: "".join(map(chr, ids)),
            scorer,
            group_size=3,
            sampling=Sampling(),
            seed=0,
        )
        [group] = generate([data.Problem(0, "a", "a1", "t")], step=0)
        return group, generate.take_errors()


class Flaky:
    """Fails so often on a completion, then gives it half a point."""

    def __init__(self, fails, error=TimeoutError):
        self.fails, self.error, self.asked, self.lock = dict(fails), error, [], threading.Lock()

    def __call__(self, completion, answer, prompt):
        with self.lock:
            self.asked.append(completion)
            self.fails[completion] = self.fails.get(completion, 0) - 1
            if self.fails[completion] >= 0:
                raise self.error("busy")
        return 0.5


def test_a_failed_verdict_is_asked_for_once_more_at_the_end():
    flaky = Flaky({"a1": 1})
    group, errors = generated(flaky)
    assert sorted(flaky.asked[:3]) == ["a0", "a1", "a2"] and flaky.asked[3:] == ["a1"]
    assert group.rewards.tolist() == [0.5, 1.5, 0.5] and group.accuracy.tolist() == [0, 1, 0]
    assert errors == {"timeout": 1} and group.failed == [None] * 3 and group.counted.all() and group.informative


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TimeoutError, "timeout"), (ConnectionError, "unreachable"), (OSError, "unreachable"), (MemoryError, "memory")],
)
def test_a_completion_whose_verdict_failed_twice_is_not_counted_whichever_part_it_is_of(error, kind):
    group, errors = generated(Flaky({"a1": 2, "a2": 1}, error))
    assert group.failed == [None, kind, None] and errors == {kind: 3}
    assert group.failures == [None] * 3, "of the part that decides accuracy"
    assert group.counted.tolist() == [True, False, True] and not group.informative


@pytest.mark.parametrize("error", [ValueError, KeyError, RecursionError])
def test_an_exception_that_the_completion_brought_about_is_a_wrong_answer(error):
    flaky = Flaky({"a1": 9}, error)
    group, errors = generated(flaky)
    assert group.rewards.tolist() == [0.5, 1.0, 0.5] and group.counted.all() and errors == {"error": 1}
    assert len(flaky.asked) == 3, "nor is it asked for again"


def test_a_conversation_that_failed_is_not_counted_and_its_verdict_not_asked_for_again():
    turns = [Turns(np.zeros(3, bool), np.float32([0]), error) for error in (None, "crash", "error")]
    flaky = Flaky({"a1": 1})
    group, _ = generated(flaky, turns=turns)
    assert group.failed == [None, "crash", None] and len(flaky.asked) == 3
