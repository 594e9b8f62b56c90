# SPDX-License-Identifier: GPL-3.0-or-later
"""The recorded host: the same as the one in shared/, byte for byte, and what every user relies on."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from gpu_tuning.pci_config import ConfigSpaceError, parse_pcie
from host_options import FAULTS
from make_host import GPU_ADDRESSES
from support.shared import shared
from support.tree import Entry, changed_paths, make_recorded_host, manifest

CPUS = "sys/devices/system/cpu"
GPU = GPU_ADDRESSES[0]
EVERY_FAULT = [f"--fault={kind}={address}" for kind, address in zip(FAULTS, GPU_ADDRESSES)]

#: Every option and every fault, in few hosts: a GPU's faults and the CPUs' options do not meet.
VARIANTS = {
    "a fault on each GPU": [
        *EVERY_FAULT,
        "--amd-pstate=active",
        "--numa-nodes-per-socket=2",
        "--no-rebar",
    ],
    "all link and size faults on one GPU": [
        *(f"--fault={kind}={GPU}" for kind in ("x8", "gen4", "mps128", "mrrs4096")),
        "--amd-pstate=passive",
        "--numa-nodes-per-socket=4",
        "--idle-links",
    ],
    "faults that exclude each other": [
        *(f"--fault={kind}={GPU}" for kind in ("mrrs4096", "mrrs128", "read64", "ff")),
        "--amd-pstate=guided",
        "--governor=powersave",
        "--c2-latency=400",
    ],
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a host that no test may change."""
    return make_recorded_host(tmp_path_factory.mktemp("host") / "plain")


def read(host: Path, path: str) -> str:
    return (host / path).read_text().rstrip("\n")


def pci(host: Path, address: str, name: str) -> str:
    return read(host, f"sys/bus/pci/devices/{address}/{name}")


def config(host: Path, address: str) -> bytes:
    return (host / "sys/bus/pci/devices" / address / "config").read_bytes()


def archived(path: Path) -> dict[str, Entry]:
    """Return the manifest of a packed tree."""
    entries = {}
    with tarfile.open(path) as archive:
        for member in archive:
            data = archive.extractfile(member) if member.isfile() else None
            kind = "link" if member.issym() else "file" if data else "directory"
            content = member.linkname if member.issym() else data.read() if data else b""
            entries[member.name] = Entry(kind, member.mode, content)
    return entries


def test_same_as_the_archive_in_shared(host: Path) -> None:
    theirs = archived(shared("fixtures/epyc9335-8gpu.tar.gz"))
    assert len(theirs) == 19066
    assert changed_paths(theirs, manifest(host)) == []


def test_packs_to_the_same_bytes_as_shared(tmp_path: Path) -> None:
    theirs = shared("fixtures/epyc9335-8gpu.tar.gz")
    make_recorded_host(tmp_path / "host", f"--tar={tmp_path / 'host.tar.gz'}")
    assert (tmp_path / "host.tar.gz").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_same_as_what_shared_makes(tmp_path: Path, options: list[str]) -> None:
    script = shared("fixtures/make_epyc9335_tree.py")
    subprocess.run([sys.executable, "-B", str(script), str(tmp_path / "theirs"), *options], check=True)
    make_recorded_host(tmp_path / "ours", *options)
    assert changed_paths(manifest(tmp_path / "theirs"), manifest(tmp_path / "ours")) == []


def test_eight_gpus_among_their_decoys(host: Path) -> None:
    devices = [each.name for each in (host / "sys/bus/pci/devices").iterdir()]
    nvidia = [each for each in devices if pci(host, each, "vendor") == "0x10de"]
    vga = [each for each in devices if pci(host, each, "class") == "0x030000"]
    assert (len(devices), len(nvidia), len(vga)) == (66, 16, 9)
    assert sorted(set(nvidia) & set(vga)) == sorted(GPU_ADDRESSES)
    assert [pci(host, each, "numa_node") for each in GPU_ADDRESSES] == ["0"] * 4 + ["1"] * 4


@pytest.mark.parametrize("address", GPU_ADDRESSES)
def test_a_gpu_as_it_was_found(host: Path, address: str) -> None:
    found = parse_pcie(config(host, address))
    assert (found.offset, found.device_control) == (0x60, 0x2937)
    assert (found.max_payload_size, found.max_read_request_size) == (256, 512)
    assert pci(host, address, "current_link_speed") == "32.0 GT/s PCIe"


def test_two_virtual_functions(host: Path) -> None:
    physical = (host / "sys/bus/pci/devices/0000:c1:00.0").resolve()
    for address in ("0000:c1:00.2", "0000:c1:00.3"):
        assert (host / "sys/bus/pci/devices" / address / "physfn").resolve() == physical
        assert config(host, address)[:4] == b"\xff" * 4


def test_128_cpus_with_three_idle_states_each(host: Path) -> None:
    states = sorted((host / CPUS).glob("cpu[0-9]*/cpuidle/state*"))
    assert len(states) == 128 * 3
    seen = {(read(each, "name"), read(each, "latency"), read(each, "disable")) for each in states}
    assert seen == {("POLL", "0", "0"), ("C1", "1", "0"), ("C2", "100", "0")}


def test_sysctls_as_they_were_found(host: Path) -> None:
    found = {
        name: read(host, f"proc/sys/{name}")
        for name in ("kernel/numa_balancing", "vm/swappiness", "vm/dirty_bytes", "net/core/rmem_max")
    }
    assert list(found.values()) == ["1", "60", "0", "212992"]


def test_every_link_leads_somewhere_inside(host: Path) -> None:
    links = [host / path for path, entry in manifest(host).items() if entry.kind == "link"]
    assert len(links) == 722
    assert [link for link in links if host not in link.resolve(strict=True).parents] == []


def test_faults(tmp_path: Path) -> None:
    host = make_recorded_host(tmp_path / "host", *EVERY_FAULT)
    found = {}
    for kind, address in zip(FAULTS, GPU_ADDRESSES):
        try:
            found[kind] = parse_pcie(config(host, address))
        except ConfigSpaceError as error:
            found[kind] = error.outcome
    assert (found["ff"], found["read64"]) == ("not-responding", "truncated")
    assert found["d3"].power_state == "D3"
    assert (found["x8"].link_status.width, found["gen4"].link_status.speed) == (8, "16GT/s")
    assert found["mps128"].max_payload_size == 128
    assert (found["mrrs128"].max_read_request_size, found["mrrs4096"].max_read_request_size) == (128, 4096)


def test_rdma_device(host: Path, tmp_path: Path) -> None:
    assert not (host / "sys/class/infiniband").exists()
    made = make_recorded_host(tmp_path / "host", "--rdma")
    device = made / "sys/class/infiniband/mlx5_0/device"
    assert device.resolve() == (made / "sys/bus/pci/devices/0000:c1:00.0").resolve()


def test_boot_id_and_cmdline(host: Path, tmp_path: Path) -> None:
    boot_id = "0f0e0d0c-0b0a-4908-8706-050403020100"
    made = make_recorded_host(tmp_path / "host", "--boot-id", boot_id.upper(), "--cmdline=pci=pcie_bus_perf")
    assert read(made, "proc/sys/kernel/random/boot_id") == boot_id
    assert read(made, "proc/cmdline") == read(host, "proc/cmdline") + " pci=pcie_bus_perf"
    assert changed_paths(manifest(host), manifest(made)) == [
        "proc/cmdline",
        "proc/sys/kernel/random",
        "proc/sys/kernel/random/boot_id",
    ]


def test_offline_cpus(tmp_path: Path) -> None:
    host = make_recorded_host(tmp_path / "host", "--offline-cpus=3,70-71")
    assert (read(host, f"{CPUS}/online"), read(host, f"{CPUS}/offline")) == ("0-2,4-69,72-127", "3,70-71")
    for cpu in (3, 70, 71):
        assert [each.name for each in (host / f"{CPUS}/cpu{cpu}").iterdir()] == ["online"]
        assert read(host, f"{CPUS}/cpu{cpu}/online") == "0"
    assert read(host, f"{CPUS}/cpu6/topology/thread_siblings_list") == "6"
    assert read(host, "sys/devices/system/node/node0/cpulist") == "0-2,4-31,64-69,72-95"
    assert len(list((host / CPUS).glob("cpu[0-9]*/cpuidle"))) == 125
    assert read(host, "proc/cpuinfo").count("processor\t:") == 125


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--fault=broken=0000:01:00.0", "no fault 'broken': there are ff, d3, x8"),
        ("--fault=ff", "no GPU ''"),
        ("--fault=ff=0000:22:00.0", "no GPU '0000:22:00.0': there are 0000:01:00.0"),
        ("--offline-cpus=0", "'0' goes beyond 1-127"),
        ("--offline-cpus=128", "'128' goes beyond 1-127"),
        ("--offline-cpus=3,x", "'3,x' is not a CPU list"),
        ("--boot-id=1", "'1' is not a UUID"),
        ("--cmdline=a\nb", "the kernel's command line is one line"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        make_recorded_host(tmp_path / "host", option)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "host").exists()


def test_a_directory_with_something_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit):
        make_recorded_host(tmp_path)
    assert "is not empty" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
