"""Slices by name: the known slices, their sizes, and the error for any other name."""

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
    monkeypatch.setattr(topologies.tpu_compiler, "library", lambda: None)
    with pytest.raises(ValueError, match="the compiler for TPUs .*python -m rpg_jax.plan --get_compiler") as error:
        topologies.parse("v5e:2x2").devices()
    assert "\n" not in str(error.value)
