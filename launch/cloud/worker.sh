# Runs on every worker at each boot, as its startup script, and from then on once a minute (`look`). The header that
# launch/tpu writes above sets FILES (gs://.../launch/NAME), which says what the worker has to do:
#   run.sh appears or changes      start it, with the files of source.tar.gz
#   run.sh disappears              save and stop
#   finished, failed               start nothing
# A bucket that does not answer changes nothing.
set -euo pipefail
root=/opt/rpg log=/var/log/rpg.log started=/run/rpg-started # /run is empty after a boot
export HOME=/root

active() { systemctl is-active --quiet rpg; }

fetch() { # fetch NAME: copies the file from the bucket to new/NAME; fails if the bucket does not have it
  gcloud storage cp --quiet "$FILES/$1" "$root/new/$1" >/dev/null 2>&1
}

same() { cmp -s "$root/new/$1" "$root/$1"; }

unpack() { # the environment stays, and supervise.py completes it
  rm -rf "$root/unpacked"
  mkdir "$root/unpacked"
  tar -xzf "$root/new/source.tar.gz" -C "$root/unpacked"
  if [ -d "$root/repository/.venv" ]; then mv "$root/repository/.venv" "$root/unpacked/.venv"; fi
  rm -rf "$root/repository"
  mv "$root/unpacked" "$root/repository"
  cp "$root/new/source.tar.gz" "$root/source.tar.gz"
}

start() { # a stop has a minute to save
  if active; then systemctl stop rpg; fi
  if ! same source.tar.gz; then unpack; fi
  cp "$root/new/run.sh" "$root/run.sh"
  systemctl reset-failed rpg 2>/dev/null || true
  systemd-run --quiet --unit=rpg --working-directory="$root/repository" \
    --property=TimeoutStopSec=60 \
    --property="StandardOutput=append:$log" --property="StandardError=append:$log" \
    /bin/bash "$root/run.sh"
}

look() {
  local listed asked
  listed="$(gcloud storage ls --long "$FILES/" 2>/dev/null)" || return 0
  asked="$(grep '/run\.sh$' <<<"$listed" || true)" # with its time: `up` asks anew with the same file too
  if [ -z "$asked" ]; then
    if active; then systemctl stop rpg; fi
    rm -f "$started"
  elif ! grep -qE '/(finished|failed)$' <<<"$listed" && [ "$asked" != "$(cat "$started" 2>/dev/null)" ]; then
    fetch source.tar.gz
    fetch run.sh
    if ! { active && same run.sh && same source.tar.gz; }; then start; fi
    echo "$asked" >"$started"
  fi
}

mkdir -p "$root/new"
if [ "${1:-}" = look ]; then
  look
elif ! systemctl is-active --quiet rpg-look.timer; then
  cp "$0" "$root/look.sh"
  systemd-run --quiet --unit=rpg-look --on-active=1 --on-unit-inactive=60 --timer-property=AccuracySec=5 \
    /bin/bash "$root/look.sh" look
fi
