# Runs as the service `rpg` of every worker. The lines above, which launch/tpu writes, set
#   FILES     gs://.../launch/NAME     BUCKET   gs://...     COMMIT   of the code
#   CONFIG    the arguments for extras.py     COMMAND  the trainer or a server
#   FREE      the command that deletes the TPU, or nothing     DEADLINE  seconds since 1970, or 0
# The trainer starts again after a failure, after growing pauses, five times; an hour of work makes a failure the first
# one again. Codes 2 and 3 are the last. At the end, also of a run that failed, the TPU is deleted.
attribute() {
  curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
note() { # note NAME TEXT: launch/tpu looks for this file
  for _ in 1 2 3 4 5; do
    if printf '%s\n' "$2" | gcloud storage cp - "$FILES/$1"; then break; fi
    sleep "${PAUSE:-15}"
  done
}
free() { # by one worker or by several
  if [ "${#FREE[@]}" -gt 0 ]; then "${FREE[@]}" || echo 'the TPU is still there and costs: launch/tpu delete'; fi
}

worker="$(attribute agent-worker-number)"
coordinator="$(attribute tpu-env | sed -n "s/^MEGASCALE_COORDINATOR_ADDRESS: *'\([^:']*\).*/\1/p")"
if [ -z "$coordinator" ]; then
  coordinator="$(attribute worker-network-endpoints | cut -d, -f1 | cut -d: -f3)"
fi
export JAX_COORDINATOR_ADDRESS="$coordinator:8476" # Google's firewall rule does not open jax's default, 8482 (jax#35905)
export JAX_COMPILATION_CACHE_DIR="$BUCKET/jax-cache" JAX_PLATFORMS=tpu RPG_COMMIT="$COMMIT"

stopped=''
trap 'stopped=1' TERM # the trainer gets the signal too; wait for it to save
failures=0
while :; do
  began=$SECONDS status=1 limit=()
  if [ "$DEADLINE" -gt 0 ]; then
    left=$((DEADLINE - $(date +%s)))
    if [ "$left" -le 0 ]; then status=124 && break; fi
    limit=(timeout --foreground --kill-after=60 "$left")
  fi
  if .venv/bin/python launch/cloud/extras.py "${CONFIG[@]}"; then
    "${limit[@]}" "${COMMAND[@]}" &
    trainer=$!
    wait "$trainer"
    status=$?
    while kill -0 "$trainer" 2>/dev/null; do
      wait "$trainer"
      status=$?
    done
  fi
  if [ "$status" = 0 ]; then
    if [ "$worker" = 0 ]; then
      note finished "$(date --utc +%FT%TZ)"
      free
    fi
    exit 0
  fi
  if [ -n "$stopped" ]; then exit "$status"; fi
  case "$status" in 2 | 3 | 124) break ;; esac
  if [ $((SECONDS - began)) -gt 3600 ]; then failures=0; fi
  failures=$((failures + 1))
  if [ "$failures" -gt 5 ]; then break; fi
  echo "exit code $status; starting again"
  sleep $((${PAUSE:-15} * 2 ** failures)) &
  wait $!
  if [ -n "$stopped" ]; then exit "$status"; fi
done
case "$status" in
  124) reason='the hours of --max-hours or --budget are over; the run is saved' ;;
  *) reason="worker $worker ended with exit code $status after $failures failures" ;;
esac
gcloud storage cp "${LOG_FILE:-/var/log/rpg.log}" "$FILES/logs/worker-$worker.log"
note failed "$reason"
sleep "${PAUSE:-15}" # the other workers copy their logs
free
exit "$status"
