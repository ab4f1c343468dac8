#!/bin/bash
# Runs in every pod: entrypoint.sh BUCKET [VARIABLE=secret-name ...] -- MODULE arguments
# GKE puts the hosts of a slice into TPU_WORKER_HOSTNAMES and, with several slices, the address of slice 0 into
# MEGASCALE_COORDINATOR_ADDRESS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bucket="$1"
shift
secrets=()
while [ "$1" != -- ]; do
  secrets+=("$1")
  shift
done
shift

coordinator="${MEGASCALE_COORDINATOR_ADDRESS:-${TPU_WORKER_HOSTNAMES%%,*}}"
export JAX_COORDINATOR_ADDRESS="${coordinator%%:*}:8476" # Google's firewall rule does not open jax's default, 8482
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu}" # no silent run on the CPU
export JAX_COMPILATION_CACHE_DIR="$bucket/jax-cache"

python="${PYTHON:-.venv/bin/python}"
"$python" launch/cloud/extras.py "${@:2}"
command=("$python" -m "$@")
if [ "$1" = rpg_jax.serve ]; then
  unset "${!MEGASCALE_@}" # each server is by itself, also where GKE takes the servers for slices of one job
fi
if [ "${#secrets[@]}" -gt 0 ]; then
  command=("$python" launch/cloud/with_secrets.py "--project=${GOOGLE_CLOUD_PROJECT:?}" "${secrets[@]}" -- "${command[@]}")
fi
exec "${command[@]}" # signals reach the trainer, which saves
