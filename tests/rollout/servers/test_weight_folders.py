"""The folders of weights: every process writes its part, config.json comes last, and none goes that may be wanted."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.storage.errors import StorageFailure
from tests.end_to_end.test_processes import reserve_port
from tests.end_to_end.whole_runs import environment, kept_for

from .conftest import Npy


class Slow(Npy):
    """Writes when `go` says so."""

    def __init__(self):
        self.go, self.writes = threading.Event(), 0
        self.go.set()

    def write(self, folder, blocks):
        assert self.go.wait(30)
        self.writes += 1
        return super().write(folder, blocks)


def weights(x):
    return {"w": jnp.full(6, x, jnp.float32)}


def number(folder):
    return int(np.load(folder / "w.npy")[0])


def folders(home):
    return sorted(number(folder) for folder in home.iterdir() if (folder / "config.json").exists())


@pytest.fixture
def deployed(tmp_path):
    store, used = Slow(), []
    made = WeightFolders(weights(0), tmp_path, store, used.append)
    yield made, store, used
    store.go.set()


def test_training_goes_on_while_a_thread_writes_and_a_sync_waits_for_it(deployed, tmp_path):
    made, store, used = deployed
    store.go.clear()
    staged = made.stage(weights(1))  # returns though nothing is written
    assert not used
    threading.Timer(0.3, store.go.set).start()
    made.sync(staged, 7)
    assert made.version == 7 and used[0].checksum == made.checksum()
    assert used[0].label == used[0].folder[-16:] == f"{used[0].checksum:016x}" and folders(tmp_path) == [1]
    counts = made.take_counts()
    assert counts["servers/weights_bytes"] == counts["servers/weights_bytes_of_a_process"] == 24
    assert counts["servers/weights_wait_seconds"] >= 0.2 and counts["servers/weights_write_seconds"] >= 0.2
    assert counts["servers/weights_copy_seconds"] > 0 and set(made.take_counts().values()) == {0}


def test_the_same_weights_are_written_once(deployed, tmp_path):
    made, store, used = deployed
    for version in range(3):
        made.sync(weights(1), version)
    again = WeightFolders(weights(1), tmp_path, store, used.append)
    again.sync(weights(1), 3)
    assert store.writes == 1 and len(set(used)) == 1 and again.take_counts()["servers/weights_bytes"] == 0


def test_a_folder_goes_when_it_is_neither_present_nor_staged(deployed, tmp_path):
    made, store, _ = deployed
    staged = [made.stage(weights(x)) for x in (1, 2, 3)]
    staged[-1].folder.result()
    assert folders(tmp_path) == [1, 2, 3], "each may be synced"
    made.sync(staged.pop(0), 1)
    made.stage(weights(4)).folder.result()
    assert folders(tmp_path) == [1, 2, 3, 4]
    made.sync(staged.pop(0), 2)
    made.stage(weights(5)).folder.result()
    assert folders(tmp_path) == [2, 3, 5], "1 was sampled from, and nobody has 4 any more"
    made.sync(weights(1), 6)
    assert folders(tmp_path) == [1, 2, 3]


def test_what_a_killed_run_left_is_replaced_or_removed(tmp_path):
    first = WeightFolders(weights(0), tmp_path, Slow(), lambda _: None)
    first.sync(weights(1), 1)
    first.sync(weights(2), 2)
    [cut] = (folder for folder in tmp_path.iterdir() if number(folder) == 1)
    (cut / "config.json").unlink()
    (cut / "model-00003-of-00003.safetensors").write_bytes(b"of more processes")
    WeightFolders(weights(0), tmp_path, Slow(), lambda _: None).sync(weights(1), 1)
    assert folders(tmp_path) == [1] and {file.name for file in cut.iterdir()} == {"config.json", "w.npy"}


def test_a_folder_that_cannot_be_written_ends_the_sync_with_one_line(tmp_path):
    made = WeightFolders(weights(0), tmp_path / "home", Slow(), lambda _: None)
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    for _ in range(2):  # whoever asks
        with pytest.raises(StorageFailure, match=r"weights-\w+, written: NotADirectoryError.*another try would end"):
            made.sync(weights(1), 1)


def test_the_copy_stays_when_the_trainer_donates_its_weights(model, model_config, tmp_path):
    from rpg_jax import models

    store, go = models.Saving(model_config, np.float32), threading.Event()
    written = store.write
    store.write = lambda *args: go.wait(30) and written(*args)
    params = jax.tree.map(jnp.copy, model[1])
    made = WeightFolders(params, tmp_path, store, lambda _: None)
    staged = made.stage(params)
    update = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
    jax.block_until_ready(update(params))
    go.set()
    jax.tree.map(np.testing.assert_array_equal, models.load(staged.folder.result(), model_config), model[1])


SCRIPT = """
import json, resource, sys, threading
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, processes, process, home = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10)
import jax.numpy as jnp
import numpy as np
from dataclasses import replace
from pathlib import Path
from rpg_jax import models, parallel
from rpg_jax.models import hf_saving, lora
from rpg_jax.parallel import hosts
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.storage.errors import StorageFailure

hf_saving._BLOCK_BYTES = 2**14
home = Path(home) / f"of {processes}"
dense = models.DecoderConfig(
    vocab_size=96, embed_dim=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, hidden_dim=64,
    tie_embeddings=False,
)
mixture = replace(dense, experts=models.Experts(count=4, per_token=2, hidden_dim=16))

def random(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)

def deploy(name, config, mesh, adapters=None, dtype=jnp.bfloat16):
    shapes = models.abstract(config)[1]
    mesh = parallel.make_mesh(mesh)
    where = parallel.shardings(models.logical_axes(config), shapes, mesh)
    params, base = jax.tree.map(hosts.placed, random(shapes, 1), where), None
    if adapters is not None:
        base = models.Base(params, adapters.scale)
        shapes = lora.adapter_shapes(config, adapters)
        where = parallel.shardings(lora.adapter_axes(config, adapters), shapes, mesh)
        params = jax.tree.map(hosts.placed, random(shapes, 2), where)
    used = []
    (home / name).mkdir(parents=True, exist_ok=True)
    store = models.Saving(config, dtype or jnp.float32, max_file_bytes=2**15)
    with jax.set_mesh(mesh):
        made = WeightFolders(params, home / name, store, used.append, dtype=dtype, base=base)
        staged = made.stage(params)
        found = []
        thread = threading.Thread(target=lambda: found.append(made.sync(staged, 1)))
        thread.start()
        thread.join()
    assert found == [None] and (Path(used[0].folder) / "config.json").exists(), "complete for every process"
    counts = made.take_counts()
    assert counts["servers/weights_bytes"] < 1.3 * processes * counts["servers/weights_bytes_of_a_process"]
    return made, params, mesh

deploy("fsdp", dense, {"fsdp": 4})
deploy("float32", dense, {"fsdp": 4}, dtype=None)
deploy("tensor", dense, {"fsdp": 2, "tensor": 2})
deploy("experts", mixture, {"expert": 2, "fsdp": 2})
made, params, mesh = deploy("adapters", dense, {"fsdp": 4}, models.Lora(rank=4, alpha=8.0))
if processes > 1:
    if process == 1:  # its files may not grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with jax.set_mesh(mesh):
        params = jax.jit(lambda x: jax.tree.map(lambda x: x * 2, x))(params)
        try:
            made.sync(params, 2)
        except StorageFailure as error:
            print(error, flush=True)
hosts.barrier("end")
"""


@pytest.mark.slow  # seven processes
def test_the_folder_of_several_processes_is_that_of_one_to_the_bit_and_a_full_disk_ends_all(tmp_path):
    for processes in (1, 2, 4):
        reserved, port = reserve_port()
        env = environment(kept_for(tmp_path, "weights"), devices=4 // processes)
        with reserved:
            started = [
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, str(port), str(processes), str(process), str(tmp_path)],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    pass_fds=[reserved.fileno()],
                )
                for process in range(processes)
            ]
            said = [process.communicate(timeout=300) for process in started]
        assert [process.returncode for process in started] == [0] * processes, said
        for out, _ in said if processes > 1 else ():
            assert "written by process 1: OSError: [Errno 27] File too large" in out.splitlines()[-1], "in one line"
    for name in ("fsdp", "float32", "tensor", "experts", "adapters"):
        found = [list((tmp_path / f"of {n}" / name).glob("weights-*/config.json")) for n in (1, 2, 4)]
        of_one, *of_others = (only.parent for [only] in found)
        expected = tensors(of_one)
        assert len(expected) == 3 + 4 * (11 if name != "experts" else 9 + 3 * 4)
        for folder in of_others:
            assert folder.name == of_one.name, "the checksum"
            found = tensors(folder)
            assert found.keys() == expected.keys()
            assert all(
                found[key].tobytes() == x.tobytes() and found[key].shape == x.shape for key, x in expected.items()
            )
            assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == json.loads(
                (of_one / "config.json").read_text(encoding="utf-8")
            )


def tensors(folder):
    found = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert len(found) > 1
    return {name: x for file in found for name, x in file.items()}
