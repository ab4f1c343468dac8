"""Stands for gcloud, xpk, kubectl and docker on PATH, as `fake_cloud.py NAME arguments`; it knows their flags.

$FAKE_CLOUD holds `calls.jsonl` (written here) and `script.json`: a list of {match, times, stdout, stderr, code}. The
first rule whose regular expression is found in the command line, and that was not used up, answers; without one the
command succeeds as below. Flags were read off the help of Google Cloud SDK 528 and of XPK 1.16.
"""

import json
import os
import re
import sys
from pathlib import Path

EVERYWHERE = {"--project", "--quiet", "--format", "--filter"}
CREATE = {"--zone", "--accelerator-type", "--metadata-from-file", "--spot", "--reserved", "--service-account"}
CREATE |= {"--network", "--internal-ips", "--labels", "--async"}
XPK = {"--cluster", "--zone", "--project", "--quiet"}
FLAGS = {
    "gcloud config get-value": set(),
    "gcloud auth configure-docker": set(),
    "gcloud secrets describe": set(),
    "gcloud projects describe": set(),
    "gcloud auth print-access-token": {"--impersonate-service-account"},
    "gcloud storage buckets describe": set(),
    "gcloud storage cp": set(),
    "gcloud storage cat": set(),
    "gcloud storage ls": set(),
    "gcloud storage rm": {"--recursive"},
    "gcloud artifacts repositories create": {"--location", "--repository-format"},
    "gcloud container clusters describe": {"--region"},
    "gcloud container clusters get-credentials": {"--region", "--zone"},
    "gcloud compute tpus accelerator-types list": {"--zone"},
    "gcloud compute tpus queued-resources create": CREATE
    | {"--runtime-version", "--node-id", "--node-count", "--node-prefix", "--valid-until-duration"},
    "gcloud alpha compute tpus queued-resources create": CREATE
    | {"--runtime-version", "--node-id", "--node-count", "--node-prefix", "--valid-until-duration"}
    | {"--provisioning-model", "--max-run-duration"},
    "gcloud compute tpus queued-resources describe": {"--zone"},
    "gcloud compute tpus queued-resources delete": {"--zone", "--force", "--async"},
    "gcloud compute tpus tpu-vm describe": {"--zone"},
    "xpk cluster create": XPK
    | {"--tpu-type", "--num-slices", "--spot", "--on-demand", "--reservation", "--enable-workload-identity"}
    | {"--custom-cluster-arguments"},
    "xpk cluster delete": XPK | {"--force"},
    "xpk workload create": XPK
    | {"--workload", "--tpu-type", "--num-slices", "--docker-image", "--command", "--max-restarts", "--env"}
    | {"--restart-on-exit-codes", "--termination-grace-period-seconds", "--output-manifest-file"},
    "xpk workload list": XPK | {"--filter-by-job", "--wait-for-job-completion", "--timeout"},
    "xpk workload delete": XPK | {"--workload", "--force"},
    "kubectl": {"--output", "--ignore-not-found"},
    "docker": {"--file", "--platform", "--build-arg", "--tag"},
}


def answer(line: str, argv: list[str], home: Path) -> int:
    script = home / "script.json"
    rules = json.loads(script.read_text(encoding="utf-8")) if script.exists() else []
    for rule in rules:
        if rule["times"] and re.search(rule["match"], line):
            rule["times"] -= 1
            script.write_text(json.dumps(rules), encoding="utf-8")
            print(rule.get("stdout", ""))
            print(rule.get("stderr", ""), file=sys.stderr)
            return rule.get("code", 0)
    flags = dict(word.partition("=")[::2] for word in argv if word.startswith("--"))
    if "get-value project" in line:
        print("my-project")
    elif "projects describe" in line:
        print("123")
    elif "print-access-token" in line:
        print("t0ken")
    elif "accelerator-types list" in line:
        print(flags["--filter"].partition("=")[2])
    elif "buckets describe" in line:
        print(json.dumps({"location": "US-EAST5", "soft_delete_policy": {"retentionDurationSeconds": "0"}}))
    elif "clusters describe" in line:
        print("ERROR: (gcloud.container.clusters.describe) NOT_FOUND: Not found: cluster.", file=sys.stderr)
        return 1
    elif "queued-resources describe" in line:
        print(json.dumps({"state": {"state": "ACTIVE"}}))
    elif "tpu-vm describe" in line:
        print(json.dumps({"state": "READY"}))
    elif "storage ls" in line:
        print(f"{argv[-1]}run.sh")
    return 0


def main() -> int:
    home = Path(os.environ["FAKE_CLOUD"])
    argv = sys.argv[1:]
    line = " ".join(argv)
    with (home / "calls.jsonl").open("a") as log:
        log.write(json.dumps(argv) + "\n")
    known = next((flags for command, flags in FLAGS.items() if line.startswith(command)), None)
    if known is None:
        print(f"ERROR: Invalid choice: {line}", file=sys.stderr)
        return 2
    end = argv.index("--") if "--" in argv else len(argv)
    unknown = {w.partition("=")[0] for w in argv[:end] if w.startswith("-")} - known - EVERYWHERE
    if unknown:
        print(f"ERROR: unrecognized arguments: {sorted(unknown)}", file=sys.stderr)
        return 2
    return answer(line, argv, home)


if __name__ == "__main__":
    sys.exit(main())
