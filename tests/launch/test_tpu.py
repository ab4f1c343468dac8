"""launch/tpu against a scripted cloud: each state and each error ends in the right action."""

from __future__ import annotations

import json
import re
import time

import pytest

from cloud import tpu
from cloud.shell import Shell

TPU = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b"
TRAINER = "-- --config=configs/tiny.py --config.mesh.fsdp=-1"
UP = f"up {TPU} --no-watch {TRAINER}"
NOT_FOUND = {"stderr": "ERROR: (gcloud.x) NOT_FOUND: Resource was not found"}
DESCRIBE = "queued-resources describe"


def queue(state, times=1, **more):
    return {"match": DESCRIBE, "code": 0, "times": times, "stdout": json.dumps({"state": {"state": state, **more}})}


def failed(message):
    return queue("FAILED", failedData={"error": {"message": message}})


def listed(*names, times=1):
    """The answer to a look into the bucket, where run.sh is and these files are."""
    lines = "\n".join(f"gs://mine/launch/rpg-4b/{name}" for name in ("run.sh", *names))
    return {"match": "storage ls", "code": 0, "times": times, "stdout": lines}


def absent():
    return {"match": DESCRIBE, **NOT_FOUND}


def test_a_new_request_is_created_and_trains_as_soon_as_it_boots(cloud):
    cloud.script(absent())
    assert cloud.run(UP) == 0
    assert len(cloud.called("queued-resources create")) == 1
    changes = [call for call in cloud.calls if "storage cp" in call or "queued-resources create" in call]
    assert "source.tar.gz" in changes[0] and "run.sh" in changes[1], "a worker that sees run.sh has its source"
    assert "queued-resources create" in changes[2], "and every boot finds both"


def test_what_is_up_already_is_not_requested_again(cloud):
    assert cloud.run(UP) == 0
    assert not cloud.called("queued-resources create")
    assert cloud.called("storage cp")[-1].split()[-2].endswith("run.sh"), "its workers see what they shall do"


def test_another_type_under_the_same_name_is_refused(cloud):
    spec = {"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": [{"node": {"acceleratorType": "v5p-32"}}]}}
    cloud.script({"match": DESCRIBE, "code": 0, "times": 9, "stdout": json.dumps(spec)})
    assert cloud.run(UP) == 1
    assert "exists as v5p-32, not v5p-16" in cloud.errors()[0]


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_a_dead_request_makes_room_for_a_new_one(cloud, state):
    cloud.script(queue(state))
    assert cloud.run(UP) == 0
    order = [call.split()[4] for call in cloud.called("queued-resources") if "describe" not in call]
    assert order == ["delete", "create"]


def test_a_preempted_tpu_comes_back_and_the_run_goes_on_until_it_has_finished(cloud):
    cloud.script(
        *[listed(times=3), listed("finished"), queue("ACTIVE", 2)],
        *[{"match": "tpu-vm describe", "code": 0, "times": 2, "stdout": '{"state": "READY"}'}],
        queue("SUSPENDED", 2),
    )
    assert cloud.run(f"up {TPU} --capacity=spot {TRAINER}") == 0
    assert len(cloud.called("queued-resources create")) == 1
    assert len(cloud.called("queued-resources delete")) == 2, "the lost one, and the one whose run has finished"
    assert "finished: gs://mine/runs/rpg-4b" in cloud.err and "deleted the TPU" in cloud.err
    assert "must stay alive" in cloud.err and "launch/xpk" in cloud.err


def test_a_tpu_that_is_to_be_kept_is_kept_and_costs(cloud):
    cloud.script(listed("finished"))
    assert cloud.run(f"up {TPU} --keep {TRAINER}") == 0
    assert len(cloud.called("queued-resources delete")) == 0
    assert "kept: the TPU still costs about $33.60 an hour" in cloud.err
    run = (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")
    assert "queued-resources delete" not in run


def test_workers_delete_their_own_tpu_when_the_run_has_ended(cloud):
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 0
    run = (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")
    assert "--free=gcloud compute tpus queued-resources delete rpg-4b --zone=us-east5-a" in run
    assert " --deadline=0 " in run and "no limit: --max-hours=N" in cloud.err


def test_a_limit_of_hours_is_a_time_on_the_workers_and_has_its_price(cloud):
    assert cloud.run(f"up --no-watch {TPU} --max-hours=10 {TRAINER}") == 0
    run = (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")
    (deadline,) = re.findall(r" --deadline=(\d+) ", run)
    assert 35_900 < int(deadline) - time.time() <= 36_000
    assert "at most $336: saved, ended and freed 10 hours from now" in cloud.err


@pytest.mark.parametrize(
    ("limits", "hours"), [("--budget=336", 10), ("--budget=336 --max-hours=2", 2), ("--budget=336 --max-hours=48", 10)]
)
def test_a_budget_is_the_hours_that_it_pays_for_unless_fewer_are_asked_for(cloud, limits, hours):
    assert cloud.run(f"up --no-watch {TPU} {limits} {TRAINER}") == 0
    run = (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")
    (deadline,) = re.findall(r" --deadline=(\d+) ", run)
    assert 3600 * hours - 100 < int(deadline) - time.time() <= 3600 * hours
    assert f"at most ${33.6 * hours:,.0f}: saved, ended and freed {hours} hours from now" in cloud.err


def test_google_ends_a_flex_start_at_the_limit_too(cloud):
    cloud.script(absent())
    assert cloud.run(f"up --no-watch {TPU} --capacity=flex-start --budget=336 {TRAINER}") == 0, cloud.err
    (command,) = cloud.called("queued-resources create")
    assert command.startswith("gcloud alpha compute tpus")
    assert "--provisioning-model=flex-start --max-run-duration=36000s" in command


def test_a_run_that_was_stopped_or_deleted_elsewhere_is_not_brought_back(cloud):
    cloud.script(
        *[queue("ACTIVE", 2), queue("SUSPENDED"), listed(times=2), {"match": "storage ls", **NOT_FOUND}],
    )
    assert cloud.run(f"up {TPU} {TRAINER}") == 1
    assert "stopped or deleted elsewhere" in cloud.errors()[0] and not cloud.called("queued-resources create")


def test_a_run_that_finishes_while_its_tpu_is_looked_for_is_not_brought_back(cloud):
    cloud.script(queue("ACTIVE"), listed(), absent(), listed("finished"))
    assert cloud.run(f"up {TPU} {TRAINER}") == 0, cloud.err
    assert "finished: gs://mine/runs/rpg-4b" in cloud.err and not cloud.called("queued-resources create")


@pytest.mark.parametrize("keep", ["", "--keep"])
def test_a_run_that_a_worker_has_given_up_is_not_waited_for(cloud, keep):
    cloud.script(
        listed("failed"),
        {"match": "storage cat", "code": 0, "stdout": "worker 1 ended with exit code 2"},
    )
    assert cloud.run(f"up {TPU} {keep} {TRAINER}") == 1
    assert cloud.waits == [] and "the run has failed: worker 1 ended with exit code 2" in cloud.errors()[0]
    assert "gs://mine/launch/rpg-4b/logs" in cloud.errors()[0]
    assert ("$33.60 an hour" in cloud.errors()[0]) == bool(keep)
    assert any(call.endswith("launch/rpg-4b/failed") for call in cloud.called("storage rm")), "of an earlier launch"


def test_a_vm_that_was_preempted_under_an_active_request_counts_as_lost(cloud, monkeypatch):
    monkeypatch.setattr(tpu, "MAX_RECREATIONS", 0)
    ready = {"match": "tpu-vm describe", "code": 0, "stdout": '{"state": "READY"}'}
    cloud.script(ready, {"match": "tpu-vm describe", "code": 0, "stdout": '{"state": "PREEMPTED"}'})
    assert cloud.run(f"up {TPU} {TRAINER}") == 1
    assert "PREEMPTED" in cloud.errors()[0] and "resumes" in cloud.errors()[0]


def test_no_capacity_is_asked_for_again_with_growing_pauses_up_to_the_cap(cloud, monkeypatch):
    monkeypatch.setattr(tpu, "MAX_RECREATIONS", 2)
    out_of_stock = failed("There is no more capacity in the zone us-east5-a")
    cloud.script(absent(), *[out_of_stock] * 9)
    assert cloud.run(f"up {TPU} {TRAINER}") == 1
    assert len(cloud.called("queued-resources create")) == 3
    assert cloud.waits == [30.0, 60.0, 60.0, 60.0]
    assert "no more capacity" in cloud.errors()[0] and "another zone" in cloud.errors()[0]


def test_a_tpu_that_was_up_has_all_its_recreations_again(cloud, monkeypatch):
    monkeypatch.setattr(tpu, "MAX_RECREATIONS", 1)
    up = [queue("ACTIVE"), {"match": "tpu-vm describe", "code": 0, "stdout": '{"state": "READY"}'}]
    cloud.script(absent(), queue("SUSPENDED", 2), *up, queue("SUSPENDED", 3))
    assert cloud.run(f"up {TPU} {TRAINER}") == 1
    assert len(cloud.called("queued-resources create")) == 3


@pytest.mark.parametrize(
    "said",
    [
        "Quota limit 'TPUV5PPerProject' has been exceeded. Limit: 0",
        "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied",
        "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login",
    ],
)
def test_what_does_not_go_away_is_asked_once_and_explained_as_gcloud_does(cloud, said):
    error = f"WARNING: x\nERROR: (gcloud.x) {said}"
    cloud.script(absent(), {"match": "queued-resources create", "times": 9, "stderr": error})
    assert cloud.run(UP) == 1
    assert len(cloud.called("queued-resources create")) == 1 and cloud.waits == []
    (line,) = cloud.errors()
    assert line.endswith(f"queued-resources create: (gcloud.x) {' '.join(said.split())}")


def test_quota_that_the_queue_reports_later_is_not_asked_for_again(cloud):
    cloud.script(absent(), failed("Quota limit 'TPUV5P' has been exceeded"))
    assert cloud.run(f"up {TPU} {TRAINER}") == 1
    assert len(cloud.called("queued-resources create")) == 1
    assert "Quota limit 'TPUV5P'" in cloud.errors()[0]


def test_a_cloud_that_does_not_answer_for_a_while_ends_no_watch(cloud):
    """gcloud tries each request several times; then the watch looks again a minute later, and requests a TPU once."""
    down = {"stderr": "ERROR: UNAVAILABLE: try later", "times": 2}
    cloud.script(
        *[absent(), {"match": "storage ls", **down}, queue("SUSPENDED", 2)],
        *[{"match": "queued-resources delete", **down, "times": 1}, queue("SUSPENDED", 2)],
        *[listed(times=4), listed("finished")],
    )
    assert cloud.run(f"up {TPU} {TRAINER}") == 0, cloud.err
    assert len(cloud.called("queued-resources create")) == 2 and cloud.err.count("looking again in 60 s") == 3
    assert "rpg-4b is still there and costs about $33.60 an hour" in cloud.err


def test_a_second_start_of_the_same_command_is_no_error(cloud):
    cloud.script(absent(), {"match": "queued-resources create", "stderr": "ERROR: ALREADY_EXISTS: requested already"})
    assert cloud.run(UP) == 0


def test_a_request_that_the_cloud_gives_up_in_time_is_not_asked_for_again(cloud):
    cloud.script(absent(), failed("The request has expired"))
    assert cloud.run(f"up {TPU} --give-up-after=12h {TRAINER}") == 1
    assert "--valid-until-duration=12h" in cloud.called("queued-resources create")[0]
    assert "is FAILED: The request has expired" in cloud.errors()[0]


@pytest.mark.parametrize("command", ["stop", "status", "delete --yes"])
@pytest.mark.parametrize(
    "options",
    [
        "--name='x$(id)' --bucket=gs://mine --zone=us-east5-a",
        "--name=rpg-4b --bucket='gs://mine/$(id)' --zone=us-east5-a",
        "--name=rpg-4b --bucket='gs://mine;id' --zone=us-east5-a",
        "--name=rpg-4b --bucket=gs://mine --zone='us-east5-a;id'",
        "--name=../rpg-4b --bucket=gs://mine --zone=us-east5-a",
        "--name=rpg-4b --bucket=gs://mine --zone=us-east5-a --service-account='a b'",
    ],
)
def test_no_command_takes_names_that_a_remote_shell_would_run(cloud, command, options):
    assert cloud.run(f"{command} --type=v5p-16 {options}") == 1
    assert all(len(line) < 300 for line in cloud.errors()) and cloud.errors()
    assert [call for call in cloud.calls if "get-value" not in call] == []


def test_stop_takes_away_what_workers_run(cloud):
    assert cloud.run(f"stop {TPU}") == 0
    assert cloud.called("storage rm")[0].endswith("gs://mine/launch/rpg-4b/run.sh")
    assert "within two minutes" in cloud.err and "costs about $33.60 an hour" in cloud.err


def test_ctrl_c_says_that_the_cloud_goes_on(cloud, monkeypatch):
    def interrupted(self, command):
        raise KeyboardInterrupt

    monkeypatch.setattr(Shell, "attempt", interrupted)
    assert cloud.run(f"stop {TPU}") == 130 and "interrupted here; in the cloud everything goes on" in cloud.err


def test_status_shows_the_cost_and_how_a_log_is_followed(cloud):
    assert cloud.run(f"status {TPU} --internal-ips --slices=2") == 0
    assert "rpg-4b: ACTIVE" in cloud.out and "costs about $67.20 an hour" in cloud.out
    command = "gcloud compute tpus tpu-vm ssh rpg-4b-0 --zone=us-east5-a --project=my-project --worker=0 --internal-ip"
    assert f"{command} '--command=sudo tail -n 200 -F /var/log/rpg.log'" in cloud.out


def test_delete_asks_and_says_what_still_costs(cloud, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: cloud.questions.append(question) or "n")
    cloud.questions = []
    assert cloud.run(f"delete {TPU}") == 1
    assert "v5p-16" in cloud.questions[0] and "$33.60" in cloud.questions[0] and not cloud.called("delete")
    cloud.script({"match": DESCRIBE, **NOT_FOUND})
    assert cloud.run(f"delete {TPU} --yes") == 0
    assert "Storage still costs: gs://mine/runs/rpg-4b" in cloud.err


def test_delete_without_a_terminal_needs_yes(cloud, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: (_ for _ in ()).throw(EOFError))
    assert cloud.run(f"delete {TPU}") == 1
    assert "--yes" in cloud.errors()[0]


def test_a_remembered_limit_that_is_refused_today_keeps_nothing_from_being_deleted(cloud):
    cloud.run(UP)
    file = cloud.home / "staging" / "job.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"max_hours": null', '"max_hours": 1e-9'), encoding="utf-8"
    )
    assert cloud.run("delete --yes --name=rpg-4b") == 0 and cloud.called("queued-resources delete")
    assert cloud.run("up --no-watch --name=rpg-4b") == 1 and "--max-hours=1e-09; use 0.1" in cloud.errors()[0]


def test_deleting_what_is_gone_is_fine_and_what_cannot_be_deleted_still_costs(cloud):
    cloud.script({"match": "queued-resources delete", **NOT_FOUND}, absent())
    assert cloud.run(f"delete {TPU} --yes") == 0
    cloud.script({"match": "queued-resources delete", "stderr": "ERROR: PERMISSION_DENIED: no"})
    assert cloud.run(f"delete {TPU} --yes") == 1
    assert "still there and costs about $33.60 an hour" in cloud.err


def test_later_commands_remember_what_was_launched(cloud):
    cloud.run(UP)
    assert cloud.run("status --name=rpg-4b") == 0
    assert "--zone=us-east5-a" in cloud.called("queued-resources describe")[-1]
    assert cloud.run("up --no-watch --name=rpg-4b") == 0
    assert "--config.mesh.fsdp=-1" in (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")


def test_no_secret_value_reaches_a_command_or_a_file(cloud, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    cloud.run(f"up {TPU} --no-watch --secret=WANDB_API_KEY=wandb-key {TRAINER}")
    written = [path.read_bytes() for path in cloud.home.rglob("*") if path.is_file()]
    assert not any(b"s3cr3t-value" in content for content in written)
    assert "WANDB_API_KEY=wandb-key" in (cloud.home / "staging" / "run.sh").read_text(encoding="utf-8")


def test_a_missing_gcloud_is_one_line(cloud, monkeypatch):
    monkeypatch.setenv("PATH", str(cloud.home))
    assert cloud.run(UP) == 1
    assert cloud.errors() == ["error: gcloud is not on PATH; install it (docs/cloud.md says where it comes from)"]
