"""A run folder that somebody else wrote is looked at, and nothing of it is executed, asked or written through."""

import json
import os
import shutil
from pathlib import Path

import pytest

from configs import tiny
from rpg_jax import Policy, evaluate, export, sample
from rpg_jax.data import Problem, fingerprint
from rpg_jax.models.config import DecoderConfig
from rpg_jax.rewards.verifiers import VERIFIERS
from rpg_jax.runs import config_files, evaluation, run_folder
from rpg_jax.runs.inputs import problems_digest
from rpg_jax.runs.resolve import resolve
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
    (tmp_path / "planted.py").write_text("open('imported', 'w')\n", encoding="utf-8")

    def make(**fields):
        folder = Path(shutil.copytree(run[0], tmp_path / "strange"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for name, value in fields.items():
            section, field = name.split(".")
            config[section][field] = value
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("field", CODE)
def test_code_and_judges_of_a_runs_config_wait_for_trust(strange, capsys, field):
    folder = strange(**CODE[field])
    assert evaluate.main([f"--run={folder}", "--k=1"]) == 2
    error = capsys.readouterr().err
    assert f"({field})" in error or field == "rewards.accuracy" and "(rewards.parts)" in error
    assert "add --trust" in error and error.count("\n") == 1 and ("planted" in error or "evil.example" in error)
    assert ("--rewards=exact" in error) == field.startswith(("rewards", "judge")), "it helps against rewards alone"
    assert sample.main([f"--run={folder}", "--chat"]) == 2 or "environment" not in field
    assert not Path("imported").exists()


@pytest.mark.parametrize("tools", ["5", '["planted:tool"]', '"planted:tool"'])
def test_tools_in_another_form_are_named_and_not_imported(strange, capsys, tools):
    folder = strange(**{"environment.name": "tools", "environment.options": f'{{"tools": {tools}}}'})
    assert evaluate.main([f"--run={folder}", "--k=1", "--trust"]) == 2
    assert "environment.options: tools=" in capsys.readouterr().err and not Path("imported").exists()


@pytest.mark.parametrize("field", CODE)
def test_a_policy_is_read_without_the_code_that_its_config_names(strange, tmp_path, field):
    folder = strange(**CODE[field])
    assert export.main([f"--run={folder}", f"--out={tmp_path / 'out'}"]) == 0
    assert not Path("imported").exists()


def test_code_that_is_trusted_is_imported(strange, capsys):
    folder = strange(**CODE["task.name"])
    assert evaluate.main([f"--run={folder}", "--k=1", "--trust"]) == 2
    assert "no function or class 'Task'" in capsys.readouterr().err and Path("imported").exists()


def test_a_reward_of_the_command_line_needs_no_trust_and_code_of_the_folder_still_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completion, answer): return 1.0", encoding="utf-8")
    (folder := tmp_path / "strange").mkdir()

    def said(rewards="mine.py:score", **fields):
        config = config_files.changed(tiny.get_config(), {name.replace("__", "."): v for name, v in fields.items()})
        (folder / "config.json").write_text(json.dumps(run_folder.as_json(resolve(config))), encoding="utf-8")
        assert evaluate.main([f"--run={folder}", f"--rewards={rewards}"]) == 2
        return capsys.readouterr().err

    for fields in (
        {},
        {"rewards__parts": "planted:reward"},
        {"rewards__accuracy": "planted:reward"},
    ):  # what the command line replaces is not imported
        assert "has no tokenizer.model" in said(**fields), "the check after the one of trust"
        assert "has no tokenizer.model" in said("exact", **fields), "as the message of trust says"
    assert "imports 'planted:Task' (task.name): add --trust" in said(task__name="planted:Task")
    assert "evil.example" in said(rewards="judge", judge__url="http://evil.example/v1")


def test_compiled_programs_come_from_the_users_cache_alone(strange, tmp_path, monkeypatch):
    folder, asked = strange(**{"run.compilation_cache": str(tmp_path / "theirs")}), []
    monkeypatch.setattr(run_folder, "use_compilation_cache", lambda *given: asked.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.main([f"--run={folder}", "--k=1"])
    assert asked == [()]


def test_a_run_never_says_for_itself_that_its_changes_are_accepted(strange):
    folder = strange(**{"run.accept_changes": True})
    inputs = (
        json.loads((folder / "inputs.json").read_text(encoding="utf-8")) if (folder / "inputs.json").exists() else {}
    )
    (folder / "inputs.json").write_text(json.dumps(inputs | {"model.tokenizer": "another"}), encoding="utf-8")
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
    (victim / "kept").write_text("kept", encoding="utf-8")
    place = tmp_path / "run" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(victim / "kept" if link.endswith("jsonl") else victim)
    stem = tmp_path / "run" / "evaluations" / "s"
    out = str(stem.with_name("s-1"))
    if link != "evaluations/s-1":  # by --out, a link is the user's
        with pytest.raises(ValueError, match=r"is a link, and nothing is written through it: remove it"):
            evaluation.open_folder(out if link.endswith("jsonl") else None, stem, {"a": 1})
    assert [p.name for p in victim.iterdir()] == ["kept"] and (victim / "kept").read_text(encoding="utf-8") == "kept"


def test_an_evaluation_never_cuts_completions_of_something_else(tmp_path):
    (file := tmp_path / "completions.jsonl").write_text('{"mine": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"has a completions\.jsonl of something else"):
        evaluation.open_folder(str(tmp_path), tmp_path / "s", {"a": 1})
    assert [*tmp_path.iterdir()] == [file] and file.read_text(encoding="utf-8") == '{"mine": 1}\n'


def test_the_lock_of_a_lease_and_a_file_in_the_making_follow_no_link(tmp_path):
    (victim := tmp_path / "victim").write_text("kept", encoding="utf-8")
    (tmp_path / ".owners").mkdir()
    (tmp_path / ".owners" / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        _File(tmp_path / ".owners" / "r.json").swap(b"{}", None)
    (tmp_path / f".scores.md.{os.getpid()}.partial").symlink_to(victim)
    (tmp_path / "scores.md").symlink_to(victim)
    write_atomically(tmp_path / "scores.md", "new")
    assert (
        victim.read_text(encoding="utf-8") == "kept" and (tmp_path / "scores.md").read_text(encoding="utf-8") == "new"
    )
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
    layout = type("Layout", (), {"model": DecoderConfig(99, 2, 16, 2, 1, 8, 32)})
    experiment = type("Experiment", (), {"config": config, "task": task, "tokenizer": tokenizer, "layout": layout})
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


def test_completions_that_came_with_a_run_are_not_taken_for_an_evaluation(tmp_path, monkeypatch):
    """Whoever wrote the folder knows the settings, and would know where the results of this user will lie."""
    names = set()
    for user in ("theirs", "mine"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user))
        first, second = (evaluation.open_folder(None, tmp_path / user / "r" / "s", {"a": 1}) for _ in range(2))
        assert first == second, "a user's own evaluation continues"
        names.add(first.name)
        assert (tmp_path / user / "rpg_jax" / "secret").stat().st_mode & 0o077 == 0
    assert len(names) == 2


def test_the_verifier_that_a_rows_source_chooses_is_in_the_key_of_an_evaluation():
    key = {problems_digest([Problem(0, "1+1=", "2", source)]) for source in ("gsm8k", "math500")}
    assert len(key) == 2 and fingerprint([Problem(0, "1", "2", "a")]) == fingerprint([Problem(0, "1", "2", "b")])


@pytest.mark.parametrize("place", ["tokenizer.pipe", "checkpoints/3/state/pipe", "rollouts/zero"])
def test_a_pipe_or_a_device_in_the_folder_is_not_waited_for(strange, place):
    folder = strange()
    (folder / place).parent.mkdir(exist_ok=True, parents=True)
    os.symlink("/dev/zero", folder / place) if "zero" in place else os.mkfifo(folder / place)
    with pytest.raises(ValueError, match=r"is neither a file nor a folder: no run has one; remove it"):
        Policy.from_run(folder)


VALUES = {
    "rollout.slots": [10**12, "8", -1, 1.5, True, [1]],
    "rollout.max_tokens": [0, None, "16", 2**40, {}],
    "model.num_layers": ["3", 10**9, 0],
    "model.compute_dtype": [1, None, "pickle"],
    "train.steps": ["10", -5, 1e300],
    "optimizer.b1": ["x", 2.0, None],
    "task.thinking": ["yes", 1],
    "rewards.parts": [3, ["exact"]],
    "seed": ["0", 2**31, -1],
    "mesh.fsdp": ["all", 10**7],
}


@pytest.mark.parametrize("field", VALUES)
def test_a_value_that_no_run_has_written_is_refused_by_file_and_field(strange, field):
    folder = strange()
    whole = (folder / "config.json").read_text(encoding="utf-8")
    for value in VALUES[field]:
        config = json.loads(whole)
        section, name = field.rpartition(".")[::2]
        (config[section] if section else config)[name] = value
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ValueError, match=field.replace(".", r"\.")):
            Policy.from_run(folder)


@pytest.mark.parametrize("key", ["a.b", "", "rewards", "judge", "run", "__class__", "x" * 10**5])
def test_a_field_that_no_run_has_is_one_line(strange, capsys, tmp_path, key):
    folder = strange()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[key] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = export.main([f"--run={folder}", f"--out={tmp_path / 'out'}"])
    assert code in (0, 2) and "Traceback" not in capsys.readouterr().err
