"""Tests, as the workers' service account, what the workers will do: read and write the bucket, read secrets, end."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator

from cloud.errors import CommandError, LaunchError
from cloud.job import Job
from cloud.shell import Shell

FREES = "roles/tpu.admin"
STORAGE = [f"storage.objects.{action}" for action in ("create", "delete", "get", "list")]


def granted(token: str, url: str, permissions: list[str]) -> list[str]:
    """Those of the permissions that the owner of the token has on a resource. Raises OSError or ValueError."""
    body: bytes | None = json.dumps({"permissions": permissions}).encode()
    if "/storage/" in url:  # has another form than all other services
        url, body = f"{url}?{urllib.parse.urlencode({'permissions': permissions}, doseq=True)}", None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as response:
        return json.load(response).get("permissions", [])


def may(job: Job, shell: Shell) -> Iterator[str]:
    """Checks the account by testIamPermissions, which answers for the account that asks: the launcher impersonates it.

    Where it may not, a note names the account and its roles. Raises LaunchError if the account lacks what a run needs.
    """
    project, account = job.project, job.service_account
    bucket = f"https://storage.googleapis.com/storage/v1/b/{job.bucket.split('/')[2]}/iam/testPermissions"
    whole = f"https://cloudresourcemanager.googleapis.com/v1/projects/{project}:testIamPermissions"
    needs = {"roles/storage.objectAdmin": (bucket, STORAGE), FREES: (whole, ["tpu.nodes.delete"])}
    for _, name in job.secrets:
        secret = f"https://secretmanager.googleapis.com/v1/projects/{project}/secrets/{name}:testIamPermissions"
        needs[f"roles/secretmanager.secretAccessor on {name}"] = (secret, ["secretmanager.versions.access"])
    try:
        if not account:
            command = ["gcloud", "projects", "describe", project, "--format=value(projectNumber)"]
            account = f"{shell.ask(command, dry_answer='NUMBER').strip()}-compute@developer.gserviceaccount.com"
        token = shell.ask(["gcloud", "auth", "print-access-token", f"--impersonate-service-account={account}"]).strip()
        if shell.dry_run:
            return
        missing = [role for role, (url, wanted) in needs.items() if set(wanted) - set(granted(token, url, wanted))]
    except (CommandError, OSError, ValueError) as error:
        named = account or "the project's Compute Engine account"
        yield f"workers are {named}, which needs {', '.join(needs)}; not tested: {error}"
        return
    if FREES in missing:
        missing.remove(FREES)
        yield f"workers are {account}, which may not delete their TPU ({FREES}): it costs until you do"
    if missing:
        fix = f"gcloud projects add-iam-policy-binding {project} --member=serviceAccount:{account} --role=ROLE"
        raise LaunchError(f"workers are {account}, which lacks {', '.join(missing)}", f"give it each: {fix}")
    yield f"workers are {account}, which may use bucket and secrets"
