# Runs on every worker: at each boot as its startup script (without an argument, like `run`), and when launch/tpu asks for
# run, stop or status. Every part may run again at any time. The header that launch/tpu writes above sets FILES
# (gs://.../launch/NAME).
set -euo pipefail
root=/opt/rpg log=/var/log/rpg.log
export HOME=/root

active() { systemctl is-active --quiet rpg; }

fetch() { # fetch NAME: copies the file from the bucket to new/NAME; fails if the bucket does not have it
  gcloud storage cp --quiet "$FILES/$1" "$root/new/$1" >/dev/null 2>&1
}

unpack() { # the environment stays, and supervise.py completes it
  if cmp -s "$root/new/source.tar.gz" "$root/source.tar.gz"; then return; fi
  rm -rf "$root/unpacked"
  mkdir "$root/unpacked"
  tar -xzf "$root/new/source.tar.gz" -C "$root/unpacked"
  if [ -d "$root/repository/.venv" ]; then mv "$root/repository/.venv" "$root/unpacked/.venv"; fi
  rm -rf "$root/repository"
  mv "$root/unpacked" "$root/repository"
  cp "$root/new/source.tar.gz" "$root/source.tar.gz"
}

start() { # a stop has a minute to save
  cp "$root/new/run.sh" "$root/run.sh"
  systemctl reset-failed rpg 2>/dev/null || true
  systemd-run --quiet --unit=rpg --working-directory="$root/repository" \
    --property=TimeoutStopSec=60 \
    --property="StandardOutput=append:$log" --property="StandardError=append:$log" \
    /bin/bash "$root/run.sh"
}

run() {
  if ! fetch run.sh; then
    echo "nothing to run: $FILES/run.sh does not exist"
  elif gcloud storage ls "$FILES/finished" >/dev/null 2>&1; then
    echo "already finished"
  elif gcloud storage ls "$FILES/failed" >/dev/null 2>&1; then
    echo "given up: launch/tpu up starts it again"
  elif active && cmp -s "$root/new/run.sh" "$root/run.sh" && cmp -s "$root/new/source.tar.gz" "$root/source.tar.gz"; then
    echo "already running"
  else
    if active; then systemctl stop rpg; fi
    unpack
    start
    echo "started"
  fi
}

worker="$(curl -sf -H 'Metadata-Flavor: Google' \
  http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number || echo 0)"
if [ "${1:-}" = status ]; then
  echo "worker $worker: $(systemctl is-active rpg || true): $(tail -n 1 "$log" 2>/dev/null || true)"
  exit
fi
mkdir -p "$root/new"
exec 9>"$root/lock"
flock 9
case "${1:-run}" in
  run)
    fetch source.tar.gz
    run
    ;;
  stop) if active; then systemctl stop rpg; fi ;;
esac
echo "worker $worker done"
