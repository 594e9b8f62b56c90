#!/bin/bash
# The same job as `tune.yml --tags runtime`, as people do it by hand: ssh host 'bash -s' <by_hand.sh, with the
# recorded machine's root and a folder for the values found as $1 and $2.
set -eu
root=$1 state=$2
mkdir -p "$state"

want=(kernel/numa_balancing=0 kernel/nmi_watchdog=0 kernel/sched_autogroup_enabled=0 kernel/perf_event_paranoid=1
    vm/swappiness=10 vm/dirty_ratio=5 vm/dirty_background_ratio=2 net/core/rmem_max=16777216
    net/core/wmem_max=16777216)
gpus=("$root"/sys/bus/pci/devices/0000:{01,11,61,71,81,91,e1,f1}:00.0/config)
flags=("$root"/sys/devices/system/cpu/cpu*/cpuidle/state2/disable)

# Snapshot.
for pair in "${want[@]}"; do read -r old <"$root/proc/sys/${pair%=*}"; echo "${pair%=*}=$old"; done >"$state/sysctls"
for flag in "${flags[@]}"; do read -r old <"$flag"; echo "$flag=$old"; done >"$state/flags"
for gpu in "${gpus[@]}"; do echo "$gpu=$(od -An -tx1 -j105 -N1 "$gpu")"; done >"$state/gpus"

# Apply. On a live host setpci -s GPU CAP_EXP+8.w=5000:7000 does what printf and dd do here.
for pair in "${want[@]}"; do echo "${pair#*=}" >"$root/proc/sys/${pair%=*}"; done
for flag in "${flags[@]}"; do echo 1 >"$flag"; done
for gpu in "${gpus[@]}"; do printf '\x59' | dd of="$gpu" bs=1 seek=105 conv=notrunc status=none; done

# Read back.
for pair in "${want[@]}"; do read -r new <"$root/proc/sys/${pair%=*}"; [ "$new" = "${pair#*=}" ]; done
for flag in "${flags[@]}"; do read -r new <"$flag"; [ "$new" = 1 ]; done
for gpu in "${gpus[@]}"; do [ "$(od -An -tx1 -j105 -N1 "$gpu")" = " 59" ]; done
echo "done: ${#want[@]} sysctls, ${#flags[@]} idle states, ${#gpus[@]} GPUs"
