#!/usr/bin/env bash
# Lint, types and tests in the environment of launch/local.sh:  bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh

.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
# mypy has one CPU for a quarter of a minute, in which the tests have the others.
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
.venv/bin/python -m mypy >"$types" 2>&1 &
checker=$!
# One worker more than CPUs: tests wait for processes, ports and deadlines. A file stays on one worker, because its tests share
# fixtures, and files start in the order of tests/conftest.py: xdist's own begins with many tests, not with long ones.
workers=$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1))
failed=0
.venv/bin/python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$checker" || failed=$?
cat "$types"
exit "$failed"
