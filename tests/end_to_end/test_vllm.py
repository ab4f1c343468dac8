"""A real vLLM on a CPU serves real trainers: its weights after each load, its log-probs, and its end midway.

The variable RPG_JAX_VLLM_PYTHON names the Python of an environment with vLLM, as docs/servers.md has it.
"""

import os
import re
import shutil
import signal
import time

import pytest

from rpg_jax.rollout.servers.server import KINDS
from tests.end_to_end.engines import SETTINGS, Server, gaps, probes, weights
from tests.end_to_end.test_processes import printed, records, run, start

PYTHON = os.environ.get("RPG_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="RPG_JAX_VLLM_PYTHON names no Python with vLLM"),
]
KIND = KINDS["vllm"]


def served(folder, dtype="float32"):
    flags = [f"--model={folder}", f"--dtype={dtype}", "--served-model-name=policy", "--max-model-len=256"]
    flags += ["--logprobs-mode=processed_logprobs", "--max-num-batched-tokens=8192"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags]
    return Server("vllm", command, environment, folder.with_suffix(f".{dtype}.log"), "EngineCore")


@pytest.fixture(scope="module")
def servers(tmp_path_factory, qwen_like):
    """A server of tied and one of untied weights in float32, and one of tied weights in bfloat16."""
    home, made = tmp_path_factory.mktemp("vllm"), {}
    weights(home / "tied", 0, qwen_like, head=False)  # as models are published
    weights(home / "untied", 0, qwen_like, tie_embeddings=False)
    made = {
        "tied": served(home / "tied"),
        "untied": served(home / "untied"),
        "bfloat16": served(home / "tied", "bfloat16"),
    }
    try:
        yield {name: server.ready() for name, server in made.items()}
    finally:
        for server in made.values():
            server.kill()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_after_each_load_the_log_probs_are_those_of_the_new_weights(servers, qwen_like, tmp_path, tied):
    server, shape = servers["tied" if tied else "untied"], {"tie_embeddings": tied}
    make = probes(**shape)
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
    server, make = servers["tied"], probes()
    weights(tmp_path / "a", 0, qwen_like, scale=3)
    probe = make(weights(tmp_path / "b", 1, qwen_like, head=False, scale=3))
    server.load(tmp_path / "a")
    server.load(tmp_path / "b")
    assert probe.difference(server.post("/v1/completions", probe.body)).mean > 0.2


def test_in_bfloat16_a_run_trains_on_completions_whose_gap_is_that_of_rounding(servers, qwen_like, tmp_path):
    weights(tmp_path / "first", 0, qwen_like, dtype="bfloat16")
    settings = ["--config.model.compute_dtype=bfloat16", "--config.loss.sampler_correction=truncate"]
    overrides = servers["bfloat16"].overrides(tmp_path / "first", "r", tmp_path / "weights")
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
    server = servers["untied" if changes else "tied"]
    overrides = server.overrides(tmp_path / "first", "r", tmp_path / "weights")
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
    trainer = start(tmp_path, 1, *server.overrides(tmp_path / "first", "r", tmp_path / "weights"), devices=1)
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
