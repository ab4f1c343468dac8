# Source this at the repository root: it completes .venv, or stops with one line that names what is missing.
# PYTHON chooses an interpreter; without it the first suitable one is used.

# launch/install.py leaves compiling modules to their first import. Where nothing is written then, each process of a run and of the
# tests compiles JAX and its libraries anew: four seconds each.
unset PYTHONDONTWRITEBYTECODE

usable_python() { # runs it: pyenv puts a shim on PATH for every version, so a name on PATH proves nothing
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate seen=""
  set -- ${PYTHON:+"$PYTHON"}
  [ $# -gt 0 ] || set -- python3.13 python3.12 python3.11 python3 python
  for candidate; do
    if ! command -v "$candidate" >/dev/null 2>&1; then
      [ -z "${PYTHON:-}" ] || seen="$seen, $candidate (no such program)"
    elif ! usable_python "$candidate"; then
      seen="$seen, $candidate ($("$candidate" --version 2>&1 | grep -m1 '^Python [0-9]' || echo 'does not start'))"
    elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      seen="$seen, $candidate (no venv module; on Debian: apt install python3-venv)"
    else
      command -v "$candidate"
      return
    fi
  done
  local found="${seen#, }"
  echo "error: Python 3.11, 3.12 or 3.13 is needed; found ${found:-none}." \
    "Install one (https://www.python.org/downloads) or name it: PYTHON=/path/to/python3.12" >&2
  return 1
}

if ! { [ -x .venv/bin/python ] && .venv/bin/python launch/install.py --check 2>/dev/null; }; then
  python="$(find_python)" || exit 1
  "$python" launch/install.py || exit 1
fi
