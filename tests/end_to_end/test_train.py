"""Whole runs through the command line: every method, misspelt fields, kills at any moment."""

import json
import math
import re
import signal
import subprocess
import sys
import time

import pytest

from rpg_jax import losses
from rpg_jax.runs import cli, run_folder, train_command
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro, whole_runs
from tests.end_to_end.whole_runs import MICRO, ROOT, environment


def command(shared, runs, *overrides):
    return [
        sys.executable,
        "-m",
        "rpg_jax.train",
        f"--config={MICRO}",
        f"--config.run.dir={runs}",
        f"--config.warm_start.dir={shared}/warm_starts",
        *overrides,
    ]


def run(shared, runs, *overrides, check=True, optimised=False):
    env = environment(shared, optimised=optimised)
    done = subprocess.run(command(shared, runs, *overrides), cwd=ROOT, env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def checksum(done):
    return next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("weights checksum"))


def metrics(folder, times=False):
    """The lines of metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    own = ("seconds", "tokens_per_second", "time/", "host/")
    return lines if times else [{k: v for k, v in r.items() if not k.startswith(own)} for r in lines]


_PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
[_SECTION] = re.findall("^## The metrics of a step\n(.*?)^## ", _PAGE, re.MULTILINE | re.DOTALL)
EXPLAINED = {re.sub("/.*", "/", key) for key in re.findall("`([^` ]+)`", _SECTION)}

_FIRST = {m.loss: name for name, m in reversed(losses.METHODS.items())}
ONE_A_LOSS = [*_FIRST.values(), "RPG-REINFORCE-URKL"]
OTHERS = [name for name in losses.METHODS if name not in ONE_A_LOSS]


@pytest.mark.parametrize(
    "methods",  # a compilation each
    [pytest.param(ONE_A_LOSS, marks=pytest.mark.slow), pytest.param(OTHERS, marks=pytest.mark.soak)],
    ids=["one a loss", "others"],
)
def test_every_method_trains_and_leaves_a_complete_run_folder(warm, tmp_path, methods):
    arguments = "-m", "tests.end_to_end.every_method", tmp_path, warm / "warm_starts", *methods
    whole_runs.completed(arguments, environment(warm))
    losses_seen = {}
    for name in methods:
        method = losses.METHODS[name]
        folder = tmp_path / f"micro-{name.lower()}-seed0"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert config["loss"]["name"] == method.loss and config["reference"]["rule"] == method.reference
        records = metrics(folder)
        assert [r["step"] for r in records] == [0, 1, 2]
        written = {re.sub("/.*", "/", key) for r in metrics(folder, times=True) for key in r}
        assert not written - EXPLAINED, f"{name}: docs/running.md does not explain these metrics"
        assert all(r["updates"] == 2 * r["step"] and r["skipped_updates"] == 0 for r in records[1:])
        assert all(r["sampler_gap"] <= 1e-4 for r in records[1:]), name
        assert all(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in records[1:]), name
        for file in ("curves.png", "summary.md", "samples.jsonl", "versions.json", "tokenizer.model"):
            assert (folder / file).stat().st_size > 0, f"{name}: {file}"
        losses_seen[name] = records[1]["loss"]
    assert len(set(losses_seen.values())) > len(methods) // 2, losses_seen  # the same completions, different losses


@pytest.mark.slow
@pytest.mark.parametrize("optimised", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_run_killed_at_any_moment_ends_as_one_that_was_not(warm, tmp_path, popen, optimised):
    """Groups are carried over from step to step, and the reference moves in the middle of steps. The programs of users
    are optimised."""
    settings = (
        "--config.train.steps=12",
        "--config.reference.every=3updates",
        "--config.dynamic_sampling.oversample=2",
        "--config.dynamic_sampling.surplus=carry",
        "--config.run.name=r",
    )
    straight = run(warm, tmp_path / "straight", *settings, optimised=optimised)
    compilations = [r.get("time/compilations", 0) for r in metrics(tmp_path / "straight" / "r", times=True)]
    assert compilations[1] > 0 and sum(compilations[4:]) == 0, "steps after the first few compile nothing"
    assert sum(r.get("groups_carried_in", 0) for r in metrics(tmp_path / "straight" / "r")) > 0
    killed_at, attempts = [], 0
    while len(killed_at) < 3:
        attempts += 1
        assert attempts < 12, "the run ended before it could be killed three times"
        folder = tmp_path / "killed" / "r"
        process = popen(
            command(warm, tmp_path / "killed", *settings),
            cwd=ROOT,
            env=environment(warm, optimised=optimised),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wanted = (killed_at[-1] if killed_at else 0) + 2
        while process.poll() is None:
            done = len(metrics_or_nothing(folder))
            if done > wanted:
                time.sleep(0.013 * attempts)  # not always at the same place within a step
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed_at.append(done)
            time.sleep(0.005)
        if process.returncode == 0:
            break
    resumed = run(warm, tmp_path / "killed", *settings, optimised=optimised)
    assert killed_at, "no kill landed"
    assert checksum(resumed) == checksum(straight)
    assert metrics(tmp_path / "killed" / "r") == metrics(tmp_path / "straight" / "r")


def metrics_or_nothing(folder):
    file = folder / "metrics.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def four_steps(warm, tmp_path_factory):
    """(what it printed, its folder) of a run that is left alone."""
    folder = tmp_path_factory.mktemp("four")
    return run(warm, folder, "--config.train.steps=4", "--config.run.name=r"), folder / "r"


UNHURRIED = "--config.run.stop_seconds=300"  # on a busy machine too, a step is finished and saved


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_continues(warm, tmp_path, popen):
    settings = ("--config.train.steps=2000", "--config.run.name=r", "--config.evaluation.every=1000", UNHURRIED)
    process = popen(
        command(warm, tmp_path, *settings), cwd=ROOT, env=environment(warm), stdout=subprocess.PIPE, text=True
    )
    while len(metrics_or_nothing(tmp_path / "r")) < 4:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and "the same command continues" in output
    stopped_at = metrics(tmp_path / "r")[-1]["step"]
    shorter = [s.replace("2000", str(stopped_at + 1)) for s in settings]
    assert f"after step {stopped_at}" in run(warm, tmp_path, *shorter).stdout


def interrupted(shared, runs, settings, *how):
    """A run that gets a signal as tests/end_to_end/killed.py describes it."""
    return subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.killed", *map(str, how), *command(shared, runs, *settings)[3:]],
        cwd=ROOT,
        env=environment(shared),
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_stopped_before_an_evaluation_saves_the_step_and_evaluates_it_when_it_continues(
    warm, tmp_path, four_steps
):
    settings = ("--config.train.steps=4", "--config.run.name=r", UNHURRIED)
    straight, folder = four_steps
    stopped = tmp_path / "stopped"
    done = interrupted(warm, stopped, settings, "update", 3, 0, int(signal.SIGTERM))  # the first update of step 2
    assert "stopped after step 2 and saved" in done.stdout, done.stdout + done.stderr
    assert [r["step"] for r in metrics(stopped / "r")] == [0, 1]
    resumed = run(warm, stopped, *settings)
    assert "after step 2" in resumed.stdout and checksum(resumed) == checksum(straight)
    assert metrics(stopped / "r") == metrics(folder)
    assert "eval/accuracy" in metrics(stopped / "r")[2]


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 4], ids=["evaluation due", "none due"])
def test_a_run_killed_as_its_checkpoint_completes_has_lost_no_line(warm, tmp_path, every, four_steps):
    settings = ("--config.train.steps=4", f"--config.evaluation.every={every}", "--config.run.name=r")
    straight, folder = four_steps  # which evaluates every second step
    killed = tmp_path / "killed"
    done = interrupted(warm, killed, settings, "saved", 1, 0, int(signal.SIGKILL))
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    resumed = run(warm, killed, *settings)
    assert "after step 2" in resumed.stdout and checksum(resumed) == checksum(straight)
    expected = metrics(folder)
    if every == 4:
        expected[2] = {k: v for k, v in expected[2].items() if not k.startswith("eval/")}
    assert metrics(killed / "r") == expected


@pytest.mark.slow
def test_a_sampler_that_is_not_the_policy_stops_the_run_after_the_step_is_written_down(warm, tmp_path):
    settings = ("--config.rollout.int8=True", "--config.rollout.max_sampler_gap=1e-6", "--config.run.name=r")
    done = run(warm, tmp_path, *settings, check=False)
    assert (
        done.returncode == cli.GAVE_UP
        and "sampler and trainer disagree" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert metrics(tmp_path / "r")[-1]["sampler_gap"] > 1e-6 and metrics(tmp_path / "r")[-1]["step"] == 1


def test_a_misspelt_field_is_one_line_that_names_the_right_one(shared, tmp_path):
    done = run(shared, tmp_path, "--config.los.kl_coef=1", check=False)
    assert done.returncode == 2 and done.stderr.strip().count("\n") == 0
    assert "'los.kl_coef'; did you mean loss.kl_coef?" in done.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--config.method=GRPO --config.loss.divergence=urkl", "divergence"),
        ("--config.method=RPG-REINFORCE-URLK", "RPG-REINFORCE-URKL"),
        ("--config.loss.kl_coef=much", "much"),
        ("--config.rollout.driver=vllm", "orchestrator"),
        ("--config.train.updates_per_step=3", "multiple"),
        ("kl_coef=3", "--config."),
    ],
)
def test_bad_values_are_one_line_with_the_fix(tmp_path, capsys, override, expected):
    assert train_command.main([f"--config={MICRO}", f"--config.run.dir={tmp_path}", *override.split()]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.strip().count("\n") == 0, said


def test_a_named_run_with_another_config_is_refused_naming_the_field(tmp_path, capsys):
    config = micro.get_config()
    config.run.dir, config.run.name = str(tmp_path), "r"
    run_folder.open_run(resolve(config), run_folder.of(config))
    (tmp_path / "r" / "metrics.jsonl").write_text(
        '{"step": 1}\n', encoding="utf-8"
    )  # a run without a step is moved aside
    flags = (f"--config.run.dir={tmp_path}", "--config.run.name=r", "--config.loss.kl_coef=0.5")
    assert train_command.main([f"--config={MICRO}", *flags]) == 2
    assert "loss.kl_coef was 0.0001, now 0.5" in capsys.readouterr().err


def test_help_lists_every_field_with_its_meaning(shared, tmp_path):
    done = run(shared, tmp_path, "--help")
    assert "loss.divergence" in done.stdout and "configs/tiny.py" in done.stdout
    assert "tokens before the limit over which the punishment grows" in done.stdout
