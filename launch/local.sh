#!/usr/bin/env bash
# Trains a small Qwen by RPG on this machine:  bash launch/local.sh [--config=configs/x.py] [--config.field=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh

config=(--config=configs/tiny.py)
for argument in "$@"; do
  case "$argument" in --config | --config=*) config=() ;; esac
done
exec .venv/bin/python -m rpg_jax.train ${config[@]+"${config[@]}"} "$@"
