"""A real SGLang on a CPU serves real trainers: its weights after each load, its log-probs, and its end midway.

The variable RPG_JAX_SGLANG_PYTHON names the Python of an environment with SGLang, as docs/servers.md has it.
"""

import os
import re
import shutil
import signal
import time

import pytest

from rpg_jax.rollout.servers.server import KINDS
from tests.end_to_end import conversing
from tests.end_to_end.engines import SETTINGS, Server, gaps, probes, weights
from tests.end_to_end.test_processes import printed, records, run, start
from tests.end_to_end.whole_runs import ROOT

PYTHON = os.environ.get("RPG_JAX_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="RPG_JAX_SGLANG_PYTHON names no Python with SGLang"),
]
KIND = KINDS["sglang"]


def served(folder, dtype="float32"):
    flags = [f"--model-path={folder}", f"--dtype={dtype}", "--served-model-name=policy", "--context-length=256"]
    flags += ["--device=cpu", "--attention-backend=torch_native", "--disable-overlap-schedule"]
    flags += ["--mem-fraction-static=0.1", "--max-total-tokens=8192"]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT / "tests/end_to_end/without_kernels")}
    command = [PYTHON, "-m", "sglang.launch_server", *flags]
    return Server("sglang", command, environment, folder.with_suffix(f".{dtype}.log"), "sglang::scheduler")


@pytest.fixture(scope="module")
def servers(tmp_path_factory, qwen_like):
    """A server of tied and one of untied weights in float32, and one of tied weights in bfloat16."""
    home = tmp_path_factory.mktemp("sglang")
    weights(home / "tied", 0, qwen_like, head=False)  # as models are published
    weights(home / "untied", 0, qwen_like, tie_embeddings=False)
    made = {"tied": served(home / "tied"), "untied": served(home / "untied")}
    made["bfloat16"] = served(home / "tied", "bfloat16")
    try:
        yield {name: server.ready() for name, server in made.items()}
    finally:
        for server in made.values():
            server.kill()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_after_each_load_the_log_probs_are_those_of_the_new_weights(servers, qwen_like, tmp_path, tied):
    """Tied embeddings need no head in the folder, as `Kind.head` says."""
    server, shape, answers = servers["tied" if tied else "untied"], {"tie_embeddings": tied}, {}
    make = probes(**shape)
    for name in ("a", "b", "a", "b"):
        if name not in answers:
            seed = {"a": 0, "b": 1}[name]
            answers[name] = make(weights(tmp_path / name, seed, qwen_like, scale=3, head=not tied, **shape))
        server.load(tmp_path / name)
        probe = answers[name]
        # float32: 64 products a sum, 2 layers; other programs round them otherwise
        assert probe.difference(server.post("/v1/completions", probe.body)).mean < 1e-4
        other = answers["a" if name == "b" else "b"] if len(answers) == 2 else None
        assert other is None or other.difference(server.post("/v1/completions", other.body)).mean > 0.2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_run_trains_on_completions_whose_gap_is_that_of_float32(servers, qwen_like, tmp_path, temperature):
    weights(tmp_path / "first", 5, qwen_like, scale=3)
    overrides = servers["tied"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    run(tmp_path, 1, *overrides, f"--config.rollout.temperature={temperature}", devices=1)
    assert max(gaps(tmp_path / "r")) < 1e-4


def test_in_bfloat16_a_run_trains_on_completions_whose_gap_is_that_of_rounding(servers, qwen_like, tmp_path):
    weights(tmp_path / "first", 0, qwen_like, dtype="bfloat16")
    settings = ["--config.model.compute_dtype=bfloat16", "--config.loss.sampler_correction=truncate"]
    overrides = servers["bfloat16"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    run(tmp_path, 1, *overrides, *settings, devices=1)
    assert 1e-5 < max(gaps(tmp_path / "r")) < 0.02  # 8 bits of a logit of about 4, and rounding in 2 layers


def test_conversations_end_at_the_turns_that_the_environment_gives_and_the_gap_is_that_of_float32(
    servers, qwen_like, tmp_path
):
    weights(tmp_path / "first", 5, qwen_like)
    overrides = servers["tied"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    game = (*conversing.FLAGS, "--config.rewards.parts=environment:1", "--config.train.steps=1")
    game += ("--config.environment.turn_tokens=40", "--config.rollout.max_tokens=120")  # a turn in four ends by itself
    run(tmp_path, 1, *overrides, *game, devices=1)
    assert max(gaps(tmp_path / "r")) < 1e-4
    assert records(tmp_path / "r")[1]["turns"] > 1


def test_a_teacher_on_sglang_teaches_as_the_teacher_in_the_trainers_process(servers, qwen_like, tmp_path):
    server, folders = servers["untied"], {name: tmp_path / name for name in ("student", "teacher")}
    weights(folders["student"], 5, qwen_like, tie_embeddings=False)
    weights(folders["teacher"], 7, qwen_like, tie_embeddings=False, scale=3)
    server.load(folders["teacher"])
    common = [*SETTINGS, f"--config.model.path={folders['student']}", "--config.method=OPD", "--config.train.steps=2"]
    found = {}
    for name, teacher in (("here", folders["teacher"]), ("there", server.url)):
        flags = [f"--config.reference.path={teacher}", "--config.servers.kind=sglang", "--config.servers.model=policy"]
        flags += [f"--config.run.name={name}"]
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
        assert server.get(KIND.health) == 0
    finally:
        os.kill(engine, signal.SIGCONT)
    assert server.get(KIND.health) == 200


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 1}, {"hidden_dim": 96}],
    ids=["layers", "hidden"],
)
def test_a_server_that_does_not_fit_ends_the_run_with_one_line(servers, qwen_like, tmp_path, changes):
    """SGLang answers that it has loaded weights of other shapes; the probe sees that it has not."""
    weights(tmp_path / "first", 0, qwen_like, **changes)
    overrides = servers["untied"].overrides(tmp_path / "first", "r", tmp_path / "weights")
    trainer = start(tmp_path, 1, *overrides, devices=1)
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 1 and "Traceback" not in output, output
    said = r"^error: http://\S+ and the trainer disagree by .*servers.kind=sglang needs SGLang .*shapes"
    assert re.search(said, output, re.MULTILINE), output
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
    while server.get(KIND.health) == 200:
        assert time.monotonic() < deadline
    server.kill()
    server.start()  # with the weights of its own folder
    server.ready()
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 0, output
    assert sum(record.get("servers/failures", 0) for record in records(tmp_path / "r")) > 0
    assert max(gaps(tmp_path / "r")) < 1e-4


def test_weights_that_another_client_loads_midway_are_replaced_and_train_nothing(servers, qwen_like, tmp_path):
    """SGLang's answers have the label of its last load."""
    server = servers["tied"]
    weights(tmp_path / "first", 5, qwen_like)
    weights(tmp_path / "other", 9, qwen_like, scale=3)
    trainer = start(tmp_path, 1, *server.overrides(tmp_path / "first", "r", tmp_path / "weights"), devices=1)
    metrics = tmp_path / "r" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3:
        assert trainer[0].poll() is None, printed(trainer, timeout=60)
        time.sleep(0.05)
    for _ in range(3):  # one of them while completions are under way
        server.load(tmp_path / "other", "other")
        time.sleep(2)
    (output,) = printed(trainer, timeout=300)
    assert trainer[0].returncode == 0, output
    assert sum(record.get("servers/failures", 0) for record in records(tmp_path / "r")) > 0
    assert max(gaps(tmp_path / "r")) < 1e-4
