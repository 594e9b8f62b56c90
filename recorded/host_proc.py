# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything of the recorded host that is neither a PCI device nor a CPU: /proc, memory, disks, /etc."""

from __future__ import annotations

from host_options import HostOptions
from host_topology import GPU_BUSES
from host_tree import WRITABLE, HostTree

KERNEL = "6.8.12-9-pve"
DRIVER = "580.76.05"

CMDLINE = f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=/dev/mapper/pve-root ro quiet"

VERSION = (
    f"Linux version {KERNEL} (build@proxmox) (gcc (Debian 12.2.0-14) 12.2.0, "
    "GNU ld (GNU Binutils for Debian) 2.40) #1 SMP PREEMPT_DYNAMIC PMX 6.8.12-9 (2025-03-16T19:18Z)"
)

MEMINFO = """\
MemTotal:       1583659008 kB
MemFree:        1516550144 kB
MemAvailable:   1520000000 kB
SwapTotal:       8388604 kB
SwapFree:        8388604 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB"""

CHARACTER_DEVICES = """\
  1 mem
  4 /dev/vc/0
  4 tty
  4 ttyS
  5 /dev/tty
  5 /dev/console
  5 /dev/ptmx
  5 ttyprintk
  7 vcs
 10 misc
 13 input
 21 sg
 29 fb
 89 i2c
116 alsa
128 ptm
136 pts
180 usb
189 usb_device
195 nvidia
195 nvidia-modeset
195 nvidiactl
202 cpu/msr
204 ttyMAX
226 drm
231 infiniband_verbs
234 nvidia-nvswitch
235 nvidia-nvlink
236 nvidia-caps
237 aux
238 cec
239 nvme-generic
240 nvme
241 hidraw
242 bsg
243 watchdog
244 remoteproc
245 ptp
246 pps
247 rtc
248 dma_heap
249 dax
250 dimmctl
251 ndctl
252 tpm
253 vfio
254 gpiochip
511 nvidia-uvm"""

BLOCK_DEVICES = """\
  7 loop
  8 sd
  9 md
230 zvol
252 device-mapper
259 blkext"""

#: Name, size, users, names of the users, taint flags.
MODULES = (
    ("nvidia_uvm", 2162688, 4, "-", "POE"),
    ("nvidia_drm", 139264, 0, "-", "POE"),
    ("nvidia_modeset", 1765376, 1, "nvidia_drm,", "POE"),
    ("nvidia", 14376960, 3, "nvidia_uvm,nvidia_modeset,", "POE"),
    ("drm_kms_helper", 253952, 4, "nvidia_drm,ast,", ""),
    ("drm", 761856, 7, "nvidia_drm,nvidia,drm_kms_helper,ast,", ""),
    ("ast", 77824, 0, "-", ""),
    ("kvm_amd", 212992, 0, "-", ""),
    ("kvm", 1409024, 1, "kvm_amd,", ""),
    ("ccp", 143360, 1, "kvm_amd,", ""),
    ("zfs", 6602752, 0, "-", "PO"),
    ("spl", 180224, 1, "zfs,", "O"),
    ("mlx5_ib", 507904, 0, "-", ""),
    ("mlx5_core", 2228224, 1, "mlx5_ib,", ""),
    ("nvme", 61440, 2, "-", ""),
    ("nvme_core", 208896, 3, "nvme,", ""),
    ("amd64_edac", 61440, 0, "-", ""),
    ("acpi_cpufreq", 32768, 0, "-", ""),
    ("vfio_pci", 16384, 0, "-", ""),
    ("vfio", 69632, 1, "vfio_pci,", ""),
    ("bonding", 241664, 0, "-", ""),
    ("tls", 155648, 1, "bonding,", ""),
)

DRIVER_VERSION = f"""\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (root@host)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)"""

DRIVER_PARAMETERS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
EnableMSI: 1
EnablePCIeGen3: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
PreserveVideoMemoryAllocations: 0
DynamicPowerManagement: 3
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
DmaRemapPeerMmio: 1
RegistryDwords: ""
RegistryDwordsPerDevice: ""
ExcludedGpus: \"\""""

GPU_INFORMATION = """\
Model: \t\t NVIDIA RTX PRO 6000 Blackwell Workstation Edition
IRQ:   \t\t {irq}
GPU UUID: \t GPU-00000000-0000-0000-0000-{number:012x}
Video BIOS: \t 98.02.00.00.00
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t {driver}
GPU Excluded:\t No"""

SYSCTLS = {
    "kernel/numa_balancing": 1,
    "kernel/nmi_watchdog": 1,
    "kernel/watchdog": 1,
    "kernel/soft_watchdog": 1,
    "kernel/watchdog_thresh": 10,
    "kernel/sched_autogroup_enabled": 1,
    "kernel/perf_event_paranoid": 4,
    "kernel/timer_migration": 1,
    "kernel/sched_rt_runtime_us": 950000,
    "kernel/randomize_va_space": 2,
    "kernel/osrelease": KERNEL,
    "kernel/hostname": "host",
    "kernel/pid_max": 4194304,
    "kernel/threads-max": 12372000,
    "vm/swappiness": 60,
    "vm/dirty_ratio": 20,
    "vm/dirty_background_ratio": 10,
    "vm/dirty_bytes": 0,
    "vm/dirty_background_bytes": 0,
    "vm/dirty_expire_centisecs": 3000,
    "vm/dirty_writeback_centisecs": 500,
    "vm/zone_reclaim_mode": 0,
    "vm/stat_interval": 1,
    "vm/max_map_count": 262144,
    "vm/overcommit_memory": 0,
    "vm/overcommit_ratio": 50,
    "vm/nr_hugepages": 0,
    "vm/compaction_proactiveness": 20,
    "vm/min_free_kbytes": 67584,
    "vm/vfs_cache_pressure": 100,
    "vm/watermark_scale_factor": 10,
    "net/core/rmem_max": 212992,
    "net/core/wmem_max": 212992,
    "net/core/rmem_default": 212992,
    "net/core/wmem_default": 212992,
    "net/core/netdev_max_backlog": 1000,
    "net/core/somaxconn": 4096,
    "net/core/busy_poll": 0,
    "net/core/busy_read": 0,
    "net/core/default_qdisc": "pfifo_fast",
    "net/ipv4/tcp_rmem": "4096\t131072\t6291456",
    "net/ipv4/tcp_wmem": "4096\t16384\t4194304",
    "net/ipv4/tcp_congestion_control": "cubic",
    "net/ipv4/ip_local_port_range": "32768\t60999",
    "fs/file-max": 9223372036854775807,
    "fs/nr_open": 1048576,
    "fs/inotify/max_user_watches": 1048576,
}

BLOCK_QUEUE = {
    "scheduler": "[none] mq-deadline ",
    "read_ahead_kb": 128,
    "nr_requests": 1023,
    "rq_affinity": 1,
}

DMI = {
    "sys_vendor": "To Be Filled By O.E.M.",
    "product_name": "2P EPYC 9005 GPU Server",
    "board_vendor": "To Be Filled By O.E.M.",
    "board_name": "2P-SP5",
    "bios_vendor": "American Megatrends International, LLC.",
    "bios_version": "1.0",
    "bios_date": "01/01/2025",
}

OS_RELEASE = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian"""

GRUB_DEFAULTS = """\
GRUB_DEFAULT=0
GRUB_TIMEOUT=5
GRUB_DISTRIBUTOR=`lsb_release -i -s 2> /dev/null || echo Debian`
GRUB_CMDLINE_LINUX_DEFAULT="quiet"
GRUB_CMDLINE_LINUX=\"\""""


def write_proc(tree: HostTree, options: HostOptions) -> None:
    """Write what is neither a PCI device nor a CPU into a tree."""
    write_kernel(tree, options)
    write_nvidia_driver(tree)
    tree.writable("proc/sys", SYSCTLS)
    write_memory_and_disks(tree)
    tree.files("sys/class/dmi/id", DMI)
    etc = {"os-release": OS_RELEASE, "default/grub": GRUB_DEFAULTS, "debian_version": "12.10"}
    tree.files("etc", etc, WRITABLE)


def write_kernel(tree: HostTree, options: HostOptions) -> None:
    """Write what the running kernel says of itself."""
    contents = {
        "cmdline": f"{CMDLINE} {options.cmdline}" if options.cmdline else CMDLINE,
        "version": VERSION,
        "meminfo": MEMINFO,
        "devices": f"Character devices:\n{CHARACTER_DEVICES}\n\nBlock devices:\n{BLOCK_DEVICES}",
        "modules": "\n".join(module_line(*module) for module in MODULES),
    }
    tree.files("proc", contents)
    if options.boot_id:
        tree.file("proc/sys/kernel/random/boot_id", options.boot_id)


def module_line(name: str, size: int, users: int, used_by: str, taints: str) -> str:
    """Return a module's line in /proc/modules."""
    line = f"{name} {size} {users} {used_by} Live 0x0000000000000000"
    return f"{line} ({taints})" if taints else line


def write_nvidia_driver(tree: HostTree) -> None:
    """Write the NVIDIA driver's files; GPU minors follow the bus order here, as they need not."""
    for name in (module[0] for module in MODULES):
        if name.startswith("nvidia"):
            tree.file(f"sys/module/{name}/initstate", "live")
    tree.file("sys/module/nvidia/version", DRIVER)
    tree.files("proc/driver/nvidia", {"version": DRIVER_VERSION, "params": DRIVER_PARAMETERS})
    for minor, bus in enumerate(GPU_BUSES):
        address = f"0000:{bus}:00.0"
        information = GPU_INFORMATION.format(
            irq=300 + minor, number=minor + 1, address=address, minor=minor, driver=DRIVER
        )
        tree.file(f"proc/driver/nvidia/gpus/{address}/information", information)


def write_memory_and_disks(tree: HostTree) -> None:
    """Write huge pages and the queues of two NVMe drives."""
    memory = "sys/kernel/mm"
    huge_pages = {
        "enabled": "always [madvise] never",
        "defrag": "always defer defer+madvise [madvise] never",
    }
    tree.writable(f"{memory}/transparent_hugepage", huge_pages)
    for size in ("2048kB", "1048576kB"):
        tree.writable(f"{memory}/hugepages/hugepages-{size}", {"nr_hugepages": 0})
    for drive in ("nvme0n1", "nvme1n1"):
        tree.writable(f"sys/block/{drive}/queue", BLOCK_QUEUE)
        tree.files(f"sys/block/{drive}/queue", {"rotational": 0})
