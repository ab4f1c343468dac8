"""A run folder that somebody else wrote is looked at, and nothing of it is executed, asked or written through."""

import json
import os
import shutil
from pathlib import Path

import pytest

from configs import tiny
from rpg_jax import Policy, evaluate, export, sample
from rpg_jax.rewards.verifiers import VERIFIERS
from rpg_jax.runs import evaluation, run_folder
from rpg_jax.storage import write_atomically
from rpg_jax.storage.leases import _File
from tests import test_export

run = test_export.run
CODE = {
    "task.name": {"task.name": "planted:Task"},
    "environment.name": {"environment.name": "planted:Environment", "environment.in_process": True},
    "environment.options": {"environment.name": "tools", "environment.options": '{"tools": {"planted:tool": {}}}'},
    "rewards.parts": {"rewards.parts": "exact,planted:reward"},
    "rewards.accuracy": {"rewards.accuracy": "planted:reward"},
    "judge.url": {"rewards.parts": "judge", "rewards.right_above": 0.5, "judge.url": "http://evil.example/v1"},
}


@pytest.fixture
def strange(run, tmp_path, monkeypatch):
    """Makes a run folder with other values of some fields; the module `planted` leaves a file if it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted.py").write_text("open('imported', 'w')\n")

    def make(**fields):
        folder = Path(shutil.copytree(run[0], tmp_path / "strange"))
        config = json.loads((folder / "config.json").read_text())
        for name, value in fields.items():
            section, field = name.split(".")
            config[section][field] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.mark.parametrize("field", CODE)
def test_code_and_judges_of_a_runs_config_wait_for_trust(strange, capsys, field):
    folder = strange(**CODE[field])
    assert evaluate.main([f"--run={folder}", "--k=1"]) == 2
    error = capsys.readouterr().err
    assert f"({field})" in error or field == "rewards.accuracy" and "(rewards.parts)" in error
    assert "add --trust" in error and error.count("\n") == 1 and ("planted" in error or "evil.example" in error)
    assert sample.main([f"--run={folder}", "--chat"]) == 2 or "environment" not in field
    assert not Path("imported").exists()


@pytest.mark.parametrize("field", CODE)
def test_a_policy_is_read_without_the_code_that_its_config_names(strange, tmp_path, field):
    folder = strange(**CODE[field])
    assert export.main([f"--run={folder}", f"--out={tmp_path / 'out'}"]) == 0
    assert not Path("imported").exists()


def test_code_that_is_trusted_is_imported(strange, capsys):
    folder = strange(**CODE["task.name"])
    assert evaluate.main([f"--run={folder}", "--k=1", "--trust"]) == 2
    assert "no function or class 'Task'" in capsys.readouterr().err and Path("imported").exists()


def test_compiled_programs_come_from_the_users_cache_alone(strange, tmp_path, monkeypatch):
    folder, asked = strange(**{"run.compilation_cache": str(tmp_path / "theirs")}), []
    monkeypatch.setattr(run_folder, "use_compilation_cache", lambda *given: asked.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.main([f"--run={folder}", "--k=1"])
    assert asked == [()]


def test_a_run_never_says_for_itself_that_its_changes_are_accepted(strange):
    folder = strange(**{"run.accept_changes": True})
    inputs = json.loads((folder / "inputs.json").read_text()) if (folder / "inputs.json").exists() else {}
    (folder / "inputs.json").write_text(json.dumps(inputs | {"model.tokenizer": "another"}))
    with pytest.raises(ValueError, match=r"^model\.tokenizer has changed since this run began"):
        Policy.from_run(folder)


def test_a_tokenizer_is_not_trained_into_the_folder(strange, tmp_path):
    folder = strange()
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.model").symlink_to(tmp_path / "authorized_keys")
    with pytest.raises(ValueError, match=r"has no tokenizer\.model: copy the run again"):
        Policy.from_run(folder)
    assert not (tmp_path / "authorized_keys").exists()


@pytest.mark.parametrize("link", ["evaluations", "evaluations/s-1", "evaluations/s-1/completions.jsonl"])
def test_an_evaluation_writes_through_no_link(tmp_path, link):
    (victim := tmp_path / "victim").mkdir()
    (victim / "kept").write_text("kept")
    place = tmp_path / "run" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(victim / "kept" if link.endswith("jsonl") else victim)
    stem = tmp_path / "run" / "evaluations" / "s"
    out = str(stem.with_name("s-1"))
    if link != "evaluations/s-1":  # by --out, a link is the user's
        with pytest.raises(ValueError, match=r"is a link, and nothing is written through it: remove it"):
            evaluation.open_folder(out if link.endswith("jsonl") else None, stem, {"a": 1})
    assert [p.name for p in victim.iterdir()] == ["kept"] and (victim / "kept").read_text() == "kept"


def test_the_lock_of_a_lease_and_a_file_in_the_making_follow_no_link(tmp_path):
    (victim := tmp_path / "victim").write_text("kept")
    (tmp_path / ".owners").mkdir()
    (tmp_path / ".owners" / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        _File(tmp_path / ".owners" / "r.json").swap(b"{}", None)
    (tmp_path / f".scores.md.{os.getpid()}.partial").symlink_to(victim)
    (tmp_path / "scores.md").symlink_to(victim)
    write_atomically(tmp_path / "scores.md", "new")
    assert victim.read_text() == "kept" and (tmp_path / "scores.md").read_text() == "new"
    assert not (tmp_path / "scores.md").is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_device_a_pipe_and_a_folder_are_not_replaced(tmp_path, kind):
    path = tmp_path / kind
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/full", p)}[kind](path)
    with pytest.raises(ValueError, match="is no file, and is not replaced"):
        write_atomically(path, "new")
    assert path.exists() and not path.is_file() and [p.name for p in tmp_path.iterdir()] == [kind]


def keyed(**fields):
    """The key of an evaluation of the tiny config with other values of some fields."""
    config = tiny.get_config()
    config.rewards.parts, config.rewards.right_above, config.judge.url = "judge", 0.5, "http://localhost/v1"
    config.update_from_flattened_dict(fields)
    tokenizer = type("Tokenizer", (), {"digest": lambda self: "0"})()
    task = type("Task", (), {"held_out": {}})
    experiment = type("Experiment", (), {"config": config, "task": task, "tokenizer": tokenizer})
    return json.dumps(evaluation.settings_of(Policy(experiment, None, 0), "p", None, "w"))


OTHER = {"judge.kind": "score", "rewards.format": "think", "rewards.parts": "judge,exact", "rewards.accuracy": "judge"}
OTHER |= {"rewards.overlong_shaping": True, "judge.url": "http://other/v1"}


@pytest.mark.parametrize(
    "field", [f"{s}.{n}" for s in ("rewards", "judge") for n in tiny.get_config()[s]] + ["model.compute_dtype"]
)
def test_every_field_of_the_verdicts_is_in_the_key_of_an_evaluation(field):
    value = tiny.get_config()
    for part in field.split("."):
        value = value[part]
    others = {bool: not value, int: 77, float: 0.77, str: "other", type(None): 1}
    other = OTHER.get(field, "float16" if field.startswith("model") else others[type(value)])
    assert keyed(**{field: other}) != keyed()


@pytest.mark.parametrize("verifier", [*VERIFIERS, "by_source", "planted:reward"])
def test_the_code_of_a_verifier_is_in_the_key_of_an_evaluation(strange, monkeypatch, verifier):
    fields = {"rewards.parts": f"{verifier},exact", "environment.name": None}
    before = keyed(**fields)
    assert before == keyed(**fields)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"\n# edited" * (self.suffix == ".py"))
    assert keyed(**fields) != before and not Path("imported").exists()
