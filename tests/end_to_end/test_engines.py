"""A real vLLM and a real SGLang on a CPU serve real trainers: the weights after a load, the log-probs, an engine's end.

The variables RPG_JAX_VLLM_PYTHON and RPG_JAX_SGLANG_PYTHON name the Pythons of environments with them, as
docs/servers.md has it. The tests of a program without its variable are skipped.
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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from rpg_jax import models
from rpg_jax.rollout.servers.protocol import prober
from rpg_jax.rollout.servers.server import KINDS
from tests.end_to_end import conversing
from tests.end_to_end.test_processes import printed, records, reserve_port, run, start
from tests.end_to_end.whole_runs import ROOT

pytestmark = pytest.mark.slow

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


class Program(NamedTuple):
    """How to start the program of a kind of servers.

    Attributes:
      python: the variable that names the Python of an environment with the program, as docs/servers.md has it.
      command: the module and its options.
      folder: the option that names the folder of the weights.
      engine: a text in the command line of the process that samples.
      env: variables of the environment.
    """

    python: str
    command: list[str]
    folder: str
    engine: str
    env: dict[str, str]


PROGRAMS = {
    "vllm": Program(
        "RPG_JAX_VLLM_PYTHON",
        ["vllm.entrypoints.openai.api_server", "--max-model-len=256"]
        + ["--logprobs-mode=processed_logprobs", "--max-num-batched-tokens=8192"],
        "--model",
        "EngineCore",
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "sglang": Program(
        "RPG_JAX_SGLANG_PYTHON",
        ["sglang.launch_server", "--context-length=256", "--device=cpu", "--attention-backend=torch_native"]
        + ["--disable-overlap-schedule", "--mem-fraction-static=0.1", "--max-total-tokens=8192"],
        "--model-path",
        "sglang::scheduler",
        {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT / "tests/end_to_end/without_kernels")},
    ),
}


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
    """A server of the kind `name` for the weights in `folder`. It may be killed and started again."""

    def __init__(self, name, folder, dtype="float32"):
        reserved, self.port = reserve_port()
        reserved.close()
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder.with_suffix(f".{dtype}.log")
        self.name, self.kind, program = name, KINDS[name], PROGRAMS[name]
        self._env, self._engine = program.env, program.engine
        flags = [f"{program.folder}={folder}", f"--dtype={dtype}", "--host=127.0.0.1", f"--port={self.port}"]
        python = os.environ[program.python]
        self._command = [python, "-m", *program.command, "--served-model-name=policy", *flags]
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
        """Makes the server load weights. SGLang refuses while a request ends; then again, as the trainer does."""
        deadline = time.monotonic() + 20
        for path, body in self.kind.loads(str(folder), label):
            while True:
                try:
                    self.post(path, body)
                    break
                except urllib.error.HTTPError as error:
                    again = self.kind.contrary in error.read().decode() and self.name == "sglang"
                    assert again and time.monotonic() < deadline, error
                    time.sleep(0.5)

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
            f"--config.servers.kind={self.name}",
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


def by(*names):
    """The test for the servers of each of the kinds `names`."""
    return pytest.mark.parametrize("servers", names, indirect=True, scope="module")


both = by(*PROGRAMS)


@pytest.fixture(scope="module")
def servers(request, tmp_path_factory, qwen_like):
    """A server of tied and one of untied weights in float32, and one of tied weights in bfloat16."""
    name, made = request.param, {}
    if PROGRAMS[name].python not in os.environ:
        pytest.skip(f"{PROGRAMS[name].python} names no Python with {name}")
    home = tmp_path_factory.mktemp(name)
    weights(home / "tied", 0, qwen_like, head=False)  # as models are published
    weights(home / "untied", 0, qwen_like, tie_embeddings=False)
    try:
        made["tied"] = Server(name, home / "tied")
        made["untied"] = Server(name, home / "untied")
        made["bfloat16"] = Server(name, home / "tied", "bfloat16")
        yield {key: server.ready() for key, server in made.items()}
    finally:
        for server in made.values():
            server.kill()


def after_two_steps(folder, trainer):
    """Waits until a run has the lines of step 0, 1 and 2."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3:
        assert trainer[0].poll() is None, printed(trainer, timeout=60)
        time.sleep(0.05)


def ends_well(folder, trainer):
    """Waits until a run ends: with good gaps, although a server has failed."""
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 0, output
    assert sum(record.get("servers/failures", 0) for record in records(folder)) > 0
    assert max(gaps(folder)) < 1e-4


@both
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_after_each_load_the_log_probs_are_those_of_the_new_weights(servers, qwen_like, tmp_path, tied):
    server, shape, answers = servers["tied" if tied else "untied"], {"tie_embeddings": tied}, {}
    make, head = probes(**shape), not tied or server.kind.head
    for name, seed in (("a", 0), ("b", 1), ("a", 0), ("b", 1)):
        if name not in answers:
            answers[name] = make(weights(tmp_path / name, seed, qwen_like, scale=3, head=head, **shape))
        server.load(tmp_path / name)
        probe = answers[name]
        # float32: 64 products a sum, 2 layers; other programs round them otherwise
        assert probe.difference(server.post("/v1/completions", probe.body)).mean < 1e-4
        other = answers["a" if name == "b" else "b"] if len(answers) == 2 else None
        assert other is None or other.difference(server.post("/v1/completions", other.body)).mean > 0.2


@by("vllm")
def test_without_the_head_in_the_folder_a_tied_model_keeps_its_old_head(servers, qwen_like, tmp_path):
    """Where this fails, vLLM has mended it, and `Kind.head` may go."""
    server, make = servers["tied"], probes()
    weights(tmp_path / "a", 0, qwen_like, scale=3)
    probe = make(weights(tmp_path / "b", 1, qwen_like, head=False, scale=3))
    server.load(tmp_path / "a")
    server.load(tmp_path / "b")
    assert probe.difference(server.post("/v1/completions", probe.body)).mean > 0.2


@both
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_run_trains_on_completions_whose_gap_is_that_of_float32(servers, qwen_like, tmp_path, temperature):
    weights(tmp_path / "first", 5, qwen_like, scale=3)
    overrides = servers["tied"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    run(tmp_path, 1, *overrides, f"--config.rollout.temperature={temperature}", devices=1)
    assert max(gaps(tmp_path / "r")) < 1e-4


@both
def test_in_bfloat16_a_run_trains_on_completions_whose_gap_is_that_of_rounding(servers, qwen_like, tmp_path):
    weights(tmp_path / "first", 0, qwen_like, dtype="bfloat16")
    settings = ["--config.model.compute_dtype=bfloat16", "--config.loss.sampler_correction=truncate"]
    overrides = servers["bfloat16"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    run(tmp_path, 1, *overrides, *settings, devices=1)
    assert 1e-5 < max(gaps(tmp_path / "r")) < 0.02  # 8 bits of a logit of about 4, and rounding in 2 layers


@both
def test_conversations_of_several_turns_have_the_gap_of_float32(servers, qwen_like, tmp_path):
    weights(tmp_path / "first", 5, qwen_like)
    overrides = servers["tied"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    game = (*conversing.FLAGS, "--config.rewards.parts=environment:1", "--config.train.steps=1")
    game += ("--config.environment.turn_tokens=40", "--config.rollout.max_tokens=120")  # a turn in four ends by itself
    run(tmp_path, 1, *overrides, *game, devices=1)
    assert max(gaps(tmp_path / "r")) < 1e-4
    assert records(tmp_path / "r")[1]["turns"] > 1


@both
def test_a_teacher_on_servers_teaches_as_the_teacher_in_the_trainers_process(servers, qwen_like, tmp_path):
    server, folders = servers["untied"], {name: tmp_path / name for name in ("student", "teacher")}
    weights(folders["student"], 5, qwen_like, tie_embeddings=False)
    weights(folders["teacher"], 7, qwen_like, tie_embeddings=False, scale=3)
    server.load(folders["teacher"])
    common = [*SETTINGS, f"--config.model.path={folders['student']}", "--config.method=OPD", "--config.train.steps=2"]
    common += [f"--config.servers.kind={server.name}", "--config.servers.model=policy"]
    found = {}
    for name, teacher in (("here", folders["teacher"]), ("there", server.url)):
        run(tmp_path, 1, *common, f"--config.reference.path={teacher}", f"--config.run.name={name}", devices=1)
        found[name] = [record for record in records(tmp_path / name) if record["step"]]
    assert found["here"][0]["kl"] > 0.5, "nats a token: the teacher is another policy"
    for name in ("loss", "kl", "grad_norm"):  # float32, by two engines
        there, here = ([step[name] for step in found[where]] for where in ("there", "here"))
        assert there == pytest.approx(here, rel=1e-3), name


@both
def test_health_is_of_the_engine(servers):
    server = servers["tied"]
    engine = server.engine()
    assert server.get(server.kind.health) == 200
    os.kill(engine, signal.SIGSTOP)
    try:
        assert server.get(server.kind.health) == 0
        assert server.name != "vllm" or server.get("/health") == 200, "why `Kind.health` is another path"
    finally:
        os.kill(engine, signal.SIGCONT)
    assert server.get(server.kind.health) == 200


@both
def test_an_engine_that_is_killed_ends_no_run_and_the_gap_stays_that_of_float32(servers, qwen_like, tmp_path):
    server = servers["tied"]
    weights(tmp_path / "first", 5, qwen_like)
    trainer = start(tmp_path, 1, *server.overrides(tmp_path / "first", "r", tmp_path / "weights"), devices=1)
    after_two_steps(tmp_path / "r", trainer)
    os.kill(server.engine(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.get(server.kind.health) == 200:  # vLLM: 500 while its HTTP server lives
        assert time.monotonic() < deadline
    server.kill()
    server.start()  # with the weights of its own folder
    server.ready()
    ends_well(tmp_path / "r", trainer)


@by("sglang")
def test_weights_that_another_client_loads_midway_are_replaced_and_train_nothing(servers, qwen_like, tmp_path):
    """SGLang's answers have the label of its last load."""
    server = servers["tied"]
    weights(tmp_path / "first", 5, qwen_like)
    weights(tmp_path / "other", 9, qwen_like, scale=3)
    trainer = start(tmp_path, 1, *server.overrides(tmp_path / "first", "r", tmp_path / "weights"), devices=1)
    after_two_steps(tmp_path / "r", trainer)
    for _ in range(3):  # one of them while completions are under way
        server.load(tmp_path / "other", "other")
        time.sleep(2)
    ends_well(tmp_path / "r", trainer)


DISAGREE = r" and the trainer disagree by .*\(servers.kind=.* needs .*shapes.*\)"  # the server said that it had loaded
MISFITS = {
    "vllm": {
        "name": r"/v1/completions answered 404: .*servers.model must name one of GET /v1/models",
        "num_layers": DISAGREE,
        "hidden_dim": r"/collective_rpc answered 500: .*\(servers.kind=vllm needs vLLM with .*shapes.*\)",  # vLLM ends
    },
    "sglang": {"name": None, "num_layers": DISAGREE, "hidden_dim": DISAGREE},
}


@both
@pytest.mark.parametrize(
    ("misfit", "changes"), [("name", {}), ("num_layers", {"num_layers": 1}), ("hidden_dim", {"hidden_dim": 96})]
)
def test_a_server_that_does_not_fit_ends_the_run_with_one_line(servers, qwen_like, tmp_path, misfit, changes):
    server = servers["untied" if changes else "tied"]
    if (said := MISFITS[server.name][misfit]) is None:
        pytest.skip(f"{server.name} takes any {misfit}")
    weights(tmp_path / "first", 0, qwen_like, **changes)
    overrides = server.overrides(tmp_path / "first", "r", tmp_path / "weights")
    if misfit == "name":
        overrides = [*overrides, "--config.servers.model=other"]
    trainer = start(tmp_path, 1, *overrides, devices=1)
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 1 and "Traceback" not in output, output
    assert re.search(rf"^error: http://\S+{said}$", output, re.MULTILINE), output
    shutil.rmtree(tmp_path)
