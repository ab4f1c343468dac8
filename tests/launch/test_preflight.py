"""Preflight: each mistake is one line with its fix, and nothing that costs money has been asked for."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from cloud import accelerators, account, files, preflight, reach, resolve, words
from cloud.errors import LaunchError
from cloud.job import SERVERS_SECRETS, Job
from rpg_jax import serve
from rpg_jax.planning import topologies
from rpg_jax.runs import config_files

TPU = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b"
TRAINER = "-- --config=configs/tiny.py --config.mesh.fsdp=-1"
CONFIG = {
    "rollout": {"prompts_per_step": 64, "group_size": 8},
    "train": {"updates_per_step": 2, "microbatch_size": None},
}


def refused(cloud, command, line):
    """The command ends with `line`, before anything is asked for or copied."""
    assert cloud.run(command) == 1
    assert line in "\n".join(cloud.errors())
    assert not cloud.called("create") and not cloud.called("storage")


def replaced(option, value):
    return " ".join(f"{option}={value}" if word.startswith(option) else word for word in TPU.split())


@pytest.mark.parametrize(
    "options, line",
    [
        (replaced("--name", "Rpg_4B"), "--name='Rpg_4B' is not a DNS label; use up to 39 of a-z"),
        (replaced("--type", "v5p-15"), "no accelerator type 'v5p-15'; use --type=v5p-8|v5p-16"),
        (replaced("--type", "v7x-16"), "--type=v7x-16: Google serves TPU7x by GKE and Compute Engine, not as TPU VMs"),
        (replaced("--type", "h100-8"), "no accelerator type 'h100-8'; use --type=v4-8"),
        (replaced("--zone", "us-east5"), "--zone='us-east5' is not a zone"),
        (replaced("--bucket", "mine"), "--bucket='mine' is not a bucket; use gs://NAME"),
        (f"{TPU} --slices=0", "--slices=0; use 1 or more"),
        (f"{TPU} --budget=0", "--budget=0; use a positive number"),
        (f"{TPU} --max-hours=-3", "--max-hours=-3; use 0.1 to 8760"),
        (f"{TPU} --max-hours=1e-9", "--max-hours=1e-09; use 0.1 to 8760"),
        (f"{TPU} --max-hours=1e300", "--max-hours=1e+300; use 0.1 to 8760"),
        (f"{TPU} --budget=1", "--budget=1 pays 0.0297619 hours; use what pays 0.1 to 8760"),
        (f"{TPU} --budget=1e300", "use what pays 0.1 to 8760"),
        (f"{TPU} --slices=1.5", "argument --slices: invalid int value: '1.5'; --help lists all options"),
        (f"{TPU} --bucket=gs://a\udcff", r"'--bucket=gs://a\udcff' is no text in UTF-8"),
        (f"{TPU} --capacity=flex-start", "--capacity=flex-start needs a limit of at most 168 hours"),
        (f"{TPU} --capacity=flex-start --max-hours=169", "needs a limit of at most 168 hours, when Google"),
        (f"{TPU} --capacity=flex-start --budget=9000", "--capacity=flex-start needs a limit"),
        (f"{TPU} --give-up-after=banana", "--give-up-after='banana' is not a length of time; e.g. 12h"),
        (f"{TPU} --give-up-after=", "--give-up-after='' is not a length of time"),
        *(
            (f"{TPU} --chip-price={price} --budget=5 {capacity}", f"--chip-price={price}; use a positive number")
            for price in ("0", "-1", "nan", "inf")
            for capacity in ("", "--capacity=flex-start")
        ),
        (f"{TPU} --secret=wandb=x", "--secret=wandb=…; write --secret=VARIABLE=name-in-secret-manager"),
    ],
)
def test_mistakes_in_the_options(cloud, options, line):
    refused(cloud, f"up --no-watch {options} {TRAINER}", line)


@pytest.mark.parametrize(
    "options, line",
    [
        (TPU, "first-hour on 1 × v5p-16, several hosts; take --type=v6e-1"),
        (f"{replaced('--type', 'v6e-1')} --slices=2", "first-hour on 2 × v6e-1, several hosts"),
        (f"{replaced('--type', 'v6e-1')} --serves-for=rpg-4b", "first-hour with --serves-for; leave out one of them"),
    ],
)
def test_the_first_hour_is_refused_on_several_hosts_and_for_servers(cloud, options, line):
    refused(cloud, f"up {options} -- first-hour --quick", line)


SERVERS = "--type=v5p-8 --zone=us-east5-a --bucket=gs://mine --name=rpg-4b-w0 --serves-for=rpg-4b"
SECRETS = " ".join(f"--secret={name}=x" for name in SERVERS_SECRETS)


@pytest.mark.parametrize(
    "options, line",
    [
        (
            f"{SERVERS} --type=v5p-16 {SECRETS}",
            "--type=v5p-16 with --serves-for has several hosts; take a slice of one",
        ),
        (
            f"{SERVERS} --serves-for=rpg-4b-w0 {SECRETS}",
            "--serves-for=rpg-4b-w0 is this job itself; --name=rpg-4b-w0-s",
        ),
        (
            f"{SERVERS} --slices=2 {SECRETS}",
            "--slices=2 with --serves-for: where one slice is lost or has ended, all are requested anew or deleted; "
            "without --slices start one job a server, as --name=rpg-4b-w0-0 and --name=rpg-4b-w0-1",
        ),
        (f"{SERVERS} --serves-for=Rpg/4b {SECRETS}", "--serves-for='Rpg/4b' is not the name of a run"),
        (
            f"{SERVERS} --secret=RPG_JAX_API_KEY=x",
            "ask these servers; --secret=RPG_JAX_CERTIFICATE=name-in-secret-manager --secret=RPG_JAX_PRIVATE_KEY=name",
        ),
        (
            f"{SERVERS} {SECRETS}",
            "weights do not go through a bucket; -- --weights_from=/FOLDER, one that the trainer and",
        ),
        (f"{SERVERS} {SECRETS} -- --weights_from=gs://mine/w", "weights do not go through a bucket"),
    ],
)
def test_mistakes_in_the_options_of_servers(cloud, options, line):
    trainer = TRAINER if " -- " not in options else TRAINER.replace("-- ", "")
    assert cloud.run(f"up --no-watch {options} {trainer}") == 1
    assert line in "\n".join(cloud.errors())
    assert not cloud.called("create") and not cloud.called("storage")


def test_servers_need_a_config_that_fits_one_slice_whatever_rows_an_update_has(cloud):
    four = "--config=configs/tiny.py --config.rollout.prompts_per_step=2 --config.rollout.group_size=2"
    own = "--weights_from=/mnt/w --idle=60"
    up = f"up --no-watch --dry-run {SERVERS} --slices=8 --cluster=c --image=i:1 {SECRETS}"
    assert cloud.run(f"{up} -- {four} --config.mesh.fsdp 4 {own}", "xpk") == 0
    assert cloud.run(f"up --no-watch {SERVERS} {SECRETS} -- {own}") == 1 and "no --config" in cloud.errors()[0]
    assert cloud.run(f"up --no-watch {SERVERS} {SECRETS} -- {four} --config.mesh.fsdp=3 {own}") == 1
    assert "fsdp 3 x expert 1 x context 1 x tensor 1 does not cover 4" in cloud.errors()[0]


@pytest.mark.parametrize("idle", [3600.0, 60.0])
def test_a_server_takes_the_flags_that_the_launcher_sets_and_the_users_own(monkeypatch, idle):
    mine = ["--idle=60"] if idle == 60 else []
    own = ("--config=configs/tiny.py", "--config.seed=3", "--weights_from=/mnt/w", *mine)
    place = {"type": "v5p-8", "zone": "us-east5-a", "project": "p", "bucket": "gs://mine"}
    job = Job(
        name="w0", trainer=own, serves_for="rpg-4b", secrets=tuple((name, "x") for name in SERVERS_SECRETS), **place
    )
    taken = []
    monkeypatch.setattr(serve, "serve", taken.append)
    module, *flags = job.command
    assert (module, serve.main(flags)) == ("rpg_jax.serve", 0)
    found = taken[0]
    assert (found.idle, found.host, found.http_port) == (idle, "0.0.0.0", 8000)
    assert found.weights_from == "/mnt/w"
    assert found.overrides == ["--config.seed=3"]


def test_what_an_earlier_version_remembered_of_a_trainer_is_read(cloud):
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 0, cloud.err
    file = cloud.home / "staging" / "job.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    del fields["serves_for"]
    file.write_text(json.dumps(fields | {"works_for": None}), encoding="utf-8")
    assert cloud.run("up --no-watch --name=rpg-4b") == 0, cloud.err


def test_no_field_of_a_config_is_taken_for_a_secret():
    fields = [f"--config.{name}=x" for name in config_files.fields()]
    assert not [given for given in (*fields, "--api_key_file=x") if words.SECRETIVE.search(given)]
    for secret in ("--hf_token=x", "--config.judge.api_key=x", "WANDB_API_KEY=x", "--password=x", "--token=x"):
        assert words.SECRETIVE.search(secret), secret


@pytest.mark.parametrize(
    "trainer, line",
    [
        ("--config=configs/none.py", "no config 'configs/none.py'; pass -- --config=configs/NAME.py"),
        ("--config.seed=1", "no --config"),
        ("--config=configs/qwen3_4b_2k.py", "pass --config.model.path=OWNER/NAME, as on the Hugging Face hub, or gs:"),
        ("--config=configs/tiny.py --config.los.kl_coef=1", "the config does not resolve: "),
        (
            "--config=configs/tiny.py --config.mesh.fsdp=3",
            "the config does not resolve: mesh replica 1 x fsdp 3 x expert 1 x context 1 x tensor 1 does not cover 8",
        ),
        (
            "--config=configs/tiny.py --config.mesh.fsdp=-1 --config.rollout.prompts_per_step=63",
            "must be a multiple of",
        ),
        (
            "--config=configs/tiny.py --config.run.name=other",
            "--config.run.name=other: the launcher sets this field; use --name",
        ),
        (
            "--config=configs/tiny.py --config.mesh.fsdp=-1 --config.rollout.top_p=0.9",
            "rollout.top_p=0.9 cuts the dist",
        ),
        ("--config=configs/tiny.py --config.mesh.fsdp=-1 --config.train.packed_length=8", "cannot hold a prompt with"),
        ("--config=configs/tiny.py --config.mesh.fsdp=-1 --config.task.operations=x", "operators must be one or more"),
        (
            "--config=configs/tiny.py --config.mesh.fsdp=-1 --config.rollout.driver=servers",
            "needs servers.urls: http://",
        ),
        (
            "--config=configs/tiny.py --config.mesh.fsdp=-1 --config.environment.name=tool",
            "unknown environment.name 'tool'",
        ),
        ("--config=configs/tiny.py --config.wandb_api_key=abc", "--config.wandb_api_key looks like a secret"),
    ],
)
def test_mistakes_in_the_trainers_arguments(cloud, trainer, line):
    assert cloud.run(f"up --no-watch {TPU} -- {trainer}") == 1
    assert line in "\n".join(cloud.errors())
    assert "abc" not in cloud.err and not cloud.called("storage")


def test_all_mistakes_are_shown_at_once(cloud):
    assert cloud.run(f"up --no-watch {replaced('--name', 'X')} --slices=0 -- --config=none.py") == 1
    assert len(cloud.errors()) == 3


@pytest.mark.parametrize(
    "rule, line",
    [
        (
            {"match": "accelerator-types", "code": 0, "stdout": ""},
            "v5p-16 is not offered to project my-project in us-east5-a; list zones and their types: gcloud",
        ),
        (
            {"match": "buckets describe", "stderr": "ERROR: gs://mine not found: 404."},
            "gcloud storage buckets create gs://mine",
        ),
        (
            {"match": "buckets describe", "code": 0, "stdout": '{"location": "EUROPE-WEST4"}'},
            "is in europe-west4, the TPU in us-east5",
        ),
        (
            {"match": "storage cp", "stderr": "ERROR: HTTPError 403: no storage.objects.create"},
            "no storage.objects.create",
        ),
        ({"match": "secrets describe", "stderr": "ERROR: NOT_FOUND: Secret"}, "no secret 'wandb-key'"),
        ({"match": "get-value", "code": 0, "stdout": "(unset)"}, "no project; pass --project=ID"),
    ],
)
def test_mistakes_that_the_cloud_knows(cloud, rule, line):
    cloud.script(rule)
    assert cloud.run(f"up --no-watch {TPU} --secret=WANDB_API_KEY=wandb-key {TRAINER}") == 1
    assert line in cloud.errors()[0]
    assert not cloud.called("queued-resources create")


def test_a_zone_that_no_table_knows_is_asked_of_the_cloud(cloud):
    cloud.script({"match": "buckets describe", "code": 0, "stdout": '{"location": "ASIA-SOUTH9"}'})
    assert cloud.run(f"up --no-watch {replaced('--zone', 'asia-south9-c')} {TRAINER}") == 0, cloud.err
    assert "--zone=asia-south9-c" in cloud.called("accelerator-types")[0]


def test_a_run_that_would_be_killed_before_it_has_saved_is_refused(cloud):
    assert cloud.run(f"up --no-watch {TPU} {TRAINER} --config.run.stop_seconds=500") == 1
    assert "run.stop_seconds=500: a worker ends 60 seconds after it is asked to, saved or not" in cloud.errors()[0]


def test_wandb_needs_its_key(cloud):
    wandb = f"{TRAINER} --config.log.tracker=wandb"
    assert cloud.run(f"up --no-watch {TPU} {wandb}") == 1
    assert "log.tracker=wandb needs a key on the workers; pass --secret=WANDB_API_KEY=" in cloud.errors()[0]
    assert cloud.run(f"up --no-watch {TPU} --secret=WANDB_API_KEY=k {wandb},tensorboard") == 0


def test_a_tracker_without_hashes_is_refused_and_the_locked_ones_have_the_packages_of_the_workers(cloud):
    assert cloud.run(f"up --no-watch {TPU} {TRAINER} --config.log.tracker=mlflow") == 1
    assert "log.tracker=mlflow: workers have locked packages alone; take wandb or tensorboard" in cloud.errors()[0]
    packages, trackers = (
        dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (files.ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("requirements-tpu.lock", "requirements-trackers.lock")
    )
    assert {"wandb", "tensorboardx"} <= trackers.keys() and preflight.TRACKERS == ("wandb", "tensorboard")
    shared = packages.keys() & trackers.keys()
    assert len(shared) > 10 and all(packages[name] == trackers[name] for name in shared)


def test_a_bucket_that_keeps_what_is_deleted_is_named_with_its_cost(cloud):
    kept = {"location": "US-EAST5", "soft_delete_policy": {"retentionDurationSeconds": "604800"}}
    cloud.script({"match": "buckets describe", "code": 0, "stdout": json.dumps(kept)})
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 0
    assert "keeps every replaced checkpoint for 7 days more" in cloud.err
    assert "gcloud storage buckets update gs://mine --clear-soft-delete" in cloud.err
    cloud.script({"match": "buckets describe", "stderr": "ERROR: NOT_FOUND: no such bucket"})
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 1 and "--soft-delete-duration=0" in cloud.errors()[0]


@pytest.mark.parametrize(
    ("denied", "code", "line"),
    [
        ("", 0, "workers are 123-compute@developer.gserviceaccount.com, which may use bucket and secrets"),
        ("tpu.nodes.delete", 0, "which may not delete their TPU (roles/tpu.admin): it costs until you do"),
        ("storage.objects.create", 1, "which lacks roles/storage.objectAdmin; give it each: gcloud projects add-iam"),
        ("secretmanager.versions.access", 1, "which lacks roles/secretmanager.secretAccessor on hf-token; give it"),
    ],
)
def test_the_account_of_the_workers_is_tested(cloud, monkeypatch, denied, code, line):
    monkeypatch.setattr(account, "granted", lambda token, url, wanted: [name for name in wanted if name != denied])
    assert cloud.run(f"up --no-watch {TPU} --secret=HF_TOKEN=hf-token {TRAINER}") == code
    assert line in cloud.err and "t0ken" not in cloud.err
    assert code == 0 or not cloud.called("storage cp")


def test_an_account_that_cannot_be_impersonated_is_named_with_its_roles(cloud):
    denied = "ERROR: PERMISSION_DENIED: Permission 'iam.serviceAccounts.getAccessToken' denied"
    cloud.script({"match": "print-access-token", "stderr": denied})
    assert cloud.run(f"up --no-watch {TPU} --service-account=w@p.iam.gserviceaccount.com {TRAINER}") == 0
    assert (
        "not tested" in cloud.err and "workers are w@p.iam.gserviceaccount.com, which needs roles/storage" in cloud.err
    )


def test_permissions_are_asked_for_in_the_two_forms_that_google_has(monkeypatch):
    asked = []

    def answer(request, timeout):
        asked.append((request.full_url, request.data))
        return io.BytesIO(b'{"permissions": ["a.b"]}')

    monkeypatch.setattr(account.urllib.request, "urlopen", answer)
    for url in ("https://storage/storage/v1/b/mine/iam/testPermissions", "https://x/v1/projects/p:testIamPermissions"):
        assert account.granted("t", url, ["a.b", "c.d"]) == ["a.b"]
    assert asked[0] == ("https://storage/storage/v1/b/mine/iam/testPermissions?permissions=a.b&permissions=c.d", None)
    assert asked[1][1] == b'{"permissions": ["a.b", "c.d"]}'


def test_a_run_that_would_start_over_at_every_restart_is_refused(cloud):
    assert cloud.run(f"up --no-watch {TPU} {TRAINER} --config.run.overwrite=True") == 1
    assert "every restart would start over; take another --name, or gcloud storage mv" in cloud.errors()[0]
    assert not cloud.called("create")


def test_a_multi_region_that_holds_the_zone_is_near_enough(cloud):
    cloud.script({"match": "buckets describe", "code": 0, "stdout": '{"location": "US"}'})
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 0


def test_a_config_that_git_does_not_track_stays_here(cloud, monkeypatch):
    monkeypatch.setattr(files, "sent", lambda: [Path("configs/base.py")])
    assert cloud.run(f"up --no-watch {TPU} {TRAINER}") == 1
    assert "git does not track configs/tiny.py, and workers get only what it tracks; git add configs" in cloud.err
    assert not cloud.called("storage")


def test_a_config_may_have_a_variant(cloud):
    fields = "--config.mesh.fsdp=-1 --config.train.microbatch_size=8"
    assert cloud.run(f"up --no-watch {TPU} -- --config=configs/qwen3_4b_2k.py:tiny {fields}") == 0, cloud.err


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A repository with tracked and other files: what its config names is found there, or not."""
    for name in ("rewards.py", "mine.py", "in_git.jsonl", "made.jsonl", "Qwen3-4B/config.json", "tiny/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    monkeypatch.setattr(files, "sent", lambda: [Path("rewards.py"), Path("in_git.jsonl"), Path("tiny/config.json")])
    return tmp_path


def named(**fields):
    """A config with these in place of what every worker has."""
    config = {
        "model": {"path": "Qwen/Qwen3-4B", "tokenizer": None},
        "task": {"train": "dapo-math-17k", "held_out_sets": "AIME24=hf:owner/name/default/train"},
        "rewards": {"parts": "math_dapo:1,format:0.1"},
        "environment": {"name": None},
    }
    for name, value in fields.items():
        group, field = name.split("_", 1)
        config[group][field] = value
    return config


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model_path": "gs://mine/Qwen3-4B"},
        {"model_path": "/mnt/of-the-workers/Qwen3-4B"},
        {"model_path": None, "model_tokenizer": "tiny"},
        {"task_train": None, "task_held_out_sets": None},
        {"task_train": "in_git.jsonl,reasoning_gym:countdown", "task_held_out_sets": "own=in_git.jsonl"},
        {"rewards_parts": "rewards:score:0.5,format:0.1"},
        {"rewards_parts": None, "environment_name": "guessing"},
    ],
)
def test_what_workers_have_passes(repository, fields):
    reach.all_is_there(named(**fields))


@pytest.mark.parametrize(
    ("fields", "named_path"),
    [
        ({"model_path": "Qwen3-4B"}, "Qwen3-4B"),
        ({"model_path": "{here}/Qwen3-4B"}, "{here}/Qwen3-4B"),
        ({"task_train": "in_git.jsonl,made.jsonl"}, "made.jsonl"),
        ({"task_held_out_sets": "own={here}/made.jsonl"}, "{here}/made.jsonl"),
        ({"rewards_parts": "mine:score"}, "mine.py"),
        ({"environment_name": "mine:Game"}, "mine.py"),
        ({"model_lora": {"start": "Qwen3-4B"}}, "Qwen3-4B"),
    ],
)
def test_what_stays_here_is_named_with_its_fix(repository, fields, named_path):
    here = {name: value.format(here=repository) if isinstance(value, str) else value for name, value in fields.items()}
    with pytest.raises(LaunchError, match=f": {named_path.format(here=repository)} is on this machine .* git add"):
        reach.all_is_there(named(**here))


def test_all_that_stays_here_is_named_at_once(repository):
    with pytest.raises(LaunchError) as error:
        reach.all_is_there(named(model_path="Qwen3-4B", task_train="made.jsonl", rewards_parts="mine:score"))
    assert len(str(error.value).splitlines()) == 3


def test_the_plan_is_asked_and_its_tables_shown(monkeypatch, tmp_path, capfd):
    (tmp_path / "rpg_jax").mkdir()
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    monkeypatch.setattr(preflight, "tpu_compiler_is_installed", lambda: True)
    tpu = {"type": "v5p-16", "zone": "z", "project": "p", "slices": 2, "chip_price": 2.0}
    job = Job(name="n", bucket="gs://b", trainer=("--config=x",), **tpu)

    def planned(program):
        (tmp_path / "rpg_jax" / "plan.py").write_text(f"import sys; asked = sys.argv[1:]; {program}", encoding="utf-8")
        return list(preflight.plan_says_it_fits(job))

    assert planned("print(' '.join(asked))") == [
        "plan: fits v5p:2x2x2*2; the tables above have its days and dollars at list prices"
    ]
    assert capfd.readouterr() == ("", "--config=x --topology=v5p:2x2x2*2\n"), "a dry run prints its commands alone"
    for code in (1, 2):  # it does not fit; an error
        with pytest.raises(LaunchError, match=r"plan: not on v5p:2x2x2\*2, for the reason above; take a setting that"):
            planned(f"sys.exit({code})")


def test_the_compiler_is_looked_for_where_the_plan_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "PYTHON", Path(sys.executable))
    assert preflight.tpu_compiler_is_installed() == (topologies.compiler_library() is not None)
    (tmp_path / "libtpu.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert preflight.tpu_compiler_is_installed()


def test_rows_divide_over_the_data_axes():
    assert preflight.batches_divide(CONFIG, 8) == "256 rows over 8 shards"
    train = {"updates_per_step": 2, "microbatch_size": 12}
    with pytest.raises(LaunchError, match=r"train.microbatch_size = 12 does not divide over 8 shards of rows"):
        preflight.batches_divide(CONFIG | {"train": train}, 8)


def test_mesh_and_rows_are_those_that_the_trainer_makes_of_the_chips(monkeypatch):
    monkeypatch.setattr(preflight, "PYTHON", Path(sys.executable))
    fields = ("--config.mesh.fsdp=8", "--config.mesh.expert=-1")
    done = preflight.resolve(("--config=configs/tiny.py", *fields), 128, 2)
    found = json.loads(done.stdout)
    assert found["mesh"] == {"replica": 2, "fsdp": 8, "expert": 8, "context": 1, "tensor": 1}
    assert found["row_shards"] == 128 and found["weights"] == {}
    assert found["config"]["mesh"]["replica"] == 1


def test_weights_are_on_a_disk_that_has_room_for_them(monkeypatch):
    monkeypatch.setattr(preflight, "PYTHON", Path(sys.executable))
    done = preflight.resolve(("--config=configs/qwen3_30b_a3b.py", "--config.mesh.fsdp=-1"), 64, 1)
    weights = json.loads(done.stdout)["weights"]
    assert weights == {"qwen3-30b-a3b": pytest.approx(61e9, rel=0.01)}
    preflight.weights_fit_the_disk(weights)
    with pytest.raises(LaunchError, match=r"^mine/70B: 140 GB of weights, and a worker's disk .* about 80; "):
        preflight.weights_fit_the_disk({"mine/70B": 140e9})


def test_a_teacher_takes_room_on_the_disk_too(tmp_path):
    text = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(text), encoding="utf-8")
    teacher = os.path.relpath(tmp_path)
    fields = {"model": {"path": "Qwen/Qwen3-30B-A3B", "size": "qwen3-30b-a3b"}, "reference": {"path": teacher}}
    found = resolve.copied(fields)
    assert list(found) == ["Qwen/Qwen3-30B-A3B", teacher] and found[teacher] > 2 * 1000 * 64
    mounted = {"model": {"path": "/mnt/a", "size": "qwen3-30b-a3b"}, "reference": {"path": "/mnt/b"}}
    assert resolve.copied(mounted) == {}
    with pytest.raises(LaunchError, match="Qwen/Qwen3-30B-A3B and teacher: 100 GB of weights"):
        preflight.weights_fit_the_disk({"Qwen/Qwen3-30B-A3B": 61e9, "teacher": 39e9})


def test_types_count_cores_or_chips_as_google_does():
    counted = {name: (accelerators.find(name).chips, accelerators.find(name).hosts) for name in (
        "v4-8", "v5p-16", "v5p-128", "v5litepod-8", "v5litepod-16", "v6e-1", "v6e-8", "v6e-256"
    )}  # fmt: skip
    assert counted == {
        "v4-8": (4, 1), "v5p-16": (8, 2), "v5p-128": (64, 16), "v5litepod-8": (8, 1), "v5litepod-16": (16, 4),
        "v6e-1": (1, 1), "v6e-8": (8, 1), "v6e-256": (256, 64),
    }  # fmt: skip


def test_own_prices_replace_the_table(cloud):
    cloud.run(f"up --no-watch {TPU} --chip-price=2 {TRAINER}")
    assert "costs about $16.00 an hour: 8 chips × $2.00 (--chip-price)" in cloud.err
