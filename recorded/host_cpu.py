# SPDX-License-Identifier: GPL-3.0-or-later
"""The CPUs of the recorded host: topology, caches, idle states, frequencies and NUMA nodes."""

from __future__ import annotations

from host_options import HostOptions
from host_topology import CORES_PER_CCD, CORES_PER_SOCKET, CPU_COUNT, Topology, cpu_list, cpu_mask, socket_of
from host_tree import HostTree

CPU_ROOT = "sys/devices/system/cpu"
NODE_ROOT = "sys/devices/system/node"
SOCKET_MEMORY_KB = 791829504
SOCKET_MEMORY_USED_KB = 33554432
HUGE_PAGES = ("2048kB", "1048576kB")

VULNERABILITIES = {
    "meltdown": "Not affected",
    "spectre_v1": "Mitigation: usercopy/swapgs barriers and __user pointer sanitization",
    "spectre_v2": "Mitigation: Enhanced / Automatic IBRS; IBPB: conditional; STIBP: always-on; RSB filling; "
    "PBRSB-eIBRS: Not affected; BHI: Not affected",
    "spec_store_bypass": "Mitigation: Speculative Store Bypass disabled via prctl",
    "spec_rstack_overflow": "Not affected",
    "l1tf": "Not affected",
    "mds": "Not affected",
    "tsx_async_abort": "Not affected",
    "retbleed": "Not affected",
    "gather_data_sampling": "Not affected",
}

#: Level, type, size in KiB and ways of each cache a CPU sees.
CACHES = (
    (1, "Data", 48, 12),
    (1, "Instruction", 32, 8),
    (2, "Unified", 1024, 16),
    (3, "Unified", 32768, 16),
)
CACHE_LINE = 64

BASE_KHZ, BOOST_KHZ, LOWEST_KHZ = 3000000, 4400000, 1500000
DRIVERS = {"active": "amd-pstate-epp", "passive": "amd-pstate", "guided": "amd-pstate"}
ACPI_GOVERNORS = "conservative ondemand userspace powersave performance schedutil "
PREFERENCES = "default performance balance_performance balance_power power "

CPUINFO = """\
processor\t: {cpu}
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9335 32-Core Processor
stepping\t: 1
microcode\t: 0xb002116
cpu MHz\t\t: 3000.000
cache size\t: 1024 KB
physical id\t: {socket}
siblings\t: {siblings}
core id\t\t: {core}
cpu cores\t: 32
apicid\t\t: {apic}
fpu\t\t: yes
cpuid level\t: 16
flags\t\t: fpu vme de pse tsc msr sse sse2 ht nx rdtscp lm constant_tsc nonstop_tsc aperfmperf monitor svm \
avx avx2 avx512f avx512_bf16 hw_pstate cppc
bogomips\t: 6000.00
power management: ts ttp tm hwpstate cpb eff_freq_ro [13] [14]

"""


class Cpus:
    """Writes every CPU and NUMA node of the host into a tree."""

    def __init__(self, tree: HostTree, topology: Topology, options: HostOptions) -> None:
        """Keep what the CPUs depend on."""
        self._tree = tree
        self._topology = topology
        self._options = options

    def write(self) -> None:
        """Write what is common, then the nodes, then each CPU."""
        self._write_common()
        self._write_common_drivers()
        for node in range(self._topology.node_count):
            self._write_node(node)
        self._write_node_lists()
        for cpu in range(CPU_COUNT):
            self._write_cpu(cpu)
        cpuinfo = "".join(self._cpuinfo(cpu) for cpu in self._topology.online)
        self._tree.file("proc/cpuinfo", cpuinfo.encode())

    def _write_common(self) -> None:
        everything = cpu_list(range(CPU_COUNT))
        contents = {
            "online": cpu_list(self._topology.online),
            "present": everything,
            "possible": everything,
            "offline": cpu_list(self._topology.offline),
            "isolated": "",
            "nohz_full": "(null)",
            "kernel_max": 8191,
            "smt/active": 1,
        }
        self._tree.files(CPU_ROOT, contents)
        self._tree.writable(CPU_ROOT, {"smt/control": "on"})
        self._tree.files(f"{CPU_ROOT}/vulnerabilities", VULNERABILITIES)

    def _write_common_drivers(self) -> None:
        contents = {
            "current_driver": "acpi_idle",
            "current_governor_ro": "menu",
            "available_governors": "ladder menu teo haltpoll ",
        }
        self._tree.files(f"{CPU_ROOT}/cpuidle", contents)
        self._tree.writable(f"{CPU_ROOT}/cpuidle", {"current_governor": "menu"})
        if self._options.amd_pstate is None:
            self._tree.writable(CPU_ROOT, {"cpufreq/boost": 1})
        else:
            self._tree.writable(CPU_ROOT, {"amd_pstate/status": self._options.amd_pstate})
            self._tree.files(CPU_ROOT, {"amd_pstate/prefcore": "disabled"})

    def _write_node(self, node: int) -> None:
        directory = f"{NODE_ROOT}/node{node}"
        cpus = self._topology.node_cpus(node)
        contents = {
            "cpulist": cpu_list(cpus),
            "cpumap": cpu_mask(cpus),
            "distance": " ".join(str(each) for each in self._distances(node)),
            "meminfo": self._node_memory(node),
        }
        self._tree.files(directory, contents)
        for size in HUGE_PAGES:
            pages = f"{directory}/hugepages/hugepages-{size}"
            self._tree.writable(pages, {"nr_hugepages": 0})
            self._tree.files(pages, {"free_hugepages": 0})
        for cpu in cpus:
            self._tree.link(f"{directory}/cpu{cpu}", f"{CPU_ROOT}/cpu{cpu}")

    def _distances(self, node: int) -> list[int]:
        per_socket = self._topology.nodes_per_socket
        to_socket = [12 if other // per_socket == node // per_socket else 32 for other in self._nodes()]
        return [10 if other == node else to_socket[other] for other in self._nodes()]

    def _node_memory(self, node: int) -> str:
        total = SOCKET_MEMORY_KB // self._topology.nodes_per_socket
        used = SOCKET_MEMORY_USED_KB // self._topology.nodes_per_socket
        lines = [f"MemTotal:       {total} kB", f"MemFree:        {total - used} kB"]
        lines += [f"HugePages_{name}     0" for name in ("Total:", "Free: ", "Surp: ")]
        return "\n".join(f"Node {node} {line}" for line in lines)

    def _nodes(self) -> range:
        return range(self._topology.node_count)

    def _write_node_lists(self) -> None:
        names = ("online", "possible", "has_cpu", "has_memory", "has_normal_memory")
        self._tree.files(NODE_ROOT, dict.fromkeys(names, f"0-{self._topology.node_count - 1}"))

    def _write_cpu(self, cpu: int) -> None:
        """Write one CPU; of one that is offline the kernel shows hardly more than that."""
        directory = f"{CPU_ROOT}/cpu{cpu}"
        is_online = cpu not in self._topology.offline
        if cpu:  # the first CPU cannot be taken offline
            self._tree.writable(directory, {"online": int(is_online)})
        node = self._topology.node_of_cpu(cpu)
        if is_online:
            self._tree.link(f"{directory}/node{node}", f"{NODE_ROOT}/node{node}")
            self._write_topology(directory, cpu)
            self._write_caches(directory, cpu)
            self._write_idle_states(directory, cpu)
            self._write_frequency(directory, cpu)

    def _write_topology(self, directory: str, cpu: int) -> None:
        core = self._topology.core_cpus(cpu)
        socket = self._topology.socket_cpus(socket_of(cpu))
        contents: dict[str, object] = {
            "physical_package_id": socket_of(cpu),
            "core_id": cpu % CORES_PER_SOCKET,
            "die_id": 0,
            "cluster_id": 65535,
        }
        for name in ("thread_siblings", "core_cpus"):
            contents.update({name: cpu_mask(core), f"{name}_list": cpu_list(core)})
        for name in ("core_siblings", "package_cpus", "die_cpus"):
            contents.update({name: cpu_mask(socket), f"{name}_list": cpu_list(socket)})
        self._tree.files(f"{directory}/topology", contents)

    def _write_caches(self, directory: str, cpu: int) -> None:
        socket, core = socket_of(cpu), cpu % CORES_PER_SOCKET
        for index, (level, kind, kibibytes, ways) in enumerate(CACHES):
            sharing = self._topology.ccd_cpus(cpu) if level == 3 else self._topology.core_cpus(cpu)
            contents = {
                "level": level,
                "type": kind,
                "size": f"{kibibytes}K",
                "shared_cpu_list": cpu_list(sharing),
                "shared_cpu_map": cpu_mask(sharing),
                "coherency_line_size": CACHE_LINE,
                "ways_of_associativity": ways,
                "number_of_sets": kibibytes * 1024 // CACHE_LINE // ways,
                "physical_line_partition": 1,
                "id": socket * 4 + core // CORES_PER_CCD if level == 3 else socket * CORES_PER_SOCKET + core,
            }
            self._tree.files(f"{directory}/cache/index{index}", contents)

    def _write_idle_states(self, directory: str, cpu: int) -> None:
        """Write POLL, C1 and C2 with name, description, exit latency and target residency (us)."""
        latency = self._options.c2_latency
        states = (
            ("POLL", "CPUIDLE CORE POLL IDLE", 0, 0),
            ("C1", "ACPI FFH MWAIT 0x0", 1, 2),
            ("C2", "ACPI IOPORT 0x814", latency, 2 * latency),
        )
        for index, (name, description, exit_latency, residency) in enumerate(states):
            contents = {
                "name": name,
                "desc": description,
                "latency": exit_latency,
                "residency": residency,
                "default_status": "enabled",
                "power": 0 if index else 0xFFFFFFFF,
                "usage": 1000 * (index + 1) + cpu,
                "time": 100000 * (index + 1) + 7 * cpu,
                **dict.fromkeys(("above", "below", "rejected"), 0),
                **(dict.fromkeys(("s2idle/time", "s2idle/usage"), 0) if index else {}),
            }
            self._tree.files(f"{directory}/cpuidle/state{index}", contents)
            self._tree.writable(f"{directory}/cpuidle/state{index}", {"disable": 0})

    def _write_frequency(self, directory: str, cpu: int) -> None:
        driver = DRIVERS.get(self._options.amd_pstate or "", "acpi-cpufreq")
        highest = BASE_KHZ if driver == "acpi-cpufreq" else BOOST_KHZ
        policy = f"{CPU_ROOT}/cpufreq/policy{cpu}"
        contents = {
            "affected_cpus": cpu,
            "related_cpus": cpu,
            "scaling_driver": driver,
            "scaling_available_governors": "performance powersave"
            if driver == "amd-pstate-epp"
            else ACPI_GOVERNORS,
            "cpuinfo_min_freq": LOWEST_KHZ,
            "cpuinfo_max_freq": highest,
            "cpuinfo_transition_latency": 0,
            "scaling_cur_freq": BASE_KHZ,
        }
        limits = {
            "scaling_governor": self._options.governor,
            "scaling_min_freq": LOWEST_KHZ,
            "scaling_max_freq": highest,
            "scaling_setspeed": "<unsupported>",
        }
        self._tree.files(policy, contents)
        self._tree.writable(policy, limits)
        self._write_driver_files(policy, driver, cpu)
        self._tree.link(f"{directory}/cpufreq", policy)

    def _write_driver_files(self, policy: str, driver: str, cpu: int) -> None:
        if driver == "acpi-cpufreq":
            contents = {
                "bios_limit": BASE_KHZ,
                "freqdomain_cpus": " ".join(str(each) for each in self._topology.core_cpus(cpu)),
                "scaling_available_frequencies": "3000000 2300000 1500000 ",
            }
            self._tree.files(policy, contents)
            self._tree.writable(policy, {"cpb": 1})
        elif driver == "amd-pstate-epp":
            self._tree.writable(policy, {"energy_performance_preference": "performance"})
            self._tree.files(policy, {"energy_performance_available_preferences": PREFERENCES})

    def _cpuinfo(self, cpu: int) -> str:
        socket, core = socket_of(cpu), cpu % CORES_PER_SOCKET
        thread = cpu // (CPU_COUNT // 2)
        siblings = len(self._topology.socket_cpus(socket))
        return CPUINFO.format(
            cpu=cpu, socket=socket, siblings=siblings, core=core, apic=socket * 64 + core * 2 + thread
        )
