#!/usr/bin/env bash
# by_hand.sh ROOT: what people paste from wikis to tune a host, on a recorded machine, with read-back.
set -euo pipefail
root=$1 wrong=0

set_and_check() { # set_and_check FILE VALUE
    echo "$2" >"$1"
    [ "$(<"$1")" = "$2" ] || { echo "$1 is $(<"$1")"; wrong=1; }
}

for setting in kernel/numa_balancing=0 kernel/nmi_watchdog=0 kernel/sched_autogroup_enabled=0 vm/swappiness=10 \
    vm/dirty_ratio=5 vm/dirty_background_ratio=2 net/core/rmem_max=16777216 net/core/wmem_max=16777216 \
    kernel/perf_event_paranoid=1; do
    set_and_check "$root/proc/sys/${setting%=*}" "${setting#*=}"
done
for state in "$root"/sys/devices/system/cpu/cpu*/cpuidle/state2/disable; do set_and_check "$state" 1; done
for gpu in 01 11 61 71 81 91 e1 f1; do
    # Device Control of this very card is at 0x68; setpci would find it.
    config=$root/sys/bus/pci/devices/0000:$gpu:00.0/config
    printf '\x37\x59' | dd of="$config" bs=1 seek=$((0x68)) conv=notrunc status=none
    [ "$(od -An -tx1 -j $((0x68)) -N 2 "$config")" = " 37 59" ] || { echo "$config differs"; wrong=1; }
done
exit $wrong
