"""A real vLLM on a CPU serves real trainers: its weights after each load, its log-probs, and its end midway.

The variable RPG_JAX_VLLM_PYTHON names the Python of an environment with vLLM, as docs/servers.md has it.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import pytest

from rpg_jax import models
from rpg_jax.rollout.servers.protocol import prober
from rpg_jax.rollout.servers.server import KINDS
from tests.end_to_end.test_processes import printed, records, reserve_port, run, start

PYTHON = os.environ.get("RPG_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="RPG_JAX_VLLM_PYTHON names no Python with vLLM"),
]
CONFIG = models.DecoderConfig(
    vocab_size=288, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=128
)
KIND = KINDS["vllm"]
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
    """Random weights in a folder that vLLM serves; with `scale` 3 next tokens are far from equally probable."""
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


class Server:
    """vLLM's server of a folder, which may be killed and started again."""

    def __init__(self, folder, dtype="float32"):
        reserved, self.port = reserve_port()
        reserved.close()
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder.with_suffix(f".{dtype}.log")
        self._folder, self._dtype = folder, dtype
        self.start()

    def start(self):
        flags = [f"--model={self._folder}", f"--port={self.port}", "--host=127.0.0.1", f"--dtype={self._dtype}"]
        flags += [
            "--logprobs-mode=processed_logprobs",
            "--max-num-batched-tokens=8192",
            "--max-model-len=256",
            "--served-model-name=policy",
        ]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")} | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("a") as log:
            options = {"env": env, "stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen([PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags], **options)

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

    def load(self, folder):
        for path, body in KIND.loads(str(folder), ""):
            self.post(path, body)

    def engine(self):
        """The process of its EngineCore."""
        rows = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [row.split(None, 2) for row in rows.splitlines() if "EngineCore" in row]
        return next(int(pid) for pid, parent, _ in found if int(parent) == self.process.pid)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory, qwen_like):
    """A server of tied and one of untied weights in float32, and one of tied weights in bfloat16."""
    home, made = tmp_path_factory.mktemp("vllm"), {}
    weights(home / "tied", 0, qwen_like, head=False)  # as models are published
    weights(home / "untied", 0, qwen_like, tie_embeddings=False)
    made = {
        "tied": Server(home / "tied"),
        "untied": Server(home / "untied"),
        "bfloat16": Server(home / "tied", "bfloat16"),
    }
    try:
        yield {name: server.ready() for name, server in made.items()}
    finally:
        for server in made.values():
            server.kill()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_after_each_load_the_log_probs_are_those_of_the_new_weights(servers, qwen_like, tmp_path, tied):
    server, shape = servers["tied" if tied else "untied"], {"tie_embeddings": tied}
    config = dataclasses.replace(CONFIG, **shape)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sizes = {"rows": 1, "replicated": where, "prompt": 64, "tokens": 8, "known_ids": 256, "model": "policy"}
    make = prober(models.abstract(config, compute_dtype=jnp.float32)[0], config, "float32", **sizes)
    answers = {}
    for name in ("a", "b", "a", "b"):
        if not (tmp_path / name).exists():
            answers[name] = make(weights(tmp_path / name, {"a": 0, "b": 1}[name], qwen_like, scale=3, **shape))
        server.load(tmp_path / name)
        probe = answers[name]
        # float32: 64 products a sum, 2 layers; other programs round them otherwise
        assert probe.difference(server.post("/v1/completions", probe.body)).mean < 1e-4
        other = answers["a" if name == "b" else "b"] if len(answers) == 2 else None
        assert other is None or other.difference(server.post("/v1/completions", other.body)).mean > 0.2


def test_without_the_head_in_the_folder_a_tied_model_keeps_its_old_head(servers, qwen_like, tmp_path):
    """Where this fails, vLLM has mended it, and `Kind.head` may go."""
    server, where = servers["tied"], jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sizes = {"rows": 1, "replicated": where, "prompt": 64, "tokens": 8, "known_ids": 256, "model": "policy"}
    make = prober(models.abstract(CONFIG, compute_dtype=jnp.float32)[0], CONFIG, "float32", **sizes)
    weights(tmp_path / "a", 0, qwen_like, scale=3)
    probe = make(weights(tmp_path / "b", 1, qwen_like, head=False, scale=3))
    server.load(tmp_path / "a")
    server.load(tmp_path / "b")
    assert probe.difference(server.post("/v1/completions", probe.body)).mean > 0.2


def by_vllm(server, folder, name, home):
    """The overrides of a run that this server samples, from the weights in `folder`."""
    return (
        *SETTINGS,
        f"--config.model.path={folder}",
        "--config.rollout.driver=servers",
        "--config.servers.kind=vllm",
        "--config.servers.model=policy",
        f"--config.servers.urls={server.url}",
        f"--config.servers.weights={home}",
        f"--config.run.name={name}",
    )


def gaps(folder):
    steps = [record for record in records(folder) if record["step"]]
    print([(f"{r['sampler_gap']:.2e}", f"{r['servers/probe_gap']:.2e}") for r in steps])
    return [record[name] for record in steps for name in ("sampler_gap", "servers/probe_gap")]


def test_in_bfloat16_a_run_trains_on_completions_whose_gap_is_that_of_rounding(servers, qwen_like, tmp_path):
    weights(tmp_path / "first", 0, qwen_like, dtype="bfloat16")
    settings = ["--config.model.compute_dtype=bfloat16", "--config.loss.sampler_correction=truncate"]
    overrides = by_vllm(servers["bfloat16"], tmp_path / "first", "r", tmp_path / "weights")
    run(tmp_path, 1, *overrides, *settings, devices=1)
    assert 1e-5 < max(gaps(tmp_path / "r")) < 0.02  # 8 bits of a logit of about 4, and rounding in 2 layers


def test_a_teacher_on_vllm_teaches_as_the_teacher_in_the_trainers_process(servers, qwen_like, tmp_path):
    server, folders = servers["untied"], {name: tmp_path / name for name in ("student", "teacher")}
    weights(folders["student"], 5, qwen_like, tie_embeddings=False)
    weights(folders["teacher"], 7, qwen_like, tie_embeddings=False, scale=3)
    server.load(folders["teacher"])
    common = [*SETTINGS, f"--config.model.path={folders['student']}", "--config.method=OPD", "--config.train.steps=2"]
    found = {}
    for name, teacher in (("here", folders["teacher"]), ("there", server.url)):
        flags = [f"--config.reference.path={teacher}", "--config.servers.model=policy", f"--config.run.name={name}"]
        run(tmp_path, 1, *common, *flags, devices=1)
        found[name] = [record for record in records(tmp_path / name) if record["step"]]
    assert found["here"][0]["kl"] > 0.5, "nats a token: the teacher is another policy"
    for name in ("loss", "kl", "grad_norm"):  # float32, by two engines
        there, here = ([step[name] for step in found[where]] for where in ("there", "here"))
        assert there == pytest.approx(here, rel=1e-3), name


def test_health_is_of_the_engine(servers):
    server = servers["tied"]
    engine = server.engine()
    assert server.get(KIND.health) == 200
    os.kill(engine, signal.SIGSTOP)
    try:
        assert server.get("/health") == 200 and server.get(KIND.health) == 0
    finally:
        os.kill(engine, signal.SIGCONT)
    assert server.get(KIND.health) == 200


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"/v1/completions answered 404: .*servers.model must name one of GET /v1/models"),
        ({"num_layers": 1}, " and the trainer disagree by .*"),  # vLLM says that it has loaded them
        (
            {"hidden_dim": 96},
            r"/collective_rpc answered 500: .*\(servers.kind=vllm needs vLLM with a model of .*shapes.*\)",
        ),
    ],
    ids=["name", "layers", "shape"],
)  # vLLM ends after the last
def test_a_server_that_does_not_fit_ends_the_run_with_one_line(servers, qwen_like, tmp_path, changes, said):
    weights(tmp_path / "first", 0, qwen_like, **changes)
    overrides = by_vllm(servers["untied" if changes else "tied"], tmp_path / "first", "r", tmp_path / "weights")
    if not changes:
        overrides = [*overrides, "--config.servers.model=other"]
    trainer = start(tmp_path, 1, *overrides, devices=1)
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 1 and "Traceback" not in output, output
    assert re.search(rf"^error: http://\S+{said}$", output, re.MULTILINE), output
    shutil.rmtree(tmp_path)


def test_an_engine_that_is_killed_ends_no_run_and_the_gap_stays_that_of_float32(servers, qwen_like, tmp_path):
    server = servers["tied"]
    weights(tmp_path / "first", 5, qwen_like)
    trainer = start(tmp_path, 1, *by_vllm(server, tmp_path / "first", "r", tmp_path / "weights"), devices=1)
    metrics = tmp_path / "r" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3:
        assert trainer[0].poll() is None, printed(trainer, timeout=60)
        time.sleep(0.05)
    os.kill(server.engine(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.get(KIND.health) == 200:  # 500 while its HTTP server lives
        assert time.monotonic() < deadline
    server.kill()
    server.start()  # with the weights of its own folder
    server.ready()
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 0, output
    assert sum(record.get("servers/failures", 0) for record in records(tmp_path / "r")) > 0
    assert max(gaps(tmp_path / "r")) < 1e-4
