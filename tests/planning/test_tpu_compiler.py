"""The compiler for TPUs in a folder of its own: where it is looked for, and what an interrupted download leaves."""

import subprocess
import sys

import pytest

from rpg_jax.planning import tpu_compiler


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """An environment in `tmp_path` whose Python cannot import libtpu."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None)


def fake_pip(monkeypatch, code=0):
    def run(command, **_):
        target = next(a for a in command if a.startswith("--target=")).removeprefix("--target=")
        library = tpu_compiler.Path(target) / "libtpu" / "libtpu.so"
        library.parent.mkdir(parents=True)
        library.touch()
        assert command[-1].startswith("libtpu==") and "--no-deps" in command
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(tpu_compiler.subprocess, "run", run)


def test_it_comes_into_a_folder_that_python_does_not_import_from(absent, monkeypatch, tmp_path):
    fake_pip(monkeypatch)
    (tmp_path / "tpu_compiler" / "0.1").mkdir(parents=True)  # that of an earlier JAX
    assert tpu_compiler.library() is None
    assert "only plan uses it" in tpu_compiler.get()
    assert tpu_compiler.library() == tpu_compiler.folder() / "libtpu" / "libtpu.so"
    assert list((tmp_path / "tpu_compiler").iterdir()) == [tpu_compiler.folder()]
    assert not any(path.startswith(str(tmp_path)) for path in sys.path)
    assert "is there" in tpu_compiler.get()


def test_a_failed_download_is_one_line_and_leaves_no_compiler(absent, monkeypatch):
    fake_pip(monkeypatch, 1)
    with pytest.raises(ValueError, match=r"^libtpu==\S+ cannot be installed into .*: pip says why above$"):
        tpu_compiler.get()
    assert tpu_compiler.library() is None


def test_the_machine_of_a_tpu_compiles_with_pythons_own(monkeypatch):
    origin = type("Spec", (), {"origin": "/there/libtpu/__init__.py"})
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: origin)
    assert str(tpu_compiler.library()) == "/there/libtpu/libtpu.so"
