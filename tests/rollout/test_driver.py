"""The declarations of the drivers, and the imports that each driver needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpg_jax import rollout

JETSTREAM = "rpg_jax.rollout.jetstream"


def test_one_driver_spans_hosts_and_one_refuses_several_processes():
    assert [name for name, driver in rollout.DRIVERS.items() if driver.spans_hosts] == ["lockstep"]
    assert [name for name, driver in rollout.DRIVERS.items() if driver.single_process] == ["simple"]
    assert [name for name, driver in rollout.DRIVERS.items() if driver.remote] == ["fleet"]


def test_without_jetstream_its_driver_names_the_fix_and_lockstep_works(
    make, model, work, expected, is_same, monkeypatch
):
    monkeypatch.setitem(sys.modules, "jetstream", None)
    for name in [name for name in sys.modules if name.startswith(JETSTREAM)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install --no-deps google-jetstream==0\.2\.2, .*rollout.driver=lockstep"):
        make("orchestrator", *model, slots=8)
    assert is_same(make("lockstep", *model, slots=8).generate(work), expected)


ALONE = """
import sys
sys.modules["jetstream"] = None
import rpg_jax.train
assert not [name for name in sys.modules if name.startswith("rpg_jax.rollout.jetstream")]
"""


@pytest.mark.slow  # a process that starts JAX
def test_training_imports_nothing_of_jetstream():
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120)
