"""Warm starts are shared by every run that would train the same one."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.runs.experiment import init_params, make_scorer, open_experiment
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.warm_start import cache_key, supervised_batches, warm_started, with_own_limit
from tests.end_to_end import micro


def config_of(limit, own, folder=""):
    config = micro.get_config()
    config.rollout.max_tokens, config.warm_start.max_tokens, config.warm_start.dir = limit, own, str(folder)
    return resolve(config)


def key(limit, own):
    return cache_key(with_own_limit(config_of(limit, own)), {})


def test_the_name_has_the_limit_of_the_warm_start_and_not_that_of_the_run():
    assert key(4, 6) == key(5, 6) == key(6, None) == key(6, 6) != key(5, None)


def test_the_name_has_the_content_of_what_is_read_and_not_its_place():
    names = set()
    for place in ("a", "b"):
        config = config_of(6, None)
        config.task.train, config.task.held_out_sets, config.model.tokenizer = f"{place}/x", f"h={place}/y", place
        names |= {cache_key(config, {"task.train": content}) for content in ("1", "2")}
    assert len(names) == 2


def test_a_task_without_demonstrations_is_named():
    experiment = SimpleNamespace(task=SimpleNamespace(examples=None), config=config_of(6, None))
    with pytest.raises(ValueError, match=r"^warm_start\.enabled: task\.name='arithmetic' has no demonstrations$"):
        warm_started(experiment, None, None, None, None)


def test_packed_demonstrations_share_rows_and_none_is_lost_or_repeated():
    config = micro.get_config()
    config.warm_start.batch_size = 2
    config.train.packed_length = 16
    problems = [Problem(i, f"{i:03d}:", str(i % 10), "test") for i in range(32)]  # 4 + 2 tokens: two to a row

    def demonstrations(found):
        return [(problem.prompt, problem.answer) for problem in found]

    experiment = SimpleNamespace(
        config=config,
        tokenizer=SimpleNamespace(encode=lambda text: [ord(c) for c in text], eos_id=1, pad_id=0),
        task=SimpleNamespace(train=problems, examples=demonstrations),
        layout=SimpleNamespace(row_sharding=None),
    )
    batches = [batch.rows for batch in itertools.islice(supervised_batches(experiment), 8)]
    texts = ["".join(chr(t) for t in row if t) for rows in batches for row in rows.tokens]
    assert {len(text) for text in texts} == {12}
    found = [text[:5] for row in texts for text in row.split(chr(1)) if text]
    assert sorted(found) == ["".join(pair) for pair in demonstrations(problems)]
    assert all((rows.targets[rows.mask > 0] != 0).all() and rows.mask.sum() == 8 for rows in batches)
    packed = resolve(config)
    packed.train.packed_length = 17
    assert cache_key(packed, {}) != cache_key(resolve(config), {})


@pytest.mark.slow  # a model is compiled
def test_runs_of_two_limits_start_from_the_same_weights(tmp_path, capsys):
    found = []
    for limit in (3, 6):
        experiment = open_experiment(config_of(limit, 6, tmp_path / "warm"), tmp_path)
        with experiment.layout.activate(), make_scorer(experiment.config) as scorer:
            params = init_params(experiment.layout)
            found.append(warm_started(experiment, params, None, scorer, tmp_path))  # neither needs the run's rollout
    assert capsys.readouterr().out.startswith("warm start from ")
    assert len(list((tmp_path / "warm").iterdir())) == 1
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
