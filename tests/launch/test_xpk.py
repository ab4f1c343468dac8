"""launch/xpk against a scripted cloud."""

from __future__ import annotations

import fnmatch
import json
import re
import signal
import subprocess

import pytest

from cloud import files
from cloud.errors import LaunchError
from cloud.job import ROOT
from cloud.shell import Shell
from rpg_jax.runs import cli, processes

TPU = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b --cluster=c"
TRAINER = "-- --config=configs/tiny.py --config.mesh.fsdp=-1"


def jobsets(*conditions):
    status = {"conditions": [{"type": condition, "status": "True"} for condition in conditions]}
    return {"match": "get jobset rpg-4b", "code": 0, "stdout": json.dumps({"status": status})}


def test_what_is_submitted_already_is_not_submitted_again(cloud):
    cloud.script(jobsets())
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}", "xpk") == 0
    assert not cloud.called("workload create") and "submitted already" in cloud.err


def test_edits_have_an_image_of_their_own(cloud, monkeypatch):
    monkeypatch.setattr(files, "commit", lambda: "0123456789abcdef-dirty")
    for content in (b"one edit", b"another", b"one edit"):
        monkeypatch.setattr(files, "source_archive", lambda content=content: content)
        cloud.script(jobsets("Completed"))
        assert cloud.run(f"up --no-watch {TPU} {TRAINER}", "xpk") == 0
    first, second, third = (re.search(r"--docker-image=(\S+)", call)[1] for call in cloud.called("workload create"))
    assert first == third != second and "/rpg:0123456789ab-" in first


@pytest.mark.parametrize("ended", ["Completed", "Failed"])
def test_a_run_that_ended_is_submitted_anew_and_resumes(cloud, ended):
    cloud.script(jobsets(ended))
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}", "xpk") == 0
    (call,) = cloud.called("workload create")
    assert "--config.run.name=rpg-4b" in call and "--max-restarts=20" in call


def test_a_later_command_finds_the_cluster_that_was_named_once(cloud):
    """By the run's name `delete` would find no cluster, and would say that the one that costs is deleted."""
    assert cloud.run(f"up --no-watch --capacity=reserved --reservation=r {TPU} {TRAINER}", "xpk") == 0
    for command, call in (("stop", "workload delete"), ("delete --yes", "cluster delete")):
        assert cloud.run(f"{command} --name=rpg-4b", "xpk") == 0
        assert all("--cluster=c " in line for line in cloud.called(call)) and cloud.called(call)
    assert cloud.run(f"up --no-watch --name=rpg-4b {TRAINER}", "xpk") == 0
    assert all("--reservation=r" in line for line in cloud.called("cluster create"))


@pytest.mark.parametrize("there", [False, True])
def test_the_registry_is_made_where_it_is_missing(cloud, there):
    cloud.script(*[{"match": "repositories create", "stderr": "ERROR: ALREADY_EXISTS: the repository"}] * there)
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}", "xpk") == 0
    order = [call.split()[:2] for call in cloud.calls if call.startswith("docker") or "workload create" in call]
    assert order == [["docker", "build"], ["docker", "push"], ["xpk", "workload"]]


def test_an_image_has_no_key_that_lies_in_the_folder(cloud, monkeypatch, tmp_path):
    """docs/serving.md makes key.txt and private.pem in the present folder."""
    root = tmp_path / "clone"
    (root / "launch" / "gke").mkdir(parents=True)
    tracked, keys = ["launch/gke/Dockerfile", "a.py"], ["key.txt", "private.pem", ".env", "launch/tls.key"]
    for name in (*tracked, *keys):
        (root / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(files, "ROOT", root)
    monkeypatch.setattr(files, "_git", lambda *words: "\0".join(tracked) if words[0] == "ls-files" else "")
    context = files.image_context(Shell(), tmp_path / "staging")
    found = [str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(tracked) == sorted(map(str, files.sent()))
    monkeypatch.setattr(files, "_git", lambda *words: "")
    with pytest.raises(LaunchError, match="git does not say which files a worker gets"):
        files.sent()
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    for name in keys:
        assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0, name
        assert any(fnmatch.fnmatch(f"x/{name}", line) for line in ignored.splitlines()), name


def test_a_cluster_that_exists_is_never_changed_or_deleted(cloud):
    """It may be shared. XPK itself refuses a workload for which it has no nodes, and then nothing runs."""
    cloud.script({"match": "clusters describe", "code": 0, "times": 9, "stdout": "c"})
    assert cloud.run(f"up {TPU} {TRAINER}", "xpk") == 0
    assert cloud.called("workload create") and not cloud.called("cluster create") and not cloud.called("cluster delete")
    assert "cluster c exists: left as it is" in cloud.err and "the cluster still costs about $33.60" in cloud.err
    refused = {"match": "workload create", "stderr": "[XPK] rpg-4b is requesting v5p-16 but cluster only contains v6e"}
    cloud.script({"match": "clusters describe", "code": 0, "times": 9, "stdout": "c"}, refused)
    assert cloud.run(f"up {TPU} {TRAINER}", "xpk") == 1
    assert "but cluster only contains v6e" in cloud.errors()[0] and not cloud.called("cluster delete")


@pytest.mark.parametrize(
    ("option", "waiting", "then", "deleted"),
    [
        ("", {"code": 0}, jobsets("Completed"), True),
        ("", {"code": 125, "stderr": "Job has failed"}, jobsets("Failed"), True),
        ("", {"code": 1, "stderr": "lost the network"}, jobsets(), False),
        ("--keep", {"code": 0}, jobsets("Completed"), False),
    ],
)
def test_a_cluster_that_up_has_made_is_deleted_once_its_workload_has_ended(cloud, option, waiting, then, deleted):
    none = {"match": "get jobset ", "code": 0}
    cloud.script(none, {"match": "workload list", **waiting}, then)
    assert cloud.run(f"up {TPU} {option} {TRAINER}", "xpk") == (waiting["code"] != 0)
    assert bool(cloud.called("cluster delete")) == deleted


def test_a_cluster_that_up_has_made_is_deleted_if_nothing_could_be_submitted(cloud):
    cloud.script({"match": "docker push", "stderr": "denied: x"})
    assert cloud.run(f"up {TPU} {TRAINER}", "xpk") == 1
    assert cloud.called("cluster create") and cloud.called("cluster delete") and "denied: x" in cloud.errors()[0]


def test_the_base_of_an_image_is_named_by_its_digest():
    bases = re.findall(
        "^FROM (.*)$", (ROOT / "launch" / "gke" / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert bases and all(re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", base) for base in bases)


@pytest.mark.parametrize(
    "command, rule, line",
    [
        (
            "up --no-watch",
            {"match": "cluster create", "stderr": "ERROR: Quota exceeded for TPU_V5P"},
            "Quota exceeded for TPU_V5P",
        ),
        (
            "up --no-watch",
            {"match": "cluster create", "stderr": "PERMISSION_DENIED: container.clusters.create"},
            "clusters.create",
        ),
        ("up --no-watch", {"match": "cluster create", "stderr": "ZONE_RESOURCE_POOL_EXHAUSTED"}, "POOL_EXHAUSTED"),
        (
            "up --no-watch",
            {"match": "docker push", "stderr": "denied: Permission 'upload' denied on x"},
            "denied: Permission 'upload' denied on x",
        ),
        ("up --no-watch --capacity=reserved", {"match": "none"}, "pass --reservation=NAME"),
        ("up --no-watch --service-account=a@b", {"match": "none"}, "pods have the account and the addresses of the"),
        ("up --no-watch --internal-ips --capacity=reserved --reservation=r", {"match": "none"}, "leave them out"),
        ("up --no-watch --budget=0", {"match": "none"}, "--budget=0; use a positive number"),
        ("up --no-watch --capacity=flex-start --max-hours=1", {"match": "none"}, "use launch/tpu"),
        ("delete --yes", {"match": "cluster delete", "stderr": "PERMISSION_DENIED: no"}, "PERMISSION_DENIED: no"),
    ],
)
def test_each_error_is_one_explained_line(cloud, command, rule, line):
    cloud.script(rule)
    assert cloud.run(f"{command} {TPU} {TRAINER}", "xpk") == 1
    assert line in cloud.errors()[0]


def test_delete_asks_first(cloud, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert cloud.run(f"delete {TPU}", "xpk") == 1
    assert not cloud.called("cluster delete")


def outcome_on_xpk(command, code):
    """XPK restarts on 42, 127 to 255 and the codes it is given, and on no other."""
    (given,) = re.findall(r"--restart-on-exit-codes=(\S+)", command)
    return "restarted" if code in {42, *range(127, 256), *map(int, given.split(","))} else "ended"


def test_every_exit_code_of_the_trainer_is_restarted_or_not(cloud):
    ended = {0, cli.USAGE_ERROR, cli.GAVE_UP}
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV)  # some after saving
    crashed = 1  # an exception, a lost peer, a stall in which no Python thread runs
    restarted = {crashed, processes.STALLED, *(128 + number for number in signals)}
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}", "xpk") == 0
    (command,) = cloud.called("workload create")
    for code in ended | restarted:
        assert outcome_on_xpk(command, code) == ("ended" if code in ended else "restarted"), code
