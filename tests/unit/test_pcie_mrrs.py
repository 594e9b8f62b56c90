# SPDX-License-Identifier: GPL-3.0-or-later
"""MaxReadReq: which functions are selected, what is refused, and that bits 14:12 are all that changes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gpu_tuning import engine, journal, pcie_mrrs
from gpu_tuning.pci_config import DEVICE_CONTROL, PCI_EXPRESS
from gpu_tuning.rows import Row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_host import SmallHost, gpu_address, small_host
from support.tree import changed_bits

CAPABILITY = 0x60  # the PCI Express Capability of the recorded GPUs
REGISTER = CAPABILITY + DEVICE_CONTROL
GPUS = pcie_mrrs.selector(vendor="0x10de", classes=["0x0300", "0x0302"])


def kind(
    host: SmallHost, chosen: pcie_mrrs.Selector = GPUS, value: int | None = 4096, above: bool = False
) -> pcie_mrrs.MaxReadRequests:
    return pcie_mrrs.MaxReadRequests(chosen, value, above, str(host.root / "proc"), str(host.root / "sys"))


def apply(host: SmallHost, *kinds: engine.Kind) -> dict[str, Row]:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.applied(kinds, kept)}


def restore(host: SmallHost, chosen: pcie_mrrs.Selector = GPUS) -> dict[str, Row]:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.restored([kind(host, chosen)], kept, check=False)}


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    return small_host(memory_path / "host", cpus=1, gpus=2)


# Arguments


@pytest.mark.parametrize("value", [-1, 0, 1, 64, 127, 129, 3000, 4095, 8192, 16384])
def test_sizes_that_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="allowed are 128, 256, 512, 1024, 2048, 4096"):
        pcie_mrrs.checked_size(value)


@pytest.mark.parametrize("size", [128, 256, 512, 1024, 2048, 4096])
def test_sizes_that_are_allowed(host: SmallHost, size: int) -> None:
    assert pcie_mrrs.checked_size(size) == size
    assert apply(host, kind(host, value=size))[gpu_address(0)].after == size


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"devices": ["1:00.0"]}, "is not a PCI address"),
        ({"devices": ["0000:01:00.8"]}, "is not a PCI address"),
        ({"devices": ["0000:01:20.0"]}, "is not a PCI address"),
        ({"devices": ["../../etc"]}, "is not a PCI address"),
        ({"devices": ["0000:01:00.0/.."]}, "is not a PCI address"),
        ({"devices": [""]}, "is not a PCI address"),
        ({"vendor": "4318"}, "YAML reads a bare 0x10de as 4318"),
        ({"vendor": "10de"}, "vendor '10de' must be 0x and 4 hexadecimal digits"),
        ({"device": "0x2bb"}, "device '0x2bb' must be"),
        ({"classes": ["0x030"]}, "class '0x030' must be 0x and 2 or 4 or 6"),
        ({"classes": ["vga"]}, "class 'vga' must be"),
    ],
)
def test_selectors_that_are_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pcie_mrrs.selector(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["0000:01:00.0", "01:00.0", "0000:01:00.0".upper()])
def test_addresses(written: str) -> None:
    assert pcie_mrrs.selector(devices=[written]).addresses == ("0000:01:00.0",)


def test_one_address_in_two_forms_is_one_device() -> None:
    assert pcie_mrrs.selector(devices=["0000:0A:00.0", "0a:00.0"]).addresses == ("0000:0a:00.0",)


# Selection


def selected(host: SmallHost, **arguments: object) -> list[str]:
    return [row.target for row in kind(host, pcie_mrrs.selector(**arguments)).capture()]  # type: ignore[arg-type]


def test_gpus_are_neither_audio_nor_virtual_functions(host: SmallHost) -> None:
    assert selected(host, vendor="0x10DE", classes=["0x0300"]) == [gpu_address(0), gpu_address(1)]


@pytest.mark.parametrize("classes", [["0x03"], ["0x0300"], ["0x030000"], ["0x0302", "0x0300"]])
def test_class_prefixes(host: SmallHost, classes: list[str]) -> None:
    assert len(selected(host, vendor="0x10de", classes=classes)) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"vendor": "0x10de", "classes": ["0x0302"]},
            "no NVIDIA GPU: none of 5 PCI devices has vendor 0x10de",
        ),
        ({"vendor": "0x1002"}, "no matching PCI device: none of 5 PCI devices has vendor 0x1002"),
        ({"device": "0x0001"}, "no matching PCI device: none of 5 PCI devices has device 0x0001"),
        ({"driver": "nvidia"}, "no matching PCI device: none of 5 PCI devices has driver nvidia"),
    ],
)
def test_no_device_is_no_error(host: SmallHost, arguments: dict[str, object], reason: str) -> None:
    (row,) = kind(host, pcie_mrrs.selector(**arguments)).capture()  # type: ignore[arg-type]
    assert (row.id, row.status) == ("pcie_mrrs:none", "not_applicable")
    assert str(row.reason).startswith(reason)


def test_no_pci_at_all(memory_path: Path) -> None:
    (row,) = pcie_mrrs.MaxReadRequests(GPUS, 4096, sysfs_root=str(memory_path)).capture()
    assert row.status == "not_applicable"


def test_by_driver(host: SmallHost) -> None:
    (host.gpu(1) / "driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    assert selected(host, driver="vfio-pci") == [gpu_address(1)]


def test_a_named_virtual_function_says_why_not(host: SmallHost) -> None:
    row = apply(host, kind(host, pcie_mrrs.selector(devices=["f0:00.2"])))["0000:f0:00.2"]
    assert (row.status, row.before) == ("not_applicable", None)
    assert "physical function" in str(row.reason)


# Writing


def device_control(host: SmallHost, number: int) -> int:
    return int(struct.unpack_from("<H", host.config(number).read_bytes(), REGISTER)[0])


def set_device_control(host: SmallHost, number: int, value: int) -> None:
    config = bytearray(host.config(number).read_bytes())
    struct.pack_into("<H", config, REGISTER, value)
    host.config(number).write_bytes(config)


def test_three_bits_change_and_come_back(host: SmallHost) -> None:
    before = host.config(0).read_bytes()
    rows = apply(host, kind(host))
    assert [(row.before, row.after, row.status) for row in rows.values()] == [(512, 4096, "changed")] * 2
    ((offset, mask),) = changed_bits(before, host.config(0).read_bytes())
    assert (offset, mask & ~0x70) == (REGISTER + 1, 0)
    assert {row.after for row in restore(host).values()} == {512}
    assert host.config(0).read_bytes() == before


@given(
    control=st.integers(0, 0xFFFF).filter(lambda value: value >> 12 & 7 < 6),
    size=st.sampled_from([128, 256, 512, 1024, 2048, 4096]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_no_other_bit_changes_whatever_stands_there(host: SmallHost, control: int, size: int) -> None:
    """Bit 15 excepted, which is written as 0: on an endpoint it resets the function."""
    set_device_control(host, 0, control)
    the_kind = kind(host, pcie_mrrs.selector(devices=[gpu_address(0)]), size)
    (row,) = engine.written([(the_kind, row) for row in the_kind.capture()])
    assert row.after == size
    written = control & 0x0FFF if row.status == "changed" else control & 0x8FFF
    assert device_control(host, 0) & 0x8FFF == written


@given(config=st.binary(max_size=4096))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_any_bytes_are_a_row_and_a_write_stays_in_its_register(host: SmallHost, config: bytes) -> None:
    host.config(0).write_bytes(config)
    the_kind = kind(host, pcie_mrrs.selector(devices=[gpu_address(0)]))
    (row,) = engine.written([(the_kind, row) for row in the_kind.capture()])
    after = host.config(0).read_bytes()
    changed = changed_bits(config, after)
    assert row.status in ("ok", "changed", "failed", "not_applicable")
    assert bool(changed) is (row.status == "changed") or not changed
    assert all(mask & 0x0F == 0 for _, mask in changed)
    assert len(changed) <= 1


@pytest.mark.parametrize("code", [6, 7])
def test_a_reserved_size_could_not_be_given_back_and_is_left(host: SmallHost, code: int) -> None:
    set_device_control(host, 0, code << 12 | 0x0937)
    before = host.config(0).read_bytes()
    rows = apply(host, kind(host))
    assert (rows[gpu_address(0)].status, rows[gpu_address(1)].status) == ("failed", "changed")
    assert f"reserved code {code}" in str(rows[gpu_address(0)].reason)
    assert host.config(0).read_bytes() == before
    assert restore(host)[gpu_address(1)].status == "changed"


def test_max_payload_is_reported(host: SmallHost) -> None:
    set_device_control(host, 0, 0x2917)  # MaxPayload 128
    assert str(apply(host, kind(host))[gpu_address(0)].reason) == "found 512, MaxPayload 128 is left as it is"


# Devices that cannot be read, or written


@pytest.mark.parametrize(
    ("config", "status", "reason"),
    [
        (b"\xff" * 4096, "failed", "the device does not respond (its registers read all ff)"),
        (b"", "failed", "gave 0 bytes"),
        (None, "failed", "no such PCI device"),
    ],
)
def test_one_bad_device_does_not_stop_the_others(
    host: SmallHost, config: bytes | None, status: str, reason: str
) -> None:
    if config is None:
        host.config(0).unlink()
    else:
        host.config(0).write_bytes(config)
    rows = apply(host, kind(host))
    assert (rows[gpu_address(0)].status, rows[gpu_address(0)].after) == (status, None)
    assert reason in str(rows[gpu_address(0)].reason)
    assert rows[gpu_address(1)].status == "changed"


def test_64_bytes_are_a_matter_of_privilege(host: SmallHost) -> None:
    host.config(0).write_bytes(host.config(0).read_bytes()[:64])
    row = apply(host, kind(host))[gpu_address(0)]
    assert row.status == "failed"
    assert "cannot read beyond 64 bytes without privilege" in str(row.reason)
    assert "no PCI Express capability" not in str(row.reason)


def test_a_device_without_pci_express_is_not_applicable(host: SmallHost) -> None:
    config = bytearray(host.config(0).read_bytes())
    assert config[CAPABILITY] == PCI_EXPRESS
    config[CAPABILITY] = 0x09  # vendor specific
    host.config(0).write_bytes(config)
    assert apply(host, kind(host))[gpu_address(0)].status == "not_applicable"


def test_a_sleeping_device_is_set_and_said_to_sleep(host: SmallHost) -> None:
    config = bytearray(host.config(0).read_bytes())
    config[0x44] |= 3  # Power Management at 0x40: D3hot
    host.config(0).write_bytes(config)
    row = apply(host, kind(host))[gpu_address(0)]
    assert row.status == "changed"
    assert "(in D3)" in str(row.reason)


class Vanishing(pcie_mrrs.MaxReadRequests):
    """MaxReadReq of a host whose first GPU is removed at a step of the run, or stops answering."""

    step: str
    how: str

    def _vanish(self, row: Row) -> None:
        if row.target == gpu_address(0):
            path = Path(self._attribute(row.target, "config"))
            if self.how == "removed":
                path.unlink()
            else:
                path.write_bytes(b"\xff" * 4096)

    def write(self, row: Row) -> None:
        if self.step == "before":
            self._vanish(row)
        super().write(row)
        if self.step == "after":
            self._vanish(row)


@pytest.mark.parametrize("step", ["before", "after"])
@pytest.mark.parametrize(("how", "word"), [("removed", "no such PCI device"), ("ff", "does not respond")])
def test_a_device_that_vanishes_midway(host: SmallHost, step: str, how: str, word: str) -> None:
    vanishing = Vanishing(GPUS, 4096, False, str(host.root / "proc"), str(host.root / "sys"))
    vanishing.step, vanishing.how = step, how
    rows = apply(host, vanishing)
    gone = rows[gpu_address(0)]
    assert (gone.status, gone.after) == ("failed", None)
    assert word in str(gone.reason)
    assert rows[gpu_address(1)].status == "changed"
    assert {row.status for row in restore(host).values()} == {"failed", "changed"}


def test_lockdown_is_said_before_a_write_is_tried(host: SmallHost) -> None:
    lockdown = host.root / "sys/kernel/security/lockdown"
    lockdown.parent.mkdir(parents=True)
    lockdown.write_text("none [integrity] confidentiality\n")
    assert {row.status for row in apply(host, kind(host)).values()} == {"read_only"}
    lockdown.write_text("[none] integrity confidentiality\n")
    assert {row.status for row in apply(host, kind(host)).values()} == {"changed"}


@pytest.mark.parametrize(
    ("cmdline", "above", "size", "status"),
    [
        ("quiet pci=pcie_bus_perf", False, 4096, "rejected"),
        ("pci=noaer,pcie_bus_perf quiet", False, 4096, "rejected"),
        ("pci=noaer pci=pcie_bus_perf", False, 512, "ok"),
        ("quiet pci=pcie_bus_perf", False, 256, "changed"),
        ("quiet pci=pcie_bus_perf", True, 4096, "changed"),
        ("quiet pci=pcie_bus_safe", False, 4096, "changed"),
        ("quiet nopci=pcie_bus_perf", False, 4096, "changed"),
    ],
)
def test_bus_perf(memory_path: Path, cmdline: str, above: bool, size: int, status: str) -> None:
    host = small_host(memory_path / "host", cpus=1, gpus=1, cmdline=cmdline)
    before = host.config(0).read_bytes()
    row = apply(host, kind(host, value=size, above=above))[gpu_address(0)]
    assert row.status == status
    assert (host.config(0).read_bytes() != before) is (status == "changed")
    if status == "rejected":
        assert "MaxPayload of 256" in str(row.reason)
        assert row.after == 512


# Restoring


def test_restoring_one_address_leaves_the_others(host: SmallHost) -> None:
    apply(host, kind(host))
    assert list(restore(host, pcie_mrrs.selector(devices=[gpu_address(1)]))) == [gpu_address(1)]
    assert [device_control(host, number) >> 12 for number in (0, 1)] == [5, 2]


@pytest.mark.parametrize("before", [5, "many", 8192, None])
def test_a_recorded_size_that_makes_no_sense_is_a_row(host: SmallHost, before: object) -> None:
    kept = journal.Journal(str(host.state_root), "boot")
    entry = {"kind": "pcie_mrrs", "target": gpu_address(0), "before": before, "set": 4096}
    with kept.locked():
        kept.record({f"pcie_mrrs:{gpu_address(0)}": entry})
    row = restore(host)[gpu_address(0)]
    assert (row.status, row.after) == ("failed", 512)
    assert "MaxReadReq cannot be" in str(row.reason)
