"""What one host of several cannot read, none of them uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_processes import reserve_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.storage import checkpoints

address, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank)
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
weights = np.arange(8, dtype=np.float32)
state = {"w": jax.make_array_from_callback((8,), sharding, lambda index: weights[index])}
like = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)}
saved = checkpoints.Checkpoints(folder, keep=3)
for step in (1, 2):
    saved.save(step, state, {"at": step})
saved.wait()

original = ocp.PyTreeCheckpointHandler.restore
def restore(self, path, *args, **keywords):
    if rank == 1 and "/2/" in str(path):
        raise FileNotFoundError(2, "this host's part is gone")
    return original(self, path, *args, **keywords)
ocp.PyTreeCheckpointHandler.restore = restore

step, restored, record = saved.restore_last(like)
assert record == {"at": step}
for shard in restored["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, weights[shard.index])
print("used", step, "kept", saved.steps())
saved.close()
"""


@pytest.mark.slow  # two processes
def test_a_checkpoint_that_one_of_two_hosts_cannot_read_is_refused_by_both(tmp_path, popen):
    reserved, port = reserve_port()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    with reserved:
        running = [
            popen(
                [sys.executable, "-c", SCRIPT, f"127.0.0.1:{port}", str(rank), str(tmp_path / "c")],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        ended = [process.communicate(timeout=300) for process in running]
    for process, (output, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors
        assert "used 1 kept [1]" in output
    assert "c/2/state: " in ended[0][1] and "this host's part is gone" in ended[0][1], (
        "the first says what the second found"
    )
    assert (tmp_path / "c" / "refused" / "2" / "commit_success.txt").exists()
