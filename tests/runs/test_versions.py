"""What a run was made with is kept for every start, and a resume says what has changed."""

import importlib.metadata
import json
import re

from packaging.requirements import Requirement

from rpg_jax.runs import config_files, run_folder


def started(tmp_path, made_with):
    """The content of versions.json after one more start, and what the start said."""
    content, told = run_folder.versions_with_history(tmp_path / "versions.json", made_with)
    (tmp_path / "versions.json").write_text(json.dumps(content))
    return content, told


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
    file.write_text("jax==0.10.2 \\\n    --hash=sha256:00\nML_collections==1.1.0 ; python_version >= '3.11'\n")
    there = {"jax": "0.10.2", "ml-collections": "1.1.0", "more": "1"}
    assert run_folder.lock_digest(there, file).startswith("requirements-tpu.lock ")
    assert run_folder.lock_digest(there | {"jax": "0.11.0"}, file) == ""
    assert run_folder.lock_digest(there, tmp_path / "none") == ""


def test_the_lockfile_has_every_requirement_within_its_range_and_by_its_hash():
    text = (config_files.ROOT / run_folder.LOCK).read_text()
    locked = {run_folder.normalised(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)}
    assert {"jax", "jaxlib", "libtpu"} <= set(locked) and text.count("--hash=sha256:") >= len(locked)
    for name in ("requirements.txt", "requirements-tpu.txt"):
        lines = (config_files.ROOT / name).read_text().splitlines()
        for wanted in (Requirement(line.partition("#")[0]) for line in lines if line and line[0].isalnum()):
            assert wanted.specifier.contains(locked[run_folder.normalised(wanted.name)]), wanted


def test_all_packages_of_this_python_are_listed():
    assert run_folder.installed_packages()["jax"] == importlib.metadata.version("jax")
