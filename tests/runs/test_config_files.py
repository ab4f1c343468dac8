"""Config files are found by name; every field has a type, every number a range, and a value outside it is refused."""

import math
import re
import typing

import pytest

from configs import base, tiny
from rpg_jax import losses
from rpg_jax.losses.declaration import Range
from rpg_jax.runs import config_files
from rpg_jax.runs.resolve import resolve, with_method


@pytest.mark.parametrize("name", ["configs/small.py", "small.py", "small"])
def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert config_files.load(name).config.model.num_layers == 3
    (tmp_path / "small.py").write_text(
        "from configs import tiny\ndef get_config():\n    return tiny.get_config()\n", encoding="utf-8"
    )
    assert config_files.load(name).config.model.num_layers == (4 if name == "small.py" else 3), "one's own comes first"


def test_a_field_shows_its_default_as_the_command_line_takes_it_and_what_it_takes():
    field = config_files.Field
    shown = [1e-6, 0.05, "a", "", True, config_files.optional(int), config_files.from_method(float)]
    assert [field(value, "").initial for value in shown] == [
        *("1e-6", "0.05", '"a"', '""', "True"),
        *("unset (int)", "method (float)"),
    ]
    taken = [field(1, ""), field(1, "", range="[1, 9)"), field("", "", choices=("a", "b"))]
    assert [f.values for f in taken] == ["", "In [1, 9).", "One of a, b."]
    assert field("", "", choices="rpg_jax.losses:AGGREGATES").values.startswith("One of token_mean, ")


def test_a_config_has_the_declared_types_and_is_made_anew_each_time():
    section = config_files.Section(
        "",
        a=config_files.Field(1, ""),
        b=config_files.Section("", c=config_files.Field(config_files.optional(str), "")),
    )
    first, second = section.make_config(), section.make_config()
    first.a, first.b.c = 2, "x"
    assert (second.a, second.b.c, second.b.get_type("c")) == (1, None, str)
    assert [name for name, _ in section.fields()] == ["a", "b.c"]


NUMBERS = {name: field for name, field in config_files.fields().items() if field.kind in (int, float)}


def ends(field):
    return [float(end) for end in field.range[1:-1].split(",")]


def test_every_number_has_a_range_and_every_default_is_in_it():
    assert not [name for name, field in NUMBERS.items() if not field.range]
    for name, field in config_files.fields().items():
        if not isinstance(field.default, config_files.Unset) and name != "rewards.format":
            field.check(name, field.default)


def step(value, sign):
    """The next number of its type in this direction."""
    return value + sign if isinstance(value, int) else math.nextafter(value, sign * math.inf)


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range(name):
    field, kind = NUMBERS[name], NUMBERS[name].kind
    low, high = ends(field)
    taken, refused = [], [math.nan]
    for end, bracket, away in ((low, field.range[0], -1), (high, field.range[-1], 1)):
        if math.isinf(end):
            (taken if bracket in "[]" else refused).append(end)
            continue
        end = kind(end)
        beyond, within = (step(end, sign * away) for sign in (1, -1))
        (taken if bracket in "[]" else refused).append(end)
        taken.append(within)
        refused += [beyond, away * math.inf, away * 10**400]
    for value in taken:
        field.check(name, value)
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name}=.* must be in "):
            field.check(name, value)


VALUES = {
    **{"train.steps": -1, "optimizer.b1": 1.5, "optimizer.eps": -1.0, "model.rope_theta": 0.0, "rewards.workers": -2},
    **{"optimizer.learning_rate": 1e30, "rollout.temperature": math.nan, "rollout.max_tokens": 10**8},
    **{"rewards.deadline_seconds": 0.0, "critic.gamma": math.inf, "checkpoint.keep": 0, "seed": -1},
}


@pytest.mark.parametrize("name", VALUES)
def test_what_resolves_is_checked(name):
    config = tiny.get_config()
    config.update_from_flattened_dict({name: VALUES[name]})
    with pytest.raises(ValueError, match=f"^{name}=.* must be in "):
        resolve(config)


def test_the_ranges_of_the_losses_are_those_of_the_fields():
    declared = [loss.hyperparameters for loss in losses.LOSSES.values()]
    for name, hint in ((name, hint) for hyperparameters in declared for name, hint in hyperparameters.items()):
        allowed = typing.get_args(hint)[-1]
        if isinstance(allowed, Range) and f"loss.{name}" in NUMBERS:
            assert NUMBERS[f"loss.{name}"].range == allowed.text, name


def test_a_change_leaves_the_config_as_it_was_with_its_unset_fields_too():
    before = config_files.load("tiny").config
    first = config_files.changed(before, {"run.name": "a", "seed": 1})
    second = config_files.changed(first, {"run.name": "b"})
    assert (before.run.name, first.run.name, second.run.name) == (None, "a", "b")
    assert (before.seed, first.seed, second.seed) == (0, 1, 1)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return {}['learning']", "mine.py: no 'learning'"),
        ("c.train.step = 2; return c", "mine.py: no field 'step'; did you mean train.steps?"),
        ("c.optimiser = 2; return c", "mine.py: no field 'optimiser'; did you mean optimizer."),
        ("return {'seed': 3}", r"mine.py: 'dict' is what get_config\(\) returned, and no config"),
        ("c.seed = 3", r"mine.py: 'NoneType' is what get_config\(\) returned, and no config"),
        ("import configs.tinny", "mine.py: No module named 'configs.tinny'$"),
        ("return c)", r"mine.py: unmatched '\)' \(mine.py, line 4\)"),
    ],
)
def test_what_is_wrong_in_a_config_file_is_named_with_the_file(tmp_path, body, named):
    head = "from configs import base\ndef get_config():\n    c = base.get_config()\n"
    (tmp_path / "mine.py").write_text(f"{head}    {body}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        config_files.load(str(tmp_path / "mine.py"))


def test_a_file_without_a_config_is_refused_although_another_one_was_read_before(tmp_path):
    config_files.load("tiny")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n', encoding="utf-8")  # an expression of Python too
    with pytest.raises(ValueError, match="rows.jsonl: it is no config file: it has no attribute 'get_config'"):
        config_files.load(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["task.links=2-3"], "task.links=2-3 has no effect here: only a run with task.name=chains reads it"),
        (
            ["reference.every=3 updates", "reference.rule=behaviour"],
            "reference.every=3 updates .* reference.rule=every",
        ),
        (["reference.kl_threshold=0.5"], r"reference.kl_threshold=0.5 .* only a run with reference.rule=kl reads it"),
        (["method=PPO", "judge.scale=5"], r"judge.scale=5.0 .*rewards.parts=judge or rewards.accuracy=judge reads it"),
        (
            ["optimizer.name=sgd", "optimizer.b2=0.9"],
            r"optimizer.b2=0.9 .* optimizer.name=adam\|lion\|rmsprop reads it",
        ),
        (["model.path=folder", "model.rope_theta=1e4"], "model.rope_theta=10000.0 .* model.path=None reads it"),
        (["environment.max_turns=3"], "environment.max_turns=3 .* environment.name=… or task.name=: reads it"),
        (["method=PPO", "critic.gamma=0.5", "loss.advantage=gae"], None),
        (["rewards.parts=exact:1,format:0.1", "rewards.format=boxed"], None),
        (["rewards.parts=judge", "judge.batch=3"], "judge.batch=3 .* only a run with judge.kind=score reads it"),
        (["reference.path=gs://bucket/teacher", "servers.parallel=3"], "servers.parallel=3 .*reference.path=http re"),
        (["reference.path=http://host:1", "servers.weights=f"], "servers.weights=f .* rollout.driver=servers reads it"),
        (["reference.path=http://host:1", "servers.parallel=3"], None),
        (["task.name=examples.guessing:Problems", "environment.max_turns=2"], None),  # its demonstrations have turns
        (["task.name=chains", "task.links=2-3", "reference.rule=every", "reference.every=3 updates"], None),
        (["model.rope_theta=1e4", "warm_start.seed=3", "rewards.parts=exact:1,judge:0.5", "judge.scale=5"], None),
    ],
)
def test_a_field_that_the_run_does_not_read_is_named(overrides, named):
    loaded = config_files.load("tiny", [f"--config.{override}" for override in overrides])
    lines = list(config_files.unread(with_method(loaded.config), loaded.overrides))
    assert (len(lines) == 1 and re.match(named, lines[0])) if named else not lines


def test_what_reads_a_field_is_a_value_of_another_field():
    known = config_files.fields()
    for field, needed in base.READ_WITH.items():
        for other, words in needed.items():
            assert {field, other} <= known.keys()
            names = [*known[other].names] if other != "rewards.parts" else []
            assert not names or all(any(word in name for name in names) for word in words.split("|"))
