"""A run's config is read back, or the message says why not; a name stays in its folder; nothing is deleted."""

import contextlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from packaging.requirements import Requirement

from configs import tiny
from rpg_jax.runs import config_files, run_folder, train_command
from rpg_jax.runs.config_files import Retired
from rpg_jax.runs.resolve import resolve
from rpg_jax.storage.checkpoints import Checkpoints
from tests.storage.test_files import gcs  # noqa: F401


def test_a_run_older_than_a_field_says_which_and_what_to_do(tmp_path):
    config = json.loads(resolve(tiny.get_config()).to_json_best_effort())
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run_folder.read_config(tmp_path).mesh.fsdp == -1
    del config["reference"]["path"]  # no run of before had a teacher
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run_folder.read_config(tmp_path).reference.path is None
    del config["mesh"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"older version, .* mesh\.replica, mesh\.fsdp.*versions\.json"):
        run_folder.read_config(tmp_path)


def test_a_field_that_earlier_versions_lacked_decides_nothing_until_it_has_a_value(tmp_path):
    config = made(tmp_path, "r")
    assert not {"reference.path", "run.start_from"} & run_folder.identity(config).keys()
    config.reference.path = "sums"
    assert run_folder.identity(config)["reference.path"] == "sums"


def of_version_0_1(config):
    """What the version before 24 November 2026 wrote as config.json of a run with a fleet."""
    old = json.loads(config.to_json_best_effort())
    old["fleet"] = {"host": "0.0.0.0", "port": 9100, "advertise": None, "lost_seconds": 20.0, "stall_seconds": 900.0}
    old["rollout"]["driver"] = "fleet"
    return old


def test_a_run_of_a_fleet_goes_on_with_another_driver_and_is_read_as_a_run_of_servers(tmp_path):
    config = made(tmp_path, "r")
    folder = opened(tmp_path, "r")
    (folder.files / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    old = of_version_0_1(config)
    for driver in ("servers", "orchestrator", "lockstep"):
        (folder.files / "config.json").write_text(json.dumps(old), encoding="utf-8")
        assert run_folder.read_config(folder.files).rollout.driver == "servers"
        again = opened(tmp_path, "r", **{"rollout.driver": driver})
        assert (again.files / "metrics.jsonl").exists() and not (tmp_path / "replaced").exists()
        assert run_folder.read_config(again.files).rollout.driver == driver


def test_a_checkpoint_that_names_the_driver_of_a_fleet_is_of_the_same_run(tmp_path):
    config = made(tmp_path, "r")
    state, like = {"w": jax.numpy.ones(3)}, {"w": jax.ShapeDtypeStruct((3,), "float32")}
    old = run_folder.identity(config) | {"rollout.driver": "fleet"}
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=1, identity=old)) as written:
        written.save(1, state, {})
    for seed, known in ((config.seed, True), (config.seed + 1, False)):
        identity = run_folder.identity(config) | {"seed": seed}
        with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=1, identity=identity)) as read:
            if known:
                assert read.restore_last(like)[0] == 1
            else:
                with pytest.raises(ValueError, match="foreign, of a run with seed"):
                    read.restore_last(like)


def test_a_retired_field_that_decided_what_a_run_computed_is_named_with_what_took_its_place(tmp_path, monkeypatch):
    table = (Retired("loss.sharpness", "2026-01-02", "write loss.kl_coef", fixed=1.0), Retired("log.colour", "", ""))
    monkeypatch.setattr(config_files, "all_retired", lambda: table)
    folder = opened(tmp_path, "r")
    (folder.files / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    old = json.loads((folder.files / "config.json").read_text(encoding="utf-8"))
    old["loss"]["sharpness"], old["log"]["colour"] = 2.0, "red"
    (folder.files / "config.json").write_text(json.dumps(old), encoding="utf-8")
    line = r"another config: loss.sharpness was 2.0, loss.sharpness is retired since 2026-01-02: write loss.kl_coef\."
    with pytest.raises(ValueError, match=line):
        opened(tmp_path, "r")
    old["loss"]["sharpness"] = 1.0
    (folder.files / "config.json").write_text(json.dumps(old), encoding="utf-8")
    opened(tmp_path, "r")


@pytest.mark.parametrize("newer", ["rehearsal", "model.replay_experts"])
def test_a_run_older_than_a_field_without_a_value_goes_on(newer):
    new = run_folder.as_json(resolve(tiny.get_config()))
    old = json.loads(json.dumps(new))
    section, _, name = newer.rpartition(".")
    del (old[section] if section else old)[name]
    assert run_folder.differing(old, new) == ""
    new["rehearsal"]["coef"] = 0.1
    assert "now 0.1" in run_folder.differing(old, new)


def test_a_run_older_than_the_move_of_a_field_into_loss_arguments_goes_on(tmp_path):
    folder = opened(tmp_path, "r", method="SAPO")
    (folder.files / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    old = json.loads((folder.files / "config.json").read_text(encoding="utf-8"))
    assert json.loads(old["loss"]["arguments"]) == {"tau_negative": 1.05, "tau_positive": 1.0}
    old["loss"] |= {"arguments": None, "tau_positive": 1.0, "tau_negative": 1.05, "mask_threshold": None}
    (folder.files / "config.json").write_text(json.dumps(old), encoding="utf-8")
    opened(tmp_path, "r", method="SAPO")
    assert json.loads(run_folder.read_config(folder.files).loss.arguments) == {
        "tau_negative": 1.05,
        "tau_positive": 1.0,
    }


@pytest.mark.parametrize(
    "older",
    [
        {"loss.arguments": None, "loss.tau_positive": 1.0, "loss.tau_negative": 1.05},
        {"task.name": "guessing", "environment.name": "calculator"},
    ],
)
def test_a_checkpoint_with_retired_fields_or_values_is_of_the_same_run(tmp_path, older):
    config = tiny.get_config()
    config.method, config.task.name = "SAPO", "examples.guessing:Problems"
    config.environment.name = "examples.calculator:Game"
    identity = run_folder.identity(resolve(config))
    state, like = {"w": jax.numpy.ones(3)}, {"w": jax.ShapeDtypeStruct((3,), "float32")}
    with contextlib.closing(Checkpoints(tmp_path / "c", keep=1, identity=identity | older)) as written:
        written.save(1, state, {})
    renewed = Checkpoints(tmp_path / "c", keep=1, identity=identity, renewed=run_folder.renewed)
    with contextlib.closing(renewed) as read:
        assert read.restore_last(like)[0] == 1
    read = Checkpoints(tmp_path / "c", keep=1, identity=identity)
    with contextlib.closing(read), pytest.raises(ValueError, match="foreign"):
        read.restore_last(like)


def test_a_run_older_than_a_field_that_changes_no_number_has_its_default(tmp_path):
    folder = opened(tmp_path, "r")
    old = json.loads((folder.files / "config.json").read_text(encoding="utf-8"))
    del old["servers"], old["log"]["project"]
    (folder.files / "config.json").write_text(json.dumps(old), encoding="utf-8")
    read, new = run_folder.read_config(folder.files), tiny.get_config()
    assert read.servers.to_dict() == new.servers.to_dict() and read.log.project == "rpg_jax"


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_each_run_of_a_process_keeps_its_compiled_programs_where_it_says(tmp_path, own_programs):
    for number, folder in enumerate(["mine", "yours", "", "mine"]):
        before = len([*tmp_path.glob("*/*-cache")])
        run_folder.use_compilation_cache(folder)
        jax.jit(lambda x, factor=number + 0.125: x * factor)(np.ones(3))
        assert len([*tmp_path.glob("*/*-cache")]) - before == bool(folder), folder
    assert [len([*(tmp_path / folder).glob("*-cache")]) for folder in ("mine", "yours")] == [2, 1]


@pytest.fixture
def own_programs(tmp_path, monkeypatch):
    """A process in `tmp_path` whose compiled programs are not those of all tests."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.chdir(tmp_path)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_process_that_changes_its_folder_still_finds_its_compiled_programs(tmp_path, monkeypatch, own_programs):
    run_folder.use_compilation_cache("mine")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder.use_compilation_cache()  # no folder among the runs, which may be a stranger's
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "rpg_jax" / "compiled")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run_folder._own_cache() == "", "a home that cannot be written keeps none"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert run_folder._own_cache() == ""


def test_a_folder_that_is_no_run_lists_those_that_are(tmp_path):
    run = ("config.json", "versions.json")
    for folder, files in {"missed": run, "model": ("config.json",), **{f"{n:09}": run for n in range(5)}}.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no config.json.*; the nearest runs beside it: ") as caught:
        run_folder.read_config(tmp_path / "missing")
    near = str(caught.value).rpartition(": ")[2].split(", ")
    assert near[0] == str(tmp_path / "missed") and len(near) == 5 and str(tmp_path / "model") not in near


def test_a_model_in_place_of_a_run_is_said_to_be_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    with pytest.raises(ValueError, match="is a model and no run: evaluate takes it as --folder"):
        run_folder.read_config(tmp_path)


def test_a_run_goes_on_with_other_slots_and_micro_batches_but_not_with_another_loss(tmp_path):
    config = tiny.get_config()
    config.run.dir, config.run.name = str(tmp_path), "r"
    config = resolve(config)
    run_folder.open_run(config, run_folder.of(config))
    before = run_folder.identity(config)
    config.rollout.slots, config.train.microbatch_size, config.train.packed_length = 8, 4, 64
    run_folder.open_run(config, run_folder.of(config))
    assert run_folder.identity(config) == before
    config.loss.kl_coef = 0.5
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"another config: loss\.kl_coef was .*with --config.run.start_from it goes"):
        run_folder.open_run(config, run_folder.of(config))


NAMES = [
    "",
    ".",
    "..",
    "../../x",
    "a/b",
    "/tmp/x",
    "a\\b",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 201,
    ".owners",
    "warm_starts",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_name_is_one_folder_of_the_runs(tmp_path, name, overwrite):
    runs = tmp_path / "in" / "runs"
    (runs / "other").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^run\.name=.* cannot be the name of a folder in run\.dir: it "):
        opened(runs, name, overwrite=overwrite)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["in", "in/runs", "in/runs/other"]


def test_a_name_is_checked_before_anything_else(tmp_path, capsys):
    assert (
        train_command.main([f"--config.run.dir={tmp_path}", "--config.run.name=", "--config.run.overwrite=True"]) == 2
    )
    assert capsys.readouterr().err.startswith("error: run.name='' cannot") and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("flag", ["--config=", "--data=", "--model="])
def test_a_flag_without_its_value_does_not_train_the_tiny_run(flag, tmp_path, capsys):
    """As from --config=$CONFIG in a script, where the variable is not set."""
    assert train_command.main([flag, f"--config.run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not [*tmp_path.iterdir()]


def test_what_is_replaced_is_moved_aside_each_time(tmp_path):
    for number in range(3):
        folder = opened(tmp_path, "r", overwrite=True)
        assert not (folder.files / "work").exists()
        (folder.files / "work").write_text(str(number), encoding="utf-8")
    assert [(tmp_path / "replaced" / f"r-{k}" / "work").read_text(encoding="utf-8") for k in range(2)] == ["0", "1"]


@pytest.mark.parametrize("foreign", [{}, {"program": "another"}, {"model_type": "qwen3"}])
def test_only_a_folder_of_this_program_is_replaced(tmp_path, foreign):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(json.dumps(foreign), encoding="utf-8")
    (tmp_path / "r" / "versions.json").write_text(json.dumps(foreign), encoding="utf-8")
    for overwrite in (True, False):
        with pytest.raises(ValueError, match="does not say that it is a run of this program"):
            opened(tmp_path, "r", overwrite=overwrite)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "r", "versions.json"]


def test_a_folder_without_a_run_keeps_its_files(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "output.txt").write_text("of a notebook", encoding="utf-8")
    folder = opened(tmp_path, "r", overwrite=True)
    assert (folder.files / "output.txt").exists() and not (tmp_path / "replaced").exists()


def test_a_run_that_took_no_step_leaves_its_name_to_the_next(tmp_path, capsys):
    folder = opened(tmp_path, "r")
    (folder.files / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n', encoding="utf-8")
    (folder.files / "tokenizer.model").write_text("of other data", encoding="utf-8")
    again = opened(tmp_path, "r", **{"loss.kl_coef": 0.5})
    assert "took no step" in capsys.readouterr().out and run_folder.read_config(again.files).loss.kl_coef == 0.5
    assert not (again.files / "tokenizer.model").exists() and (tmp_path / "replaced" / "r-0" / "metrics.jsonl").exists()
    for step in ("metrics", "checkpoint"):
        (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1}\n' if step == "metrics" else "", encoding="utf-8")
        if step == "checkpoint":
            (tmp_path / "r" / "checkpoints" / "2").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"another config: loss\.kl_coef was 0\.5"):
            opened(tmp_path, "r")


@pytest.mark.parametrize("content", ["", '{"a": ', "[1]", "\0\0\0"])
@pytest.mark.parametrize("name", ["config.json", "versions.json"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = opened(tmp_path, "r")
    (folder.files / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        opened(tmp_path, "r", **{"loss.kl_coef": 0.5})


def test_a_second_run_of_the_name_is_refused_and_changes_nothing(tmp_path):
    with run_folder.held(made(tmp_path, "r")) as folder:
        content = (folder.files / "config.json").read_bytes()
        for overwrite in (False, True):
            second = run_folder.held(made(tmp_path, "r", overwrite=overwrite))
            with pytest.raises(ValueError, match=r"r is being written by process \d+ on .*another --config\.run\.name"):
                second.__enter__()
        assert (folder.files / "config.json").read_bytes() == content and not (tmp_path / "replaced").exists()
    with run_folder.held(made(tmp_path, "r")):
        pass


@pytest.mark.slow  # imports gcsfs
def test_a_bug_after_a_step_is_started_again_wherever_the_folder_is(tmp_path, request):
    request.getfixturevalue("gcs")
    for runs in (tmp_path, "gs://bucket/runs"):
        with pytest.raises(RuntimeError) as told, run_folder.held(made(runs, "r")) as folder:
            (folder.files / "metrics.jsonl").write_text('{"step": 1, "loss": 0.1}\n', encoding="utf-8")
            raise RuntimeError("a bug before the first checkpoint")
        assert told.value.ends_again == "", runs


def made(runs, name, *, overwrite=False, **changes):
    config = tiny.get_config()
    config.run.dir, config.run.name, config.run.overwrite = str(runs), name, overwrite
    config.update_from_flattened_dict(changes)
    return resolve(config)


def opened(runs, name, **options):
    config = made(runs, name, **options)
    run_folder.open_run(config, folder := run_folder.of(config))
    return folder


def no_number(text):
    raise AssertionError(f"{text} is no JSON")


def test_infinity_is_text_in_the_files_and_a_number_in_the_config(tmp_path):
    folder = opened(tmp_path, "r", **{"method": "DAPO", "loss.clip_dual": float("inf")})
    written = json.loads((folder.files / "config.json").read_text(encoding="utf-8"), parse_constant=no_number)
    assert written["loss"]["clip_dual"] == "inf"
    assert run_folder.read_config(folder.files).loss.clip_dual == float("inf")
    (folder.files / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    opened(tmp_path, "r", **{"method": "DAPO", "loss.clip_dual": float("inf")})
    json.dumps(run_folder.identity(made(tmp_path, "r", **{"loss.clip_dual": float("inf")})), allow_nan=False)


@pytest.mark.parametrize(
    ("status", "changed"),
    [
        ("", False),
        ("?? smollm2-135m/model.safetensors\n?? notes.txt", False),
        ("?? configs/mine.py", True),
        ("M rpg_jax/train.py\n?? notes.txt", True),
        ("?? notes.txt\n D requirements.txt", True),
    ],
)
def test_a_changed_file_or_a_new_module_is_an_uncommitted_change(monkeypatch, status, changed):
    monkeypatch.setattr(run_folder, "_git", lambda *words: status if words[0] == "status" else "0123")
    assert run_folder.made_with()["uncommitted_changes"] is changed


def started(tmp_path, made_with):
    """The content of versions.json after one more start, and what the start said."""
    content, told = run_folder.versions_with_history(tmp_path / "versions.json", made_with)
    (tmp_path / "versions.json").write_text(json.dumps(content), encoding="utf-8")
    return content, told


@pytest.mark.parametrize("damaged", [{"earlier": 5}, {"earlier": None}, {"installed": "jax"}, {"installed": [1]}])
def test_versions_that_no_start_has_written_are_named(tmp_path, damaged):
    (tmp_path / "versions.json").write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(ValueError, match=r"versions\.json is damaged: "):
        run_folder.versions_with_history(tmp_path / "versions.json", {"commit": "a"})


def test_a_config_that_is_nested_too_deeply_to_be_compared_is_named(tmp_path):
    depth = 700 if sys.version_info < (3, 12) else 1200  # it can be parsed; a function that walks it cannot go as deep
    (tmp_path / "config.json").write_text('{"x": ' * depth + "1" + "}" * depth, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json is damaged: its JSON is nested too deeply"):
        run_folder.differing(run_folder.read_if_there(tmp_path / "config.json"), {})


@pytest.mark.parametrize("arguments", ["5", "null", "{", "[" * 10**5])
def test_a_retired_field_does_not_move_into_what_is_no_object(arguments):
    with pytest.raises(ValueError, match=r"^loss\.arguments='"):
        run_folder.renewed({"loss.weight_cap": 2.0, "loss.arguments": arguments})


def test_every_start_is_kept_and_what_changed_is_named(tmp_path, monkeypatch):
    there = {"jax": "0.10.2", "libtpu": "0.0.30"}
    monkeypatch.setattr(run_folder, "installed_packages", lambda: dict(there))
    first, told = started(tmp_path, {"commit": "a"})
    assert not told and "earlier" not in first
    assert started(tmp_path, {"commit": "a"})[1] == ""
    there["libtpu"] = "0.0.31"
    content, told = started(tmp_path, {"commit": "b"})
    assert told == "commit a -> b, libtpu 0.0.30 -> 0.0.31"
    assert [start["commit"] for start in content["earlier"]] == ["a", "a"] and content["commit"] == "b"
    assert ["installed" in start for start in content["earlier"]] == [False, True], "kept where it changed"
    assert content["installed"]["libtpu"] == "0.0.31" and all(s["started"] for s in content["earlier"])


def test_a_run_of_the_locked_packages_says_so(tmp_path):
    file = tmp_path / run_folder.LOCK
    file.write_text(
        "jax==0.10.2 \\\n    --hash=sha256:00\nML_collections==1.1.0 ; python_version >= '3.11'\n", encoding="utf-8"
    )
    there = {"jax": "0.10.2", "ml-collections": "1.1.0", "more": "1"}
    assert run_folder.lock_digest(there, file).startswith("requirements-tpu.lock ")
    assert run_folder.lock_digest(there | {"jax": "0.11.0"}, file) == ""
    assert run_folder.lock_digest(there, tmp_path / "none") == ""


def test_the_lockfile_has_every_requirement_within_its_range_and_by_its_hash():
    text = (config_files.ROOT / run_folder.LOCK).read_text(encoding="utf-8")
    locked = {run_folder.normalised(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)}
    assert {"jax", "jaxlib", "libtpu"} <= set(locked) and text.count("--hash=sha256:") >= len(locked)
    for name in ("requirements.txt", "requirements-tpu.txt"):
        lines = (config_files.ROOT / name).read_text(encoding="utf-8").splitlines()
        for wanted in (Requirement(line.partition("#")[0]) for line in lines if line and line[0].isalnum()):
            assert wanted.specifier.contains(locked[run_folder.normalised(wanted.name)]), wanted


def test_all_packages_of_this_python_are_listed():
    assert run_folder.installed_packages()["jax"] == importlib.metadata.version("jax")


def test_the_first_package_of_a_name_counts_and_a_broken_one_does_not(tmp_path, monkeypatch):
    content = {
        "a/~ax-1.0": None,
        "a/flax-1.0": "",
        "a/Jax-3.0": "Name: Jax\nVersion: 3.0",
        "b/jax-9.0": "Name: jax\nVersion: 9.0",
    }
    for folder, text in content.items():
        (info := tmp_path / f"{folder}.dist-info").mkdir(parents=True)
        if text is not None:
            (info / "METADATA").write_text(text)
    monkeypatch.setattr("sys.path", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert run_folder.installed_packages.__wrapped__() == {"jax": "3.0"}


def test_a_branch_is_named_after_its_parent_and_another_parent_makes_another_run():
    change = {"run.start_from": "gs://mine/runs/a@40", "method": "GRPO"}
    config = config_files.changed(config_files.load("tiny").config, change)
    assert run_folder.default_name("tiny.py", config, change) == "tiny-grpo-from=a-40-seed0"
    assert run_folder.default_name("x.py:small", config, change) == "x-small-grpo-from=a-40-seed0", "beside x.py:large"
    other = config_files.changed(config, {"run.start_from": "gs://mine/runs/a@41"})
    one, two = (run_folder.identity(resolve(each)) for each in (config, other))
    assert {name for name in one if one[name] != two[name]} == {"run.start_from"}
    assert "run.start_from" not in run_folder.identity(resolve(tiny.get_config())), "as checkpoints of older runs"
