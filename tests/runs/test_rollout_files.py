"""What the rollout browser will show: written at the right steps, true to the update, without a trace in the run."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data, losses
from rpg_jax.data.groups import Group
from rpg_jax.runs import rollout_files
from rpg_jax.runs.rollout_files import CLIP_STATES, COLUMNS, RolloutFiles, token_numbers
from rpg_jax.types import Batch, Completion, Rows, Turns

LETTERS = "·abcdefghijklmnop"


class Letters:
    """Ids 1 … 15 are letters, 16 ends a text; 15 and 14 are the halves of one character."""

    def decode(self, ids):
        text = "".join(LETTERS[i] if i < 14 else f"<{i}>" for i in ids if i != 16)
        return text.replace("<15><14>", "é").replace("<15>", "\ufffd").replace("<14>", "\ufffd")

    def name(self, token):
        return f"<|{token}|>"


class State:
    params, updates = None, 6


def make_group(number, completions, **more):
    made = [
        Completion(np.array(tokens, np.int32), np.full(len(tokens), -1.0, np.float32), reason, 4)
        for tokens, reason in completions
    ]
    accuracy = np.array([i % 2 for i in range(len(made))], np.float32)
    problem = data.Problem(number, f"p{number}", "a", "t")
    return Group(problem, np.array([3], np.int32), made, ["?"] * len(made), accuracy, accuracy, **more)


GROUPS = [
    make_group(0, [([1, 2, 16], "stop"), ([3] * 5, "length")]),
    make_group(1, [([15, 14, 16], "stop"), ([4], "length")], failures=["timeout", None]),
    make_group(2, [([5, 6], "length"), ([7, 16], "stop")]),
]


def files(folder, *, groups=3, seen=None, **hyperparameters):
    """Log-probs after the update are −0.5 for even tokens and −1.5 for odd ones; entropy is a tenth of the token."""

    def logprobs(params, rows):
        if seen is not None:
            seen.append(rows)
        return jnp.where(rows.targets % 2 == 0, -0.5, -1.5), rows.targets / 10

    numbers = token_numbers("ppo", clip_high=0.28, **hyperparameters)
    return RolloutFiles(folder, Letters(), logprobs, numbers, 3, groups)


def rollout_batch():
    """Two mini-batches, advantages 1 and −1 in each group, behaviour log-probs of −1 and reference log-probs of −2."""
    made = data.pack(GROUPS, data.RowShape(1, 9, 9, packed=True), minibatches=2)
    ones = [jnp.ones_like(batch.mask) for batch in made.batches]
    advantages = [jnp.asarray(x) for x in made.scatter([[1, -1]] * 3)]
    return made.add(advantages=advantages, behaviour_logprobs=[-x for x in ones], ref_logprobs=[-2 * x for x in ones])


def read(folder, step):
    with np.load(folder / f"rollouts/{step:06d}.npz", allow_pickle=False) as arrays:
        arrays = dict(arrays)
    text = json.loads(arrays["text"].tobytes())
    return text, arrays, {name: arrays["tokens"][:, i] for i, name in enumerate(text["columns"])}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in filter(files(folder).is_due, range(1, 8)):
        files(folder).after_updates(step, rollout_batch(), State())
    return folder


def test_the_first_step_and_every_third_leave_a_file(written):
    assert sorted(path.name for path in (written / "rollouts").iterdir()) == [f"{s:06d}.npz" for s in (1, 3, 6)]


def test_every_token_has_its_own_numbers_whatever_the_rows_were(written):
    text, arrays, column = read(written, 3)
    assert (text["step"], text["weights"], tuple(text["columns"])) == (3, 6, COLUMNS)
    assert [g["prompt_id"] for g in text["groups"]] == [0, 2, 1], "by mini-batch"
    tokens = np.array([1, 2, 16, *[3] * 5, 5, 6, 7, 16, 15, 14, 16, 4])
    assert arrays["lengths"].tolist() == [3, 5, 2, 2, 3, 1] and arrays["group_sizes"].tolist() == [2, 2, 2]
    np.testing.assert_allclose(column["entropy"], tokens / 10, rtol=1e-6)  # f32
    np.testing.assert_array_equal(column["logprobs"], np.where(tokens % 2 == 0, -0.5, -1.5))
    np.testing.assert_array_equal(column["advantages"], [1] * 3 + [-1] * 5 + [1] * 2 + [-1] * 2 + [1] * 3 + [-1])
    assert set(column["behaviour_logprobs"]) == {-1.0} == set(column["sampler_logprobs"])
    assert set(column["ref_logprobs"]) == {-2.0} and set(arrays["weight_versions"]) == {4}
    log_y = -2 - column["logprobs"]
    np.testing.assert_allclose(column["kl"], np.exp(log_y) - 1 - log_y, rtol=1e-5)  # f32


def test_the_clip_state_is_the_losses_own(written):
    """w is e^0.5 for even tokens and e^-0.5 for odd ones: out of [0.8, 1.28] on the side that the advantage wants."""
    _, _, column = read(written, 3)
    gain, up = column["advantages"] > 0, column["logprobs"] > -1
    expected = np.where(gain & up, "high", np.where(~gain & ~up, "low", "free"))
    assert [CLIP_STATES[int(c)] for c in column["clip"]] == expected.tolist()
    assert {"high", "low", "free"} == set(expected)


def test_only_mini_batches_with_wanted_groups_are_passed_again(tmp_path):
    seen, batch = [], rollout_batch()
    files(tmp_path, groups=2, seen=seen).after_updates(1, batch, State())
    assert [id(rows) for rows in seen] == [id(b.rows) for b in batch.minibatches[0]]
    assert [g["prompt_id"] for g in read(tmp_path, 1)[0]["groups"]] == [0, 2]


def test_texts_are_whole_and_verdicts_named(written):
    text, arrays, _ = read(written, 3)
    end = "<|16|>"
    assert [text["pieces"][i] for i in arrays["pieces"]] == ["a", "b", end, *"cccccefg", end, "", "é", end, "d"]
    assert [text["pieces"][i] for i in text["specials"]] == [end]
    assert [c["verdict"] for c in text["completions"]] == ["wrong", "right", "wrong", "right", "timeout", "right"]
    assert [c["finish_reason"] for c in text["completions"]] == ["stop", "length", "length", "stop", "stop", "length"]
    assert text["groups"][2] == {"prompt_id": 1, "prompt": "p1", "answer": "a"}


def test_a_character_that_the_limit_cut_is_shown_as_such():
    group = make_group(0, [([1, 15], "length"), ([1, 15, 16], "stop")])
    numbers = [np.zeros((n, len(COLUMNS)), np.float32) for n in (2, 3)]
    content = rollout_files.encode(1, 0, [group], [numbers], Letters())
    with np.load(io.BytesIO(content)) as arrays:
        text, pieces = json.loads(arrays["text"].tobytes()), arrays["pieces"]
    assert [text["pieces"][i] for i in pieces] == ["a", "\ufffd", "a", "", "\ufffd"] and text["specials"] == []


def test_tokens_of_an_environment_say_so_and_have_no_numbers():
    group = make_group(0, [([1, 2, 3, 4], "length"), ([5, 6], "stop")])
    turns = Turns(np.array([False, True, False, False]), np.float32([0.5, 1]), "timeout")
    group.completions[0] = dataclasses.replace(group.completions[0], turns=turns)
    content = rollout_files.encode(
        1, 0, [group], [[np.zeros((n, len(COLUMNS)), np.float32) for n in (4, 2)]], Letters()
    )
    with np.load(io.BytesIO(content)) as arrays:
        told, tokens = json.loads(arrays["text"].tobytes())["completions"], arrays["tokens"]
    assert [c["turns"] for c in told] == [{"spans": [[1, 2]], "rewards": [0.5, 1], "error": "timeout"}, None]
    assert np.isnan(tokens[1, :-1]).all() and CLIP_STATES[int(tokens[1, -1])] == "observed"
    assert not np.isnan(np.delete(tokens, 1, 0)).any() and tokens.dtype == np.float32


def test_tokens_that_are_not_trained_say_so():
    batch = rollout_batch().batches[0]
    batch = batch.replace(rows=batch.rows.replace(mask=batch.mask * (batch.rows.targets != 3)))
    numbers = token_numbers("gspo")(batch.behaviour_logprobs + 1, batch.advantages, batch)
    assert set(np.asarray(numbers)[np.asarray(batch.rows.targets) == 3, -1]) == {CLIP_STATES.index("not trained")}


@pytest.mark.parametrize("name", losses.LOSSES)
def test_every_loss_has_clip_states(name):
    """Shapes only: nothing is computed."""
    one = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    rows = Rows(*[one] * 5, jax.ShapeDtypeStruct((2, 3), jnp.int32), one)
    columns = ("sampler_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages")
    batch = Batch(rows, **dict.fromkeys(columns, one))
    assert jax.eval_shape(token_numbers(name), one, one, batch).shape == (2, 3, len(COLUMNS))


def test_a_rewound_run_has_no_file_of_a_later_step(tmp_path):
    for step in (1, 3, 6):
        files(tmp_path).after_updates(step, rollout_batch(), State())
    three = os.fsdecode("٣".encode())  # a digit, but not in an ASCII locale
    for stray in ("notes.npz", "best-10.npz", f"{three}.npz"):
        (tmp_path / "rollouts" / stray).write_text("a person's own", encoding="utf-8")
    rollout_files.rewind(tmp_path, 3)
    kept = {path.stem for path in (tmp_path / "rollouts").iterdir()}
    assert kept == {"000001", "000003", "notes", "best-10", three}
    rollout_files.rewind(tmp_path / "none", 0)
