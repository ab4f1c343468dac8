"""Servers of engines that others maintain, which serve tiny weights to real trainers on a CPU."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp

from rpg_jax import models
from rpg_jax.rollout.servers.protocol import prober
from rpg_jax.rollout.servers.server import KINDS
from tests.end_to_end.test_processes import records, reserve_port

CONFIG = models.DecoderConfig(
    vocab_size=288, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=128
)
SETTINGS = (
    "--config.train.steps=5",
    "--config.mesh.fsdp=1",
    "--config.mesh.replica=1",
    "--config.warm_start.enabled=False",
    "--config.dynamic_sampling.enabled=False",
    "--config.rewards.parts=exact:1,format:1",  # of random weights too, some completions are numbers and some are not
    "--config.task.max_prompt_tokens=96",
    "--config.rollout.max_tokens=8",
    "--config.optimizer.learning_rate=1e-3",  # moves log-probs by far more than rounding
    "--config.evaluation.every=100000",
    "--config.checkpoint.every=100000",
    "--config.servers.patience_seconds=100",
)


def weights(folder, seed, tokenizer, *, head=True, dtype="float32", scale=1.0, **changes):
    """Random weights in a folder that others serve; with `scale` 3 next tokens are far from equally probable."""
    config = dataclasses.replace(CONFIG, **changes)
    params = models.init(config, seed=seed, param_dtype=jnp.float32)[1]
    params = jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, params)
    models.save(folder, config, params, dtype=dtype, head=head, fields={"eos_token_id": tokenizer.eos_id})
    tokenizer.save(folder)
    file = folder / "tokenizer_config.json"  # transformers 5 wants names, and a class that knows no vocabulary
    fields = json.loads(file.read_text(encoding="utf-8")) | {
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    file.write_text(json.dumps(fields), encoding="utf-8")
    return params


def probes(**changes):
    """A function from weights in float32 to the trainer's probe of them."""
    config, where = dataclasses.replace(CONFIG, **changes), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sizes = {"rows": 1, "replicated": where, "prompt": 64, "tokens": 8, "known_ids": 256, "model": "policy"}
    return prober(models.abstract(config, compute_dtype=jnp.float32)[0], config, "float32", **sizes)


class Server:
    """A server of the kind `kind`, which may be killed and started again. `command` gets HOST, PORT and the rest."""

    def __init__(self, kind, command, env, log, engine):
        reserved, self.port = reserve_port()
        reserved.close()
        self.url, self.log, self.kind = f"http://127.0.0.1:{self.port}", log, kind
        self._command, self._env, self._engine = [*command, "--host=127.0.0.1", f"--port={self.port}"], env, engine
        self.start()

    def start(self):
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        with self.log.open("a") as log:
            options = {"env": kept | self._env | {"HF_HUB_OFFLINE": "1"}, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(self._command, **options, start_new_session=True)

    def ready(self):
        """Waits until it serves."""
        deadline = time.monotonic() + 300
        while self.get("/health") != 200:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text(encoding="utf-8")[
                -3000:
            ]
            time.sleep(0.5)
        return self

    def get(self, path, timeout=5):
        """The status of an answer; 0 without one."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def post(self, path, body):
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        ) as reply:
            return json.load(reply)

    def load(self, folder, label=""):
        for path, body in KINDS[self.kind].loads(str(folder), label):
            self.post(path, body)

    def engine(self):
        """The process that samples."""
        rows = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [row.split(None, 2) for row in rows.splitlines() if self._engine in row]
        return next(int(pid) for pid, parent, _ in found if int(parent) == self.process.pid)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def overrides(self, folder, name, home):
        """The overrides of a run that this server samples, from the weights in `folder`."""
        return (
            *SETTINGS,
            f"--config.model.path={folder}",
            "--config.rollout.driver=servers",
            f"--config.servers.kind={self.kind}",
            "--config.servers.model=policy",
            f"--config.servers.urls={self.url}",
            f"--config.servers.weights={home}",
            f"--config.run.name={name}",
        )


def gaps(folder):
    """The gaps of a run's steps between sampler and trainer, and those of the probes."""
    steps = [record for record in records(folder) if record["step"]]
    print([(f"{r['sampler_gap']:.2e}", f"{r['servers/probe_gap']:.2e}") for r in steps])
    return [record[name] for record in steps for name in ("sampler_gap", "servers/probe_gap")]
