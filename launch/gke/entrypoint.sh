#!/bin/bash
# Runs in every pod: entrypoint.sh BUCKET DEADLINE [VARIABLE=secret-name ...] -- MODULE arguments
# DEADLINE is in seconds since 1970, or 0. GKE puts the hosts of a slice into TPU_WORKER_HOSTNAMES and, with several
# slices, the address of slice 0 into MEGASCALE_COORDINATOR_ADDRESS.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
bucket="$1" deadline="$2"
shift 2
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
"$python" launch/cloud/extras.py "${@:2}" || exit
command=("$python" -m "$@")
if [ "$1" = rpg_jax.serve ]; then
  unset "${!MEGASCALE_@}" # each server is by itself, also where GKE takes the servers for slices of one job
fi
if [ "${#secrets[@]}" -gt 0 ]; then
  command=("$python" launch/cloud/with_secrets.py "--project=${GOOGLE_CLOUD_PROJECT:?}" "${secrets[@]}" -- "${command[@]}")
fi
if [ "$deadline" -gt 0 ]; then
  left=$((deadline - $(date +%s)))
  command=(timeout --foreground --kill-after=60 "$((left > 0 ? left : 1))" "${command[@]}")
fi

stopped=''
trap 'stopped=1; kill -TERM "$trainer"' TERM INT # the trainer saves
"${command[@]}" &
trainer=$!
wait "$trainer"
status=$?
while kill -0 "$trainer" 2>/dev/null; do
  wait "$trainer"
  status=$?
done
case "$status" in
  0 | 2 | 3) ;; # the end: no restart changes it
  124) echo 'the hours of --max-hours or --budget are over; the run is saved' && status=3 ;;
  *) # the JobSet starts all pods again at once: what fails within minutes waits a minute
    if [ -z "$stopped" ] && [ "$SECONDS" -lt 600 ]; then sleep "${PAUSE:-60}"; fi
    ;;
esac
exit "$status"
