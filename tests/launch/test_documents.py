"""Every launch/tpu and launch/xpk command in the documents runs dry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^launch/(tpu|xpk) (.+?)(?:  +#.*)?$", re.MULTILINE)
COMMANDS = [
    match.groups() for name in ("README.md", "docs/cloud.md") for match in COMMAND.finditer((ROOT / name).read_text())
]


@pytest.mark.parametrize("program, line", COMMANDS, ids=lambda value: value[:40])
def test_documented_commands_run_dry(cloud, program, line):
    needs = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine"
    first = line.replace("--name", f"{needs} --name", 1) if "--type" not in line else line
    if "types" not in line:
        first = first.replace(" ", " --dry-run ", 1)
    assert cloud.run(first, program) == 0, cloud.err
    assert cloud.out and not cloud.calls


def test_the_documents_show_commands():
    assert len(COMMANDS) >= 8
