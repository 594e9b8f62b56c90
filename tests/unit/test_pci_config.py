# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration space reader, over real devices, made-up ones, and any bytes at all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Optional

import pytest
from gpu_tuning.pci_config import (
    MAX_READ_REQUEST_SIZES,
    ConfigSpaceError,
    Link,
    PcieCapability,
    parse_pcie,
    walk_capabilities,
    with_max_read_request,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.shared import shared, shared_root, why_missing

CASES = Path(__file__).parents[1] / "fixtures" / "pci"
REAL = "fixtures/pci_real"
MASK = 0x7000
INITIATE_RESET = 0x8000
OUTCOMES = {"ok", "truncated", "not-responding", "no-pcie-cap", "corrupt"}


thorough = settings(max_examples=500, deadline=None)  # a busy machine is no failure


def case_params(directory: Path) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted(directory.glob("*.json"))]


def real_params() -> list[Any]:
    reason = why_missing(REAL)
    if reason:
        return [pytest.param(None, id="pci_real", marks=pytest.mark.skip(reason=reason))]
    return case_params(shared_root() / REAL)


def read_hex(path: Path) -> bytes:
    """Read a dump in the form of ``lspci -x``: a title, then lines of "offset: bytes"."""
    lines = path.read_text().splitlines()[1:]
    return b"".join(bytes.fromhex(line.partition(":")[2]) for line in lines)


def config_of(name: str) -> bytes:
    return read_hex(CASES / f"{name}.hex")


def patched(config: bytes, changes: dict[int, int]) -> bytes:
    """Return the configuration space with single bytes replaced, by offset."""
    image = bytearray(config)
    for offset, byte in changes.items():
        image[offset] = byte
    return bytes(image)


def walked(config: bytes) -> list[tuple[int, int]]:
    """Walk the list, and stop where an endless one would fill the memory: 48 is the most there can be."""
    return list(itertools.islice(walk_capabilities(config), 49))


def outcome_of(config: bytes) -> str:
    try:
        parse_pcie(config)
    except ConfigSpaceError as error:
        return error.outcome
    return "ok"


def error_of(config: bytes) -> ConfigSpaceError:
    with pytest.raises(ConfigSpaceError) as caught:
        parse_pcie(config)
    return caught.value


def link(expected: Optional[dict[str, Any]]) -> Optional[Link]:
    return Link(**expected) if expected else None


def capability(expected: dict[str, Any]) -> PcieCapability:
    return PcieCapability(
        offset=expected["cap_offset"],
        version=expected["pcie_cap_version"],
        port_type=expected["port_type"],
        device_control=int(expected["raw"]["devctl"], 16),
        max_payload_size=expected["mps"],
        max_payload_supported=expected["mps_supported"],
        max_read_request_size=expected["mrrs"],
        link_capability=link(expected["link_cap"]),
        link_status=link(expected["link_sta"]),
        power_state=expected.get("power_state"),
    )


@pytest.mark.parametrize("case", case_params(CASES) + real_params())
def test_case(case: Path) -> None:
    expected = json.loads(case.read_text())["expected"]
    config = read_hex(case.with_suffix(".hex"))
    assert len(config) == expected["readable_bytes"]
    chain = [f"{offset:02x}:{ident:02x}" for offset, ident in walked(config)]
    assert chain == expected.get("cap_chain", [])
    assert outcome_of(config) == expected["outcome"]
    if expected["outcome"] == "ok":
        assert parse_pcie(config) == capability(expected)


def test_there_are_cases() -> None:
    assert len(case_params(CASES)) == 26


def test_our_cases_are_those_of_shared() -> None:
    theirs = {path.name: path.read_bytes() for path in shared("fixtures/pci").iterdir()}
    assert {path.name: path.read_bytes() for path in CASES.iterdir()} == theirs


def test_64_bytes_is_a_matter_of_privilege_not_of_capability() -> None:
    message = str(error_of(config_of("variant-64-bytes")))
    assert message == "cannot read beyond 64 bytes without privilege (CAP_SYS_ADMIN)"


def test_a_short_read_that_holds_the_whole_list_is_not_truncated() -> None:
    config = config_of("trap-cardbus-header-type2")
    assert outcome_of(config[:0xF0]) == "no-pcie-cap"


def test_a_silent_device_is_said_to_have_left_or_be_asleep() -> None:
    message = str(error_of(config_of("variant-all-ff-4096")))
    assert "does not respond" in message
    assert "fallen off the bus or is in D3cold" in message


@pytest.mark.parametrize("silent_from", [0x40, 0x48, 0x60, 0x62])
def test_a_device_that_leaves_during_the_read(silent_from: int) -> None:
    config = config_of("rebuilt-rtxpro6000-gen5x16")
    left = config[:silent_from] + b"\xff" * (len(config) - silent_from)
    assert outcome_of(left) == "not-responding"


@pytest.mark.parametrize(("size", "outcome"), [(0x73, "truncated"), (0x74, "ok")])
def test_registers_beyond_what_was_read(size: int, outcome: str) -> None:
    """The capability is at 0x60 and its Link Status ends at 0x74."""
    assert outcome_of(config_of("rebuilt-rtxpro6000-gen5x16")[:size]) == outcome


def test_a_capability_that_runs_into_the_extended_space_is_corrupt() -> None:
    error = error_of(patched(config_of("rebuilt-rtxpro6000-gen5x16"), {0x34: 0xF0, 0xF0: 0x10}))
    assert (error.outcome, "0xf0" in str(error)) == ("corrupt", True)


def test_header_type_is_read_without_its_multi_function_bit() -> None:
    config = config_of("trap-cardbus-header-type2")
    multi_function = patched(config, {0x0E: 0x82})
    assert walked(multi_function) == walked(config) != []


def test_a_virtual_function_is_not_taken_for_a_silent_device() -> None:
    ids_read_ffff = patched(config_of("variant-mrrs128"), dict.fromkeys(range(4), 0xFF))
    assert outcome_of(ids_read_ffff) == "ok"


def test_a_list_that_leads_to_an_ff_in_the_header_has_no_capability() -> None:
    interrupt_line = patched(config_of("rebuilt-rtxpro6000-gen5x16"), {0x34: 0x3C, 0x3C: 0xFF})
    assert outcome_of(interrupt_line) == "no-pcie-cap"


def test_the_66_mhz_bit_is_not_the_list_bit() -> None:
    assert outcome_of(patched(config_of("rebuilt-rtxpro6000-gen5x16"), {0x06: 0x20})) == "no-pcie-cap"


def test_the_power_state_may_lie_beyond_what_was_read() -> None:
    """The read ends inside a Power Management capability at 0x9c."""
    config = patched(config_of("rebuilt-rtxpro6000-gen5x16"), {0x40: 0x00, 0x9C: 0x01})
    assert parse_pcie(config[:0xA2]).power_state == "D0"
    assert parse_pcie(config[:0xA1]).power_state is None


def test_reserved_pointer_bits_are_masked() -> None:
    config = config_of("rebuilt-rtxpro6000-gen5x16")
    assert (config[0x34], config[0x41]) == (0x40, 0x48)
    assert parse_pcie(patched(config, {0x34: 0x43, 0x41: 0x4A})) == parse_pcie(config)


def test_device_control_is_found_in_the_image() -> None:
    config = config_of("rebuilt-rtxpro6000-gen5x16")
    found = parse_pcie(config)
    register = config[found.device_control_offset : found.device_control_offset + 2]
    assert int.from_bytes(register, "little") == found.device_control == 0x2937


def test_every_register_value_and_size() -> None:
    """All 65536 values: bits 11:0 stay, 14:12 say the size, bit 15 is never set."""
    for code, size in enumerate(MAX_READ_REQUEST_SIZES):
        for register in range(0x10000):
            written = with_max_read_request(register, size)
            assert written & MASK == code << 12
            assert written & INITIATE_RESET == 0
            assert (written ^ register) & ~(MASK | INITIATE_RESET) == 0


def test_the_size_comes_back_from_a_parse() -> None:
    config = bytearray(config_of("variant-mrrs128"))
    for size in MAX_READ_REQUEST_SIZES:
        found = parse_pcie(bytes(config))
        written = with_max_read_request(found.device_control, size)
        config[found.device_control_offset : found.device_control_offset + 2] = written.to_bytes(2, "little")
        assert parse_pcie(bytes(config)).max_read_request_size == size


@thorough
@given(st.integers())
@example(0)
@example(64)
@example(-128)
@example(8192)
@example(16384)
def test_other_sizes_are_refused(size: int) -> None:
    if size in MAX_READ_REQUEST_SIZES:
        return
    with pytest.raises(ValueError, match=f"cannot be {size}: allowed are 128, 256, 512, 1024, 2048, 4096"):
        with_max_read_request(0x2937, size)


def with_header(body: bytes, pointer: int) -> bytes:
    """Return a configuration space whose header leads into ``body`` (from 0x40)."""
    header = bytearray(config_of("rebuilt-rtxpro6000-gen5x16")[:0x40])
    header[0x34] = pointer
    return bytes(header) + body


# Bytes that make lists: pointers to near and far, and the ids the reader looks for.
list_bytes = st.lists(
    st.sampled_from([0x00, 0x01, 0x05, 0x10, 0x34, 0x40, 0x44, 0x60, 0xEC, 0xF0, 0xFC, 0xFF]), max_size=192
).map(bytes)
any_config = st.one_of(
    st.binary(max_size=4096),
    st.builds(with_header, st.one_of(list_bytes, st.binary(max_size=192)), st.integers(0, 0xFF)),
    st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 4096), st.integers(0, 0xFF)),
)


@thorough
@given(any_config)
def test_any_bytes_end_in_a_capability_or_a_known_error(config: bytes) -> None:
    outcome = outcome_of(config)  # lets any other exception through
    assert outcome in OUTCOMES
    if outcome == "ok":
        offset = parse_pcie(config).offset
        assert 0x40 <= offset <= min(len(config), 0x100) - 0x14
        assert (offset, 0x10) in walked(config)


@thorough
@given(any_config)
def test_any_list_ends_and_stays_inside_what_was_read(config: bytes) -> None:
    offsets = [offset for offset, _ in walked(config)]
    assert len(offsets) == len(set(offsets)) <= 48
    assert all(0x40 <= offset <= len(config) - 2 and offset % 4 == 0 for offset in offsets)
