"""Metrics reach every tracker through its real client, without a network; a resumed run continues under its name."""

import sqlite3
import sys

import pytest

from configs import base
from rpg_jax.runs import logs
from rpg_jax.runs.logs import PACKAGES, RunLog, chosen, needed, trackers_of
from rpg_jax.training.loop import Step


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = base.get_config()
    monkeypatch.setenv("WANDB_MODE", "offline")
    config.run.name, config.log.project = "r", "p"
    return config


def logged_twice(config, name, folder):
    """Steps 1 to 3, then again from step 3, which the first process wrote without a checkpoint."""
    pytest.importorskip(PACKAGES[name], reason=f"pip install {PACKAGES[name]} runs this test")
    config.log.tracker = name
    for after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = RunLog(folder, samples=0)
        log.trackers = trackers_of(config, folder, after=after)
        for step in steps:
            metrics = {"eval/held out/pass@1": step + after / 8, "name": "text", "loss": float("nan")}
            log.append(Step(step, None, metrics))
        log.close()


def test_a_tracker_that_cannot_be_reached_is_left_out_and_ends_no_run(config, tmp_path, monkeypatch, capsys):
    def unreachable(place):
        raise TimeoutError("Run initialization has timed out after 90.0 sec.\nmore")

    monkeypatch.setitem(logs.TRACKERS, "wandb", unreachable)
    config.log.tracker = "wandb"
    assert trackers_of(config, tmp_path, after=0) == []
    said = "log.tracker: wandb is left out: TimeoutError: Run initialization has timed out after 90.0 sec.; "
    assert capsys.readouterr().err == f"{said}metrics.jsonl has every step\n"


def test_tensorboard_hides_what_a_resumed_run_does_again(config, tmp_path):
    logged_twice(config, "tensorboard", tmp_path)
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert files and all(b"eval/held_out/pass_1" in f.read_bytes() and b"loss" not in f.read_bytes() for f in files)


@pytest.mark.slow  # starts a service of its own
def test_wandb_writes_offline(config, tmp_path):
    logged_twice(config, "wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/run-r.wandb"))


@pytest.mark.slow  # makes a database
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # of MLflow
def test_mlflow_keeps_one_run_with_its_config_and_the_last_value_of_a_step(config, tmp_path):
    logged_twice(config, "mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.run_name == "r" and run.info.status == "FINISHED" and run.data.params["rollout.top_p"] == "1.0"
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "eval/held out/pass_1")]
    assert sorted(history) == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.25), (4, 4.25)] and "loss" not in run.data.metrics


@pytest.mark.slow  # its writer is a thread of its own
def test_trackio_keeps_one_run(config, tmp_path):
    logged_twice(config, "trackio", tmp_path)
    [file] = (tmp_path / "trackio").rglob("p.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step FROM metrics ORDER BY step").fetchall()
    assert {name for name, _ in rows} == {"r"} and {step for _, step in rows} == {1, 2, 3, 4}


def test_trackers_are_named_and_a_missing_package_is_one_line(monkeypatch):
    assert chosen("wandb, mlflow") == ["wandb", "mlflow"] and chosen("") == []
    with pytest.raises(ValueError, match="log.tracker='wandbb': no tracker 'wandbb'; there are tensorboard, wandb"):
        chosen("wandbb")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="log.tracker=tensorboard needs the package tensorboardX: pip install"):
        needed("tensorboard")
