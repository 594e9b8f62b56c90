# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts against what other programs say of the same data: lscpu, lspci, numactl, sysctl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning.facts import collect, devices, kernel_log, nvidia_smi, pci_extended, reader, smbios, system
from gpu_tuning.facts.reader import Host, Unknown, colon_fields, format_ranges, parse_ranges
from support.play import REPO
from support.shared import shared
from support.tree import make_recorded_host, manifest

SNAPSHOTS = {
    "hwloc_32intel64-2p8co2t+8ve.tar.bz2": {"sockets": 2, "nodes": 2},
    "hwloc_40intel64-2g2n4c+pcilocality.tar.bz2": {"sockets": 4, "nodes": 4},
    "hwloc_nvidia-dgx-gb10.tar.bz2": {"sockets": 1, "nodes": 1},
    "hwloc_nvidiagpunumanodes.tar.bz2": {"sockets": 2, "nodes": 2},
    "util-linux_x86_64-64cpu-linux6.2.tar.gz": {"sockets": 1, "nodes": 1},
    "util-linux_x86_64-epyc_7451.tar.gz": {"sockets": 2, "nodes": 8},
}


def run(*command: str) -> str:
    """Return a program's output, or skip when it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts_of(root: Path) -> dict[str, Any]:
    return collect(Host.from_options({"sysfs_root": str(root / "sys")}))[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recorded_host(tmp_path_factory.mktemp("facts") / "host", "--fault", "x8=0000:61:00.0")


@pytest.fixture(scope="module", params=sorted(SNAPSHOTS))
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    archive = shared(f"fixtures/snapshots/{request.param}")
    folder = tmp_path_factory.mktemp("snapshot")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return request.param, next(folder.iterdir())


def lscpu(*options: str) -> dict[str, str]:
    """Return lscpu's summary; what it says once for each kind of core is left out."""
    text = run("lscpu", *options)
    names = [line.partition(":")[0].strip() for line in text.splitlines()]
    return {name: value for name, value in colon_fields(text).items() if names.count(name) == 1}


def assert_as_lscpu(facts: dict[str, Any], said: dict[str, str]) -> None:
    """Compare CPUs and NUMA nodes with lscpu's summary, as far as it says something."""
    cpu = facts["cpu"]
    assert parse_ranges(cpu["online"]) == parse_ranges(said["On-line CPU(s) list"])
    for fact, line in (("sockets", "Socket(s)"), ("threads_per_core", "Thread(s) per core")):
        if said.get(line, "-") != "-":
            assert cpu[fact] == int(said[line]), line
    if said.get("Core(s) per socket", "-") != "-":
        assert cpu["cores"] == int(said["Core(s) per socket"]) * cpu["sockets"]
    if cpu["vendor"] in ("AuthenticAMD", "GenuineIntel"):
        assert cpu["model"] == said["Model name"]
    nodes = {f"NUMA node{node['id']} CPU(s)": node["cpus"] for node in facts["numa"]["nodes"] or []}
    told = {line: cpus for line, cpus in said.items() if re.match(r"NUMA node\d+ CPU", line)}
    assert {line: parse_ranges(cpus) for line, cpus in nodes.items()} == {
        line: parse_ranges(cpus) for line, cpus in told.items()
    }


def test_a_snapshot_gives_the_facts_that_lscpu_gives(snapshot: tuple[str, Path]) -> None:
    name, root = snapshot
    facts = facts_of(root)
    assert facts["cpu"]["sockets"] == SNAPSHOTS[name]["sockets"]
    assert facts["numa"]["node_count"] == SNAPSHOTS[name]["nodes"]
    assert_as_lscpu(facts, lscpu("--sysroot", str(root)))


def test_the_recorded_host_gives_the_facts_that_lscpu_gives(recorded: Path) -> None:
    facts = facts_of(recorded)
    assert_as_lscpu(facts, lscpu("--sysroot", str(recorded)))
    assert facts["cpu"]["model"] == "AMD EPYC 9335 32-Core Processor"


def dump(root: Path) -> str:
    """Return every configuration space of a tree in the form that lspci -F reads."""
    parts = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*/config")):
        content = path.read_bytes()
        rows = (
            f"{place:02x}: {content[place : place + 16].hex(' ')}" for place in range(0, len(content), 16)
        )
        parts.append(f"{path.parent.name} x\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def lspci(root: Path, scratch: Path, *options: str) -> dict[str, str]:
    """Return lspci's text of each function of a tree."""
    (scratch / "dump").write_text(dump(root), encoding="utf-8")
    text = run("lspci", "-F", str(scratch / "dump"), "-D", "-n", *options)
    return {block.split()[0]: block for block in re.split(r"\n(?=[0-9a-f]{4}:)", text) if block.strip()}


def test_snapshots_have_the_functions_that_lspci_lists(snapshot: tuple[str, Path], tmp_path: Path) -> None:
    _name, root = snapshot
    if not list(root.glob("sys/bus/pci/devices/*/config")):
        pytest.skip("this snapshot has no PCI configuration spaces")
    said = lspci(root, tmp_path)
    assert facts_of(root)["functions"] == len(said)


def test_the_recorded_host_has_the_registers_that_lspci_prints(recorded: Path, tmp_path: Path) -> None:
    facts = facts_of(recorded)
    said = lspci(recorded, tmp_path, "-vvv")
    compared = 0
    for function in facts["gpus"] + facts["bridges"]:
        text = said[function["address"]]
        payload, request = re.search(r"MaxPayload (\d+) bytes, MaxReadReq (\d+) bytes", text).groups()
        assert function["max_payload_size"] == int(payload)
        assert function["max_read_request_size"] == int(request)
        speed, width = re.search(r"LnkSta:\s+Speed ([0-9.]+)GT/s[^,]*, Width x(\d+)", text).groups()
        assert (function["link_speed_gts"], function["link_width"]) == (float(speed), int(width))
        assert ("RlxdOrd+" in text) == function["relaxed_ordering"]
        assert ("ExtTag+" in text.split("DevCtl:")[1].split("DevSta:")[0]) == function["extended_tags"]
        assert re.search(r"ASPM (\w+)", text.split("LnkCtl:")[1]).group(1).lower() == function["aspm"]
        control = re.search(r"ACSCtl:\s+(.*)", text)
        assert (control is None) == (function["acs"] is None)
        if control:
            assert ("ReqRedir+" in control.group(1)) == ("request_redirect" in function["acs"]["control"])
        compared += 1
    assert compared == 8 + 9  # eight GPUs, their root ports and the network card's
    bar = re.search(r"BAR 1: current size: (\w+), supported: [^\n]*?(\w+)\n", said["0000:01:00.0"])
    assert bar
    assert bar.groups() == ("128GB", "128GB")


def test_the_pairs_are_those_of_the_assumed_topology_matrix(recorded: Path) -> None:
    text = shared("fixtures/text/nvidia-smi/topo-assumed-8xrtxpro6000-epyc9335.txt").read_text(
        encoding="utf-8"
    )
    matrix = [
        line.split()[1:9] for line in text.splitlines() if re.match(r"GPU\d\s", line) and "X" in line.split()
    ]
    gpus = [gpu["address"] for gpu in facts_of(recorded)["gpus"]]
    pairs = {tuple(pair["gpus"]): pair["relation"] for pair in facts_of(recorded)["gpu_pairs"]}
    assert len(pairs) == 28
    for (one, other), relation in pairs.items():
        assert matrix[gpus.index(one)][gpus.index(other)] == relation


# ---------------------------------------------------------------- this machine
def test_this_machine_gives_the_facts_that_its_own_tools_give() -> None:
    facts, _unknown, _absent = collect(Host())
    assert_as_lscpu(facts, lscpu())
    assert facts["kernel"]["release"] == os.uname().release
    for name, setting in facts["sysctl"]["settings"].items():
        if setting["value"] is not None:
            said = run("sysctl", "-n", name).split()
            assert str(setting["value"]).split() == said, name


def test_this_machine_has_the_pci_functions_that_lspci_lists() -> None:
    facts, _unknown, _absent = collect(Host())
    said = [line for line in run("lspci", "-n", "-D").splitlines() if line]
    physical = [line for line in said if not Path(f"/sys/bus/pci/devices/{line.split()[0]}/physfn").exists()]
    assert facts["functions"] == len(physical)
    display = [line for line in physical if line.split()[1].startswith(("0300", "0302", "1200"))]
    assert facts["gpu_count"] + len(facts["other_display"]) == len(display)


def test_this_machine_has_the_nodes_that_numactl_lists() -> None:
    nodes = collect(Host())[0]["numa"]["nodes"]
    text = run("numactl", "--hardware")
    if nodes is None:
        pytest.skip("this kernel has no NUMA support")
    for node in nodes:
        cpus = re.search(rf"^node {node['id']} cpus:(.*)$", text, re.MULTILINE).group(1)
        assert parse_ranges(node["cpus"]) == [int(cpu) for cpu in cpus.split()]
        size = int(re.search(rf"^node {node['id']} size: (\d+) MB$", text, re.MULTILINE).group(1))
        assert node["memory_total_bytes"] // (1 << 20) == size


# ---------------------------------------------------------------- nothing is written, little is needed
def test_nothing_is_written(recorded: Path) -> None:
    before = manifest(recorded)
    facts_of(recorded)
    assert manifest(recorded) == before


AS_NOBODY = """
import json, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path.insert(0, sys.argv[1])
from gpu_tuning.facts import collect
from gpu_tuning.facts.reader import Host
roots = {"sysfs_root": sys.argv[2]} if sys.argv[2] else {}
print(json.dumps(collect(Host.from_options(roots))))
"""


def as_nobody(sysfs: str, tmp_path: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the facts that a user without rights gets."""
    if os.geteuid() != 0:
        pytest.skip("takes root's rights to become another user")
    code = tmp_path / "module_utils"  # the checkout itself may be closed to other users
    shutil.copytree(REPO / "module_utils/gpu_tuning", code / "gpu_tuning")
    for folder in [tmp_path, *tmp_path.parents[:2]]:
        folder.chmod(0o755)
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    done = subprocess.run(
        [python, "-c", AS_NOBODY, str(code), sysfs], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_a_user_without_rights_gets_facts_and_reasons(tmp_path: Path) -> None:
    """As on a live host: 64 bytes of each configuration space, no SMBIOS table, no container's config."""
    root = make_recorded_host(tmp_path / "host")
    for path in (root / "sys/devices").glob("pci*/**/config"):
        path.write_bytes(path.read_bytes()[:64])
    closed = {"sys/firmware/dmi/tables/DMI": 0o400, "etc/pve/lxc/101.conf": 0o600, "dev/kmsg": 0o600}
    for name, mode in closed.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
        (root / name).chmod(mode)
    facts, unknown, _absent = as_nobody(str(root / "sys"), tmp_path)
    assert facts["gpu_count"] == 8
    assert facts["gpus"][0]["link_width"] == 16
    assert facts["gpus"][0]["max_payload_size"] is None
    for path in ("gpus.0.max_payload_size", "gpus.0.acs", "memory.dimms", "kernel_log", "containers.0.gpu"):
        assert "root's rights" in unknown[path] or "privilege" in unknown[path], path


def test_a_user_without_rights_can_audit_this_machine(tmp_path: Path) -> None:
    facts, unknown, absent = as_nobody("", tmp_path)
    assert facts["cpu"]["threads"] == os.cpu_count()
    assert not set(unknown) & set(absent)


# ---------------------------------------------------------------- parsers over recorded texts
def test_every_recorded_proc_devices_is_read_by_whole_names() -> None:
    folder = shared("fixtures/text/proc_devices")
    wanted = {"uvm": "nvidia-uvm", "caps": "nvidia-caps", "nvswitch": "nvidia-nvswitch"}
    checked = 0
    for path in folder.glob("*.txt"):
        majors = devices.character_majors(path.read_text(encoding="utf-8"))
        for short, number in re.findall(r"(uvm|caps|nvswitch)(\d+)", path.name):
            assert majors[wanted[short]] == int(number), path.name
            checked += 1
    assert checked > 15
    trap = (folder / "trap-nvidia-in-block-section.txt").read_text(encoding="utf-8")
    block = trap.split("Block devices:")[1]
    assert not {name for name in devices.character_majors(trap) if f" {name}\n" in block and "nvidia" in name}


def test_recorded_kernel_lines_are_sorted_by_topic() -> None:
    text = shared("fixtures/text/dmesg/pcie-iommu-nvidia-lines.txt").read_text(encoding="utf-8")
    counts = {topic: found["count"] for topic, found in kernel_log.summarise(text).items()}
    assert counts == {
        "xid": 1,
        "gpu_init_failed": 3,  # two lines say "fallen off the bus", one of them an Xid
        "io_page_fault": 1,
        "aer": 1,
        "link_limited": 2,
        "link_flap": 0,
        "bar_no_space": 1,
        "acs_override": 1,
        "machine_check": 0,
    }
    assert kernel_log.summarise(text)["xid"]["codes"] == [79]


def test_recorded_command_lines_keep_repeated_and_listed_values() -> None:
    line = shared("fixtures/text/proc/cmdline-dgx-gb10.txt").read_text(encoding="utf-8")
    tokens = system.tokens(line)
    assert len(tokens["console"]) == line.count("console=") > 1
    assert tokens["pci"] == ["pcie_bus_safe"]
    assert system.tokens('a.b-c="x y" quiet -- init') == {"a.b_c": ["x y"], "quiet": [""]}


@pytest.mark.parametrize("name", ["version-pve-6.8.12.txt", "version-ubuntu-6.2.txt"])
def test_recorded_versions_give_the_release(name: str, tmp_path: Path) -> None:
    text = shared(f"fixtures/text/proc/{name}").read_text(encoding="utf-8")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text(text, encoding="utf-8")
    release = system.kernel(Host.from_options({"sysfs_root": str(tmp_path / "sys")}))["release"]
    assert release == text.split()[2]
    assert system.version_numbers(str(release))[:2] == [int(part) for part in text.split()[2].split(".")[:2]]


def test_the_tool_of_the_driver_is_read_field_by_field() -> None:
    line = "00000000:C1:00.0, P8, 0, Disabled, 97887, 450.00, 600.00, 0x0000000000000001, [N/A], 31\n"
    assert nvidia_smi.parse_query(line) == {
        "0000:c1:00.0": {
            "pstate": "P8",
            "utilisation_percent": 0,
            "persistence_mode": False,
            "memory_mib": 97887,
            "power_limit_w": 450.0,
            "power_default_w": 600.0,
            "throttle_reasons": "0x0000000000000001",
            "ecc_uncorrected": None,
            "temperature_c": 31,
        }
    }
    links = "GPU 0: NVIDIA H200 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    assert nvidia_smi.parse_nvlink(links) == {"links": 2, "active": 1}


@pytest.mark.parametrize(
    ("locator", "bank", "channel"),
    [
        ("DIMM 0", "P0 CHANNEL A", "0/A"),
        ("DIMM_P1_C0", "BANK 0", "1/C"),
        ("CPU2_DIMM_B1", "", "2/B"),
        ("P1-DIMMF1", "P1_Node1_Channel5_Dimm0", "1/5"),
        ("DIMM_A2", "BANK 1", "0/A"),
        ("Slot 7", "Bank 7", None),
    ],
)
def test_board_makers_names_of_a_channel_are_understood(locator: str, bank: str, channel: str | None) -> None:
    assert smbios.channel_of(locator, bank) == channel


@pytest.mark.parametrize("table", [b"", b"\x11", b"\x11\x02\0\0", b"\x11\xff\0\0" + b"x" * 20])
def test_a_broken_smbios_table_gives_no_module_and_no_crash(table: bytes) -> None:
    assert smbios.memory_devices(table) == []


def test_extended_capabilities_in_a_loop_end() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0D | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    config[0x200:0x204] = (0x01 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert list(pci_extended.walk_extended(bytes(config))) == [(0x100, 0x0D), (0x200, 0x01)]
    assert list(pci_extended.walk_extended(b"\xff" * 4096)) == []


def test_ranges_there_and_back() -> None:
    assert parse_ranges("0-2,5,8-9\n") == [0, 1, 2, 5, 8, 9]
    assert format_ranges([9, 8, 5, 0, 1, 2, 2]) == "0-2,5,8-9"
    assert parse_ranges("") == []


def test_a_container_cannot_lead_the_reader_out_of_its_root(tmp_path: Path) -> None:
    from gpu_tuning.facts.processes import packages

    outside = tmp_path / "outside/lib/python3.12/site-packages/torch-9.9.dist-info"
    outside.mkdir(parents=True)
    root = tmp_path / "root"
    (root / "opt").mkdir(parents=True)
    (root / "opt/venv").symlink_to(tmp_path / "outside")
    assert packages(str(root), ["/opt/venv"]) == {}


def test_a_process_that_says_nonsense_is_no_crash(tmp_path: Path) -> None:
    for name in ("comm", "cgroup", "cmdline", "environ", "status", "limits", "mounts"):
        (tmp_path / "proc/7").mkdir(parents=True, exist_ok=True)
        text = b"\xff Max locked memory\nMax locked memory\nMax open files x\n/dev/shm /dev/shm x size=k\0=\0"
        (tmp_path / "proc/7" / name).write_bytes(text)
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "proc/7/fd/3").symlink_to("/dev/nvidia0")
    facts = collect(Host.from_options({"sysfs_root": str(tmp_path / "sys")}))[0]
    assert [process["gpu_nodes"] for process in facts["gpu_processes"]] == [["nvidia0"]]


def test_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    from gpu_tuning.facts.reader import read_text

    os.mkfifo(tmp_path / "pipe")
    answer = read_text(str(tmp_path / "pipe"))
    assert isinstance(answer, Unknown)
    assert "not a regular file" in answer.reason


GARBAGE = (
    b"",
    b"\n",
    b"x",
    b"-1",
    b"1 2 3",
    b"a: b: c\n",
    b"\xff" * 4096,
    b"\0" * 64,
    b"9" * 400,
    b"0-\n,,-3",
    b"[x",
)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_files_that_say_nonsense_are_no_crash(
    recorded: Path, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file but those that say what a PCI function is."""
    drain = reader._drain

    def lie(handle: int, limit: int) -> bytes:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        return drain(handle, limit) if name in ("vendor", "device", "class") else garbage

    monkeypatch.setattr(reader, "_drain", lie)
    facts, unknown, absent = collect(Host.from_options({"sysfs_root": str(recorded / "sys")}))
    json.dumps([facts, unknown, absent])
    assert facts["gpu_count"] == 8
