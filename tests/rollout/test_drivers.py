"""The declarations of the drivers, and the imports that each driver needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpg_jax import rollout
from rpg_jax.rollout import drivers
from tests.modules import forget

JETSTREAM = "rpg_jax.rollout.jetstream"


def test_one_driver_spans_hosts_and_one_is_remote():
    assert [name for name, driver in rollout.DRIVERS.items() if driver.spans_hosts] == ["lockstep"]
    assert [name for name, driver in rollout.DRIVERS.items() if driver.remote] == ["servers"]


def test_without_jetstream_lockstep_takes_over_and_says_so_once(
    make, model, work, expected, is_same, monkeypatch, capsys
):
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda name: None)
    drivers._say_that_lockstep_takes_over.cache_clear()
    made = [make("orchestrator", *model, slots=8) for _ in range(2)]
    fix = "pip install --no-deps google-jetstream==0.2.2"
    assert capsys.readouterr().err == f"rollout.driver=lockstep takes over: orchestrator needs JetStream ({fix})\n"
    assert rollout.find_driver("orchestrator") is rollout.DRIVERS["lockstep"]
    assert is_same(made[0].generate(work), expected)


def test_jetstream_without_what_it_needs_is_one_line_with_the_fix(make, model, monkeypatch):
    forget(monkeypatch, JETSTREAM, "seqio", "tiktoken")
    monkeypatch.setitem(sys.modules, "jetstream.core", None)
    with pytest.raises(ValueError, match=r"jetstream.*rpg_jax\[jetstream\].*rollout.driver=lockstep"):
        make("orchestrator", *model, slots=8)


ALONE = """
import sys
for name in ("jetstream", "grpc", "aiohttp"):
    sys.modules[name] = None
import rpg_jax.runs.train_call, rpg_jax.runs.reinforcement, rpg_jax.runs.supervised, rpg_jax.evaluate
assert not [name for name in sys.modules if name.startswith(("rpg_jax.rollout.jetstream", "rpg_jax.rollout.servers"))]
"""


@pytest.mark.slow  # a process that starts JAX
def test_training_and_evaluating_import_nothing_of_jetstream_and_of_servers():
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120)
