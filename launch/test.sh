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
# tests/conftest.py says how many workers there are and in which order files start: xdist's own order begins with many tests, not
# with long ones. A file stays on one worker, because its tests share fixtures.
failed=0
.venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$checker" || failed=$?
cat "$types"
exit "$failed"
