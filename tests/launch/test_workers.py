"""What runs on the machines: the startup script, and what supervises the trainer on TPU VMs and in pods, with fakes."""

from __future__ import annotations

import base64
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time

import pytest

from cloud import files
from cloud.job import Job

LAUNCH = files.ROOT / "launch"
JOB = Job(name="rpg-4b", type="v5p-16", zone="us-east5-a", project="p", bucket="gs://mine", trainer=("--config=x.py",))

GCLOUD = """\
#!/bin/sh
echo "gcloud $*" >> "$LOG"
eval last=\\${$#}
case "$*" in
  "storage cp --quiet gs://"*) cp "$FAKE_BUCKET/$(basename "$4")" "$last" ;;
  "storage cp - "*)
    [ -z "$DOWN" ] || { rm "$DOWN" && exit 1; } 2>/dev/null
    cat > "$FAKE_BUCKET/$(basename "$last")"
    ;;
  "storage cp "*) cp "$3" "$FAKE_BUCKET/$(basename "$last")" ;;
  "storage ls --long "*)
    [ -z "$DOWN" ] || exit 1
    for file in "$FAKE_BUCKET"/*; do echo "  9  $(date -r "$file" +%s.%N)  $last$(basename "$file")"; done
    ;;
esac
"""
SYSTEMCTL = """\
#!/bin/sh
echo "systemctl $*" >> "$LOG"
case "$1" in
  is-active) [ "$3" = rpg ] && [ -e "$ACTIVE" ] ;;
  stop) rm -f "$ACTIVE" ;;
esac
"""
SYSTEMD_RUN = """\
#!/bin/sh
echo "systemd-run $*" >> "$LOG"
case "$*" in *--unit=rpg-look*) ;; *) touch "$ACTIVE" ;; esac
"""


class Worker:
    """A machine whose /opt/rpg, bucket and system programs lie in a temporary folder."""

    def __init__(self, home):
        self.home, self.bucket, self.log = home, home / "bucket", home / "log"
        (home / "bin").mkdir()
        self.bucket.mkdir()
        for name, text in {
            "gcloud": GCLOUD, "systemctl": SYSTEMCTL, "systemd-run": SYSTEMD_RUN
        }.items():  # fmt: skip
            (home / "bin" / name).write_text(text, encoding="utf-8")
            (home / "bin" / name).chmod(0o755)
        self.upload("# one")
        self.ask()
        script = files.startup_script(JOB)
        for path, here in (("/opt/rpg", "opt"), ("/var/log", ""), ("/run/rpg-started", "asked")):
            script = script.replace(path, str(home / here))
        (home / "startup.sh").write_text(script, encoding="utf-8")

    def ask(self, script=None):
        """As `launch/tpu up` does: the command is uploaded, the same one or another."""
        (self.bucket / "run.sh").write_text(script or files.run_script(JOB), encoding="utf-8")

    def upload(self, content):
        (self.home / "file").write_text(content, encoding="utf-8")
        with tarfile.open(self.bucket / "source.tar.gz", "w:gz") as archive:
            archive.add(self.home / "file", "launch/install.py")
            archive.add(LAUNCH / "cloud" / "supervise.py", "launch/cloud/supervise.py")

    def look(self, **environment):
        """What was called while the worker looked into the bucket."""
        return self.run("look", **environment)[0]

    def run(self, *arguments, **environment):
        """What was called while the startup script ran, and what it printed."""
        self.log.write_text("", encoding="utf-8")
        self.environment = {"PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", "LOG": str(self.log)}
        self.environment |= {"FAKE_BUCKET": str(self.bucket), "ACTIVE": str(self.home / "active"), **environment}
        done = subprocess.run(
            ["bash", str(self.home / "startup.sh"), *arguments], env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return self.log.read_text(encoding="utf-8"), done.stdout


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


def test_a_boot_looks_into_the_bucket_once_a_minute_and_starts_what_it_finds(worker):
    log, said = worker.run()
    assert "systemd-run --quiet --unit=rpg-look --on-active=1 --on-unit-inactive=60" in log and not said
    assert f"{worker.home}/opt/look.sh look" in log and "--unit=rpg " not in log
    assert (worker.home / "opt" / "look.sh").read_text(encoding="utf-8").startswith("#!/bin/bash\n# Startup script of")
    log = worker.look()
    assert "--unit=rpg " in log and "Restart=" not in log, "supervise.py starts the trainer again"


def test_what_runs_is_left_alone_when_asked_again_and_by_a_bucket_that_does_not_answer(worker):
    worker.look()
    worker.ask()
    for environment in ({}, {"DOWN": "1"}):
        log = worker.look(**environment)
        assert "systemd-run" not in log and "systemctl stop" not in log


@pytest.mark.parametrize("change", ["run.sh", "source.tar.gz"])
def test_another_command_or_other_code_replaces_what_runs(worker, change):
    worker.look()
    worker.upload("# two") if change == "source.tar.gz" else None
    worker.ask("# other" if change == "run.sh" else None)
    log = worker.look()
    assert log.index("systemctl stop rpg") < log.index("systemd-run")
    content = (worker.home / "opt" / "repository" / "launch" / "install.py").read_text(encoding="utf-8")
    assert content == ("# two" if change == "source.tar.gz" else "# one")


def test_new_code_keeps_the_environment(worker):
    worker.look()
    venv = worker.home / "opt" / "repository" / ".venv"
    venv.mkdir()
    worker.upload("# two")
    worker.ask()
    worker.look()
    assert venv.exists()


def test_a_run_that_ended_here_starts_again_only_if_it_is_asked_for_anew(worker):
    worker.look()
    (worker.home / "active").unlink()  # it ended, and no worker has noted anything yet
    assert "systemd-run" not in worker.look()
    (worker.bucket / "failed").touch()
    worker.ask()
    assert "systemd-run" not in worker.look()
    (worker.bucket / "failed").rename(worker.bucket / "finished")
    assert "systemd-run" not in worker.look()
    (worker.bucket / "finished").unlink()
    assert "systemd-run" in worker.look()


def test_a_stop_takes_the_command_away_and_a_new_one_starts(worker):
    worker.look()
    (worker.bucket / "run.sh").unlink()
    assert "systemctl stop rpg" in worker.look() and "systemd-run" not in worker.look()
    worker.ask()
    assert "systemd-run" in worker.look()


TRAINER = """\
#!/bin/sh
echo "$JAX_COORDINATOR_ADDRESS $JAX_COMPILATION_CACHE_DIR $MEGASCALE_NUM_SLICES$KEY$*"
[ -z "$ONCE" ] || { rm "$ONCE" && exit 1; } 2>/dev/null
trap 'sleep 0.2; echo saved; exit 143' TERM
[ -z "$HANG" ] || { touch "$HANG"; while :; do sleep 0.05; done; }
exit "${STATUS:-0}"
"""


@pytest.fixture
def google():
    """Metadata server and Secret Manager in one, holding the secret wandb-key; `google.attributes` may be changed."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.endswith("/token") and self.headers["Metadata-Flavor"] == "Google":
                return self.reply(b'{"access_token": "t0ken"}')
            if (found := server.attributes.get(self.path.rpartition("/attributes/")[2])) is not None:
                return self.reply(found.encode())
            known = self.headers["Authorization"] == "Bearer t0ken"
            if known and "/secrets/wandb-key/versions/latest:access" in self.path:
                return self.reply(json.dumps({"payload": {"data": base64.b64encode(b"s3cr3t\n").decode()}}).encode())
            self.send_error(403)

        def reply(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.attributes = {"agent-worker-number": "0", "tpu-env": ""}
    server.attributes["worker-network-endpoints"] = "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6"
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def train(worker, google):
    """Starts the run script in a repository whose Python is a fake trainer; `number` is that of the worker."""

    def start(number="0", **environment):
        worker.look()
        python = worker.home / "opt" / "repository" / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(TRAINER, encoding="utf-8")
        python.chmod(0o755)
        (worker.home / "rpg.log").write_text("a traceback\n", encoding="utf-8")
        google.attributes["agent-worker-number"] = number
        environment = {"GCE_METADATA_URL": google.url, "PAUSE": "0", "DOWN": ""} | environment
        environment = {**worker.environment, "LOG_FILE": str(worker.home / "rpg.log"), **environment}
        return subprocess.Popen(
            ["bash", str(worker.bucket / "run.sh")], cwd=worker.home / "opt" / "repository", env=environment,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return start


def test_the_trainer_gets_coordinator_cache_and_the_name_that_resumes(train):
    said = train().communicate()[0].split()
    assert said[:2] == ["10.0.0.5:8476", "gs://mine/jax-cache"]
    assert said[2:] == [
        "-m", "rpg_jax.train", "--config=x.py", "--config.run.dir=gs://mine/runs", "--config.run.name=rpg-4b"
    ]  # fmt: skip


def test_several_slices_meet_at_slice_zero(train, google):
    google.attributes["tpu-env"] = "A: 'b'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9:8080'\nMEGASCALE_NUM_SLICES: '2'\n"
    assert train().communicate()[0].startswith("10.9.9.9:8476 ")


def freed(worker):
    return worker.log.read_text(encoding="utf-8").count("queued-resources delete rpg-4b")


@pytest.mark.parametrize("number", ["0", "1"])
def test_only_the_first_worker_of_a_successful_run_marks_it_finished_and_frees_the_tpu(worker, train, number):
    run = train(number)
    run.communicate()
    assert run.returncode == 0 and not (worker.bucket / "failed").exists()
    assert (worker.bucket / "finished").exists() == bool(freed(worker)) == (number == "0")


def test_a_bucket_that_does_not_answer_at_the_end_is_asked_again(worker, train):
    (down := worker.home / "down").touch()
    assert train(DOWN=str(down)).wait() == 0
    assert (worker.bucket / "finished").exists() and not down.exists()


@pytest.mark.parametrize("status, starts", [("1", 6), ("134", 6), ("2", 1), ("3", 1)])
def test_a_run_that_fails_is_given_up_with_its_log_and_frees_the_tpu(worker, train, status, starts):
    run = train("1", STATUS=status)
    said = run.communicate()[0]
    assert run.returncode == int(status) and said.count("rpg_jax.train") == starts
    note = (worker.bucket / "failed").read_text(encoding="utf-8")
    assert note == f"worker 1 ended with exit code {status} at attempt {starts}\n"
    assert (worker.bucket / "worker-1.log").read_text(encoding="utf-8") == "a traceback\n" and freed(worker) == 1
    assert not (worker.bucket / "finished").exists()


def test_a_run_that_fails_once_goes_on(worker, train):
    (once := worker.home / "once").touch()
    run = train(ONCE=str(once))
    assert run.communicate()[0].count("rpg_jax.train") == 2 and (worker.bucket / "finished").exists()


def test_a_run_past_its_hours_is_saved_and_freed(worker, train):
    script = worker.bucket / "run.sh"
    limited = script.read_text(encoding="utf-8").replace("deadline=0", f"deadline={int(time.time()) + 4}")
    script.write_text(limited, encoding="utf-8")
    run = train(HANG=str(worker.home / "started"))
    assert "saved" in run.communicate(timeout=60)[0] and run.returncode == 124 and freed(worker) == 1
    note = (worker.bucket / "failed").read_text(encoding="utf-8")
    assert note == "the hours of --max-hours or --budget are over; the run is saved\n"


def test_a_stop_waits_for_the_trainer_to_save(worker, train):
    started = worker.home / "started"
    run = train(HANG=str(started))
    while not started.exists() and run.poll() is None:
        pass
    os.killpg(run.pid, 15)  # as systemd does: to every process of the service
    said = run.communicate()[0]
    assert said.splitlines()[-1] == "saved" and run.returncode == 143
    assert not (worker.bucket / "finished").exists() and not freed(worker)


def test_an_installation_that_fails_is_tried_again_and_then_given_up(worker, train):
    worker.upload("raise SystemExit(1)")
    run = train("1")
    assert "rpg_jax.train" not in run.communicate()[0] and run.returncode == 1 and freed(worker) == 1
    assert "exit code 1 at attempt 6" in (worker.bucket / "failed").read_text(encoding="utf-8")


@pytest.fixture
def pod(tmp_path, google):
    """Runs what a pod runs, with a fake trainer; returns its exit code, and what it and the trainer said."""

    def run(*arguments, trainer=TRAINER, **environment):
        (tmp_path / "python").write_text(trainer, encoding="utf-8")
        (tmp_path / "python").chmod(0o755)
        command = [sys.executable, str(LAUNCH / "cloud" / "supervise.py"), "--bucket=gs://b", "--project=p", *arguments]
        pod = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "TPU_WORKER_HOSTNAMES": "host-0,host-1"}
        pod |= {"GCE_METADATA_URL": google.url, "SECRET_MANAGER_URL": google.url, "PAUSE": "0"}
        return subprocess.run(command, env=pod | environment, capture_output=True, text=True)

    return run


def test_pods_meet_at_the_first_host_of_the_first_slice(pod):
    for more, meets in (({}, "host-0:8476"), ({"MEGASCALE_COORDINATOR_ADDRESS": "slice-0:8080"}, "slice-0:8476")):
        said = pod("--", "rpg_jax.train", "--config=x.py", **more).stdout
        assert said == f"{meets} gs://b/jax-cache -m rpg_jax.train --config=x.py\n"


@pytest.mark.parametrize(("module", "slices"), [("rpg_jax.serve", ""), ("rpg_jax.train", "4")])
def test_a_pod_that_serves_is_no_slice_of_a_job(pod, module, slices):
    said = pod("--", module, "--config=x.py", MEGASCALE_COORDINATOR_ADDRESS="slice-0:8080", MEGASCALE_NUM_SLICES="4")
    assert said.stdout.endswith(f" {slices}-m {module} --config=x.py\n")


@pytest.mark.parametrize(
    ("does", "ends", "pauses"),
    [("exit 0", 0, False), ("exit 2", 2, False), ("exit 1", 1, True), ("sleep 30 & wait $!", 3, False)],
)
def test_a_pod_that_fails_soon_pauses_before_all_start_again_and_one_past_its_hours_ends(pod, does, ends, pauses):
    limit = [f"--deadline={int(time.time()) + 2}"] if ends == 3 else []
    began = time.monotonic()
    trainer = f"#!/bin/sh\ntrap 'kill $!; exit 143' TERM\n{does}\n"
    done = pod(*limit, "--", "rpg_jax.train", trainer=trainer, PAUSE="0.75")
    assert done.returncode == ends
    assert (time.monotonic() - began > 3) == pauses or ends == 3


@pytest.mark.parametrize("name, status", [("wandb-key", 0), ("other-key", 1)])
def test_secrets_go_from_their_name_into_the_environment_alone(pod, name, status):
    done = pod(f"--secret=KEY={name}", "--", "rpg_jax.train", "argument")
    assert done.returncode == status
    if status == 0:
        assert done.stdout.endswith(" s3cr3t-m rpg_jax.train argument\n")
    else:
        assert "'other-key'" in done.stderr and "secretAccessor" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_source_archive_holds_tracked_files_and_depends_on_their_content_alone():
    archive = files.source_archive()
    assert archive == files.source_archive()
    with tarfile.open(fileobj=io.BytesIO(archive)) as unpacked:
        names = unpacked.getnames()
    assert {"launch/install.py", "requirements.txt", "configs/base.py"} <= set(names)
    assert not any(name.startswith((".venv", "runs/", ".git/")) for name in names)
