"""A resume finds the problems, the tokenizer and the model that the run began with, or says which has changed."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import pytest

from configs import tiny
from rpg_jax import data
from rpg_jax.models import DecoderConfig, Rope
from rpg_jax.rewards.callables import source_digests
from rpg_jax.runs.inputs import check_inputs, model_digest, problems_digest
from rpg_jax.runs.problems import Task

PROBLEMS = [data.Problem(i, f"{i}+1=", str(i + 1), "t") for i in range(4)]
MODEL = DecoderConfig(32, 1, 8, 2, 1, 4, 16)


@pytest.fixture
def experiment(tmp_path):
    tokenizer = data.train_sentencepiece([p.prompt + p.answer for p in PROBLEMS], tmp_path / "tokenizer.model")
    task = Task(PROBLEMS[:3], {"hard": PROBLEMS[3:]}, ())
    config = tiny.get_config()
    config.task.name = "files"
    return SimpleNamespace(
        tokenizer=tokenizer, task=task, config=config, layout=SimpleNamespace(model=MODEL), handed={}
    )


def changed(problems, **values):
    return [*problems[:-1], dataclasses.replace(problems[-1], **values)]


CHANGES = {
    "answer": lambda task: {"train": changed(task.train, answer="0")},
    "prompt": lambda task: {"train": changed(task.train, prompt="?")},
    "verifier": lambda task: {"train": changed(task.train, source="gsm8k")},
    "order": lambda task: {"train": task.train[::-1]},
    "fewer": lambda task: {"train": task.train[:-1]},
    "held out": lambda task: {"held_out": {"hard": changed(task.held_out["hard"], answer="0")}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_named(experiment, tmp_path, change):
    check_inputs(experiment, tmp_path, begins=True)
    check_inputs(experiment, tmp_path, begins=False)
    experiment.task = dataclasses.replace(experiment.task, **CHANGES[change](experiment.task))
    name = "task.held_out_sets: hard" if change == "held out" else "task.train"
    with pytest.raises(ValueError, match=f"^{name} has changed since this run began: "):
        check_inputs(experiment, tmp_path, begins=False)
    check_inputs(experiment, tmp_path, begins=True)  # without a step, the run begins with the new data


def test_a_student_needs_its_teacher_to_train_and_not_to_be_sampled(experiment, tmp_path):
    experiment.config.reference.path = str(tmp_path)  # the teacher
    (tmp_path / "model.safetensors").write_bytes(b"1")
    check_inputs(experiment, tmp_path, begins=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^reference\.path \(weights\) has changed since this run began"):
        check_inputs(experiment, tmp_path, begins=False)
    experiment.task = dataclasses.replace(experiment.task, train=[], held_out={})
    check_inputs(experiment, tmp_path, begins=False)


def test_two_swapped_pieces_of_the_tokenizer_are_noticed(experiment, tmp_path):
    check_inputs(experiment, tmp_path, begins=True)
    file = tmp_path / "tokenizer.model"
    content = file.read_bytes()
    one, two = (b"\n\x01" + digit for digit in (b"1", b"2"))  # the field `piece` of a message, its length, its text
    assert content.count(one) == content.count(two) == 1
    swapped = bytearray(content)
    for source, target in ((one, two), (two, one)):
        place = content.index(source)
        swapped[place : place + 3] = target
    file.write_bytes(swapped)
    experiment.tokenizer = data.load_tokenizer(file)
    assert experiment.tokenizer.decode(experiment.tokenizer.encode("1+2")) == "1+2", "it works, with other numbers"
    with pytest.raises(ValueError, match=r"^model\.tokenizer has changed"):
        check_inputs(experiment, tmp_path, begins=False)


def test_another_model_is_noticed_and_what_is_not_loaded_is_not_compared(experiment, tmp_path):
    check_inputs(experiment, tmp_path, begins=True)
    experiment.task = dataclasses.replace(experiment.task, train=[], held_out={})
    check_inputs(experiment, tmp_path, begins=False)
    experiment.layout.model = dataclasses.replace(MODEL, rope=Rope(1e4))
    with pytest.raises(ValueError, match=r"^model\.path has changed"):
        check_inputs(experiment, tmp_path, begins=False)


def test_the_digest_is_of_the_content_and_the_file_is_named_if_it_is_damaged(experiment, tmp_path):
    check_inputs(experiment, tmp_path, begins=True)
    digests = json.loads((tmp_path / "inputs.json").read_text(encoding="utf-8"))
    again = data.train_sentencepiece([p.prompt + p.answer for p in PROBLEMS], tmp_path / "elsewhere" / "t.model")
    assert again.digest() == digests["model.tokenizer"] and len(set(digests.values())) == len(digests)
    (tmp_path / "inputs.json").write_text('{"task', encoding="utf-8")
    with pytest.raises(ValueError, match=r"inputs\.json is damaged"):
        check_inputs(experiment, tmp_path, begins=False)


def test_an_environments_messages_count():
    problem = data.Problem(0, "1+1=", "2", "t")
    messages = ({"role": "user", "content": "1+1=?"},)
    assert problems_digest([problem]) != problems_digest([dataclasses.replace(problem, messages=messages)])


CODE = {
    "loss.name": "mine_of_inputs:f",
    "loss.advantage": "mine_of_inputs:f",
    "rewards.parts": "exact:1,mine_of_inputs:f:0.5",
    "environment.name": "mine_of_inputs:f",
    "task.name": "mine_of_inputs:f",
}


@pytest.mark.parametrize("field", CODE)
def test_changed_code_stops_a_resume_until_it_is_accepted(experiment, tmp_path, monkeypatch, capsys, field):
    monkeypatch.syspath_prepend(str(tmp_path))
    (module := tmp_path / "mine_of_inputs.py").write_text(
        "helper = 1\nraise SystemExit('imported')\n", encoding="utf-8"
    )
    experiment.config.update_from_flattened_dict({field: CODE[field]})
    check_inputs(experiment, tmp_path, begins=True)
    check_inputs(experiment, tmp_path, begins=False)
    module.write_text("helper = 2\n", encoding="utf-8")
    name = rf"{field} \(mine_of_inputs:f\)"
    with pytest.raises(ValueError, match=rf"^{name} has changed .* go on .* by --config.run.accept_changes=True$"):
        check_inputs(experiment, tmp_path, begins=False)
    experiment.config.run.accept_changes = True
    check_inputs(experiment, tmp_path, begins=False)
    assert "has changed since this run began, and the run goes on" in capsys.readouterr().out
    experiment.config.run.accept_changes = False
    check_inputs(experiment, tmp_path, begins=False)  # the new code counts now
    module.write_text("helper = 3\n", encoding="utf-8")
    experiment.task = dataclasses.replace(experiment.task, train=[])
    check_inputs(experiment, tmp_path, begins=False)  # a policy that is only read


def test_of_an_object_that_a_program_hands_over_the_text_counts(experiment, tmp_path):
    def right(completion, answer, prompt):
        return 1.0

    def wrong(completion, answer, prompt):
        return 0.0

    experiment.config.rewards.parts, experiment.handed = "mine:f", {"mine:f": right}
    check_inputs(experiment, tmp_path, begins=True)
    check_inputs(experiment, tmp_path, begins=False)
    experiment.handed = {"mine:f": functools.partial(wrong)}
    with pytest.raises(ValueError, match=r"^rewards.parts \(mine:f\) has changed"):
        check_inputs(experiment, tmp_path, begins=False)
    assert source_digests("mine:f", len) == source_digests("no.such_module:f") == source_digests("rpg_jax.no:f") == {}


def test_a_helper_that_a_reward_imports_stops_a_resume_when_somebody_edits_it(experiment, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_with_help.py").write_text("import json\n\nimport numpy\n\nimport my_help.numbers\n", "utf-8")
    (package := tmp_path / "my_help").mkdir()
    (package / "__init__.py").touch()
    (package / "numbers.py").write_text("def f():\n    from . import deep\n    raise SystemExit('run')\n", "utf-8")
    (package / "deep.py").write_text("import mine_with_help\n", "utf-8")
    (package / "unused.py").touch()
    experiment.config.rewards.parts = "mine_with_help:f"
    known = source_digests("mine_with_help:f")
    names = {"my_help", "my_help.numbers", "my_help.deep"}
    assert known.keys() == {"mine_with_help:f"} | {f"mine_with_help:f imports {name}" for name in names}
    check_inputs(experiment, tmp_path, begins=True)
    check_inputs(experiment, tmp_path, begins=False)
    (package / "deep.py").write_text("import mine_with_help  # edited\n", "utf-8")
    named = r"^rewards.parts \(mine_with_help:f imports my_help.deep\) has changed since this run began"
    with pytest.raises(ValueError, match=named):
        check_inputs(experiment, tmp_path, begins=False)


def test_installed_packages_below_the_present_folder_are_no_code_of_the_users_own(tmp_path, monkeypatch):
    (installed := tmp_path / ".venv" / "lib" / "site-packages").mkdir(parents=True)
    (installed / "a_package_of_others.py").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "mine_alone.py").write_text("import a_package_of_others, beside_the_run, no_such_module\n", "utf-8")
    (tmp_path / "beside_the_run.py").write_text("this is no Python", "utf-8")
    for folder in (installed, elsewhere, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    assert source_digests("mine_alone:f").keys() == {"mine_alone:f"}
    monkeypatch.chdir(tmp_path)
    assert source_digests("mine_alone:f").keys() == {"mine_alone:f", "mine_alone:f imports beside_the_run"}


@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ({}, "1635af315b0fc780d8775ce85118efbcb419782d3c99fd22f39afa18afd60783"),
        ({"qkv_bias": True, "qk_norm": False}, "b6af11da2b34b6600f5aee3ad16b488ca551c6276b54bb5e9fad441ddf015059"),
    ],
)
def test_the_digest_of_a_model_is_that_of_runs_of_before_the_decoder_had_its_name(family, digest):
    model = DecoderConfig(14, 4, 128, 4, 2, 32, 384, rope=Rope(1e4), **family)
    assert model_digest(model) == digest  # of the program at 20b0e0a
