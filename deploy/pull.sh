#!/usr/bin/env bash
# pull.sh REPOSITORY [PLAYBOOK [ARGUMENT...]]: a host tunes itself, from cron or a systemd timer; needs ansible-core.
#
# ansible-pull does the checkout, runs nothing when nothing changed (--only-if-changed), and keeps a lock of
# the work tree by itself. The inventory is this host alone.
set -euo pipefail

repository=$1 playbook=${2:-tune.yml}
shift $(($# > 1 ? 2 : 1))
exec ansible-pull --url "$repository" --directory "${GPU_TUNING_CHECKOUT:-/var/lib/gpu-tuning-pull}" \
    --inventory inventory/hosts.yml --limit localhost "$playbook" "$@"
