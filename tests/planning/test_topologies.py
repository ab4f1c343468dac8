"""Slices by name, with the error for any other name, and the compiler for TPUs in a folder of its own."""

import subprocess
import sys

import pytest

from rpg_jax.planning import chips, topologies

NAMES = [f"{kind}:{shape}" for kind, chip in chips.CHIPS.items() for shape in chip.shapes]


@pytest.mark.parametrize("name", NAMES)
def test_every_known_slice_parses_to_its_name(name):
    topology = topologies.parse(name)
    assert topology.name == name
    assert topology.chips >= topology.chip.cores


def test_every_kind_goes_from_one_chip_to_hundreds():
    for kind in chips.CHIPS:
        sizes = [topologies.parse(f"{kind}:{shape}").chips for shape in chips.CHIPS[kind].shapes]
        assert sizes[0] == chips.CHIPS[kind].cores
        assert sizes[-1] >= 256
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("name", ["v5p", "v5p:3x3x3", "v7:2x2", "v6e:2x2x2", "v5p:2x2", "v5e:2x2*0", "v5e:2x2*", ""])
def test_a_wrong_name_lists_the_known(name):
    with pytest.raises(ValueError, match=r"unknown topology.*v5e: 1x1 2x2 .*v5p: 1x1x1 2x2x1"):
        topologies.parse(name)


def test_hosts_have_four_chips_unless_one_has_them_all():
    hosts = {name: topologies.parse(name).hosts for name in ("v5e:1x1", "v5e:2x4", "v6e:4x4", "v5p:2x2x1", "v5p:2x2x2")}
    assert hosts == {"v5e:1x1": 1, "v5e:2x4": 1, "v6e:4x4": 4, "v5p:2x2x1": 1, "v5p:2x2x2": 2}


def test_a_v7x_chip_is_two_devices_of_one_price():
    slice_ = topologies.parse("v7x:2x2x2")
    assert (slice_.chips, slice_.hosts, slice_.host.name, slice_.host.chips) == (16, 2, "v7x:2x2x1", 8)
    assert slice_.hourly is None
    assert topologies.parse("v5p:2x2x2*2").hourly == 16 * 4.20


def test_several_slices_have_the_chips_and_hosts_of_all():
    three = topologies.parse("v5p:2x2x2*3")
    assert (three.name, three.chips, three.hosts, three.host.name) == ("v5p:2x2x2*3", 24, 6, "v5p:2x2x1")
    assert topologies.parse("v5e:2x4*2").hosts == 2


def test_without_the_compiler_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(topologies, "compiler_library", lambda: None)
    with pytest.raises(ValueError, match="the compiler for TPUs .*python -m rpg_jax.plan --get_compiler") as error:
        topologies.parse("v5e:2x2").devices()
    assert "\n" not in str(error.value)


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """An environment in `tmp_path` whose Python cannot import libtpu."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)


def fake_pip(monkeypatch, code=0):
    def run(command, **_):
        target = next(a for a in command if a.startswith("--target=")).removeprefix("--target=")
        library = topologies.Path(target) / "libtpu" / "libtpu.so"
        library.parent.mkdir(parents=True)
        library.touch()
        assert command[-1].startswith("libtpu==") and "--no-deps" in command
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(topologies.subprocess, "run", run)


def test_the_compiler_comes_into_a_folder_that_python_does_not_import_from(absent, monkeypatch, tmp_path):
    fake_pip(monkeypatch)
    (tmp_path / "tpu_compiler" / "0.1").mkdir(parents=True)  # that of an earlier JAX
    assert topologies.compiler_library() is None
    assert "only plan uses it" in topologies.get_compiler()
    assert topologies.compiler_library() == topologies.compiler_folder() / "libtpu" / "libtpu.so"
    assert list((tmp_path / "tpu_compiler").iterdir()) == [topologies.compiler_folder()]
    assert not any(path.startswith(str(tmp_path)) for path in sys.path)
    assert "is there" in topologies.get_compiler()


def test_a_failed_download_of_the_compiler_is_one_line_and_leaves_no_compiler(absent, monkeypatch):
    fake_pip(monkeypatch, 1)
    with pytest.raises(ValueError, match=r"^libtpu==\S+ cannot be installed into .*: pip says why above$"):
        topologies.get_compiler()
    assert topologies.compiler_library() is None


def test_the_machine_of_a_tpu_compiles_with_pythons_own(monkeypatch):
    origin = type("Spec", (), {"origin": "/there/libtpu/__init__.py"})
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: origin)
    assert str(topologies.compiler_library()) == "/there/libtpu/libtpu.so"
