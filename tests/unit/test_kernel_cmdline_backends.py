# SPDX-License-Identifier: GPL-3.0-or-later
"""Setting the command line in GRUB, systemd-boot, proxmox-boot-tool and BLS entries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import boot_files, grub, kernel_cmdline
from gpu_tuning.cmdline import Token, parse
from gpu_tuning.journal import CannotStart
from gpu_tuning.kernel_install import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from support.boot import FIXTURES, NEW, OLD, Host, grub_host, proxmox_host, systemd_boot_host
from support.tree import changed_paths, manifest

TOKENS = ("amd_pstate=active", "processor.max_cstate=1")


def run(host: Host, *tokens: str, check: bool = False, **more: Any) -> dict[str, Any]:
    return kernel_cmdline.run(kernel_cmdline.request(host.arguments(*tokens, **more)), check)


def rows(result: dict[str, Any]) -> dict[str, tuple[Any, Any, Any, str]]:
    return {r["id"]: (r["before"], r["desired"], r["after"], r["status"]) for r in result["rows"]}


def lines(result: dict[str, Any]) -> list[str]:
    return [entry["cmdline"] for entry in result["entries"]]


GRUB_FILES = [
    ("debian-12.grub",),
    ("iommu-two-lines.grub",),
    ("nested-quotes.grub",),
    ("no-final-newline.grub",),
    ("command-substitution.grub",),
    ("debian-12.grub", "earlier-tool.cfg"),
    ("nested-quotes.grub", "earlier-tool.cfg"),
]


@pytest.mark.parametrize("files", GRUB_FILES, ids="+".join)
def test_grub_every_entry_and_only_our_drop_in(tmp_path: Path, files: tuple[str, ...]) -> None:
    host = grub_host(tmp_path / "host", *files)
    old = manifest(host.root)
    old_lines = lines(run(host, "quiet", check=True))

    predicted = run(host, *TOKENS, check=True)
    assert changed_paths(old, manifest(host.root)) == []
    result = run(host, *TOKENS)
    assert result["changed"]
    assert result["reboot_required"]
    assert predicted["diff"] == result["diff"]
    assert [r["status"] for r in predicted["rows"]] == ["would_change"] * 2
    assert [row[3] for row in rows(result).values()] == ["changed"] * 2

    # Recovery entries too; all that was there is still there, but for rivals of ours.
    assert len(lines(result)) == 5
    for before, after in zip(old_lines, lines(result)):
        names = [token.name for token in parse(after).tokens]
        assert names.count("amd_pstate") == names.count("processor.max_cstate") == 1
        kept = [t for t in parse(before).tokens if t.name not in ("amd_pstate", "processor.max_cstate")]
        assert [t for t in parse(after).tokens if t.text not in TOKENS] == kept
    assert changed_paths(old, manifest(host.root)) == [
        "boot/grub/grub.cfg",
        f"etc/{grub.DROP_IN}",
        "state/journal",
        "state/journal/lock",
        "state/kernel-cmdline.json",
    ]

    again = run(host, *TOKENS)
    assert not again["changed"]
    assert again["diff"] == []

    restored = run(host, state="restored")
    assert restored["changed"]
    assert [p for p in changed_paths(old, manifest(host.root)) if not p.startswith("state/")] == []
    assert not run(host, state="restored")["changed"]


def test_grub_rows_say_what_was_there(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host", "iommu-two-lines.grub")
    result = run(host, *TOKENS, remove=["quiet"])
    assert rows(result) == {
        "cmdline:amd_pstate": ("amd_pstate=passive", "amd_pstate=active", "amd_pstate=active", "changed"),
        "cmdline:processor.max_cstate": (
            None,
            "processor.max_cstate=1",
            "processor.max_cstate=1",
            "changed",
        ),
        "cmdline:quiet": ("quiet", None, None, "changed"),
    }
    assert {row["fix"] for row in result["rows"]} == {"reboot"}
    assert all("amd_iommu=on iommu=pt" in line for line in lines(result) if "single" not in line)
    assert not any("quiet" in line for line in lines(result))


def test_grub_what_others_set_already_stays_theirs(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host", "no-final-newline.grub")
    assert not run(host, "net.ifnames=0")["changed"]
    # Rescue entries lack what only GRUB_CMDLINE_LINUX_DEFAULT has.
    assert run(host, "quiet")["changed"]


def test_grub_token_once_set_can_be_replaced_and_removed(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    run(host, *TOKENS)
    result = run(host, "amd_pstate=passive", 'dyndbg="file a.c +p"')
    assert all("amd_pstate=active" not in line and "amd_pstate=passive" in line for line in lines(result))
    assert all('dyndbg="file a.c +p"' in line and "processor.max_cstate=1" in line for line in lines(result))
    run(host, remove=["amd-pstate", "processor.max_cstate", "dyndbg"])
    assert not os.path.exists(host.root / "etc" / grub.DROP_IN)


def test_grub_killed_before_update_grub_is_finished_by_the_next_run(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    regenerate, host.regenerate = host.regenerate, ["true"]
    with pytest.raises(CannotStart, match="lacks amd_pstate=active"):
        run(host, *TOKENS)
    (host.root / "etc" / grub.DROP_IN).write_bytes(grub.drop_in([Token(t) for t in TOKENS], []) or b"")
    host.regenerate = regenerate
    assert [r["status"] for r in run(host, *TOKENS, check=True)["rows"]] == ["would_change"] * 2
    result = run(host, *TOKENS)
    assert result["changed"]
    assert all("amd_pstate=active" in line for line in lines(result))


@pytest.mark.parametrize(
    ("regenerate", "said"),
    [
        (["false"], "false failed with status 1"),
        (["sh", "-c", "echo no space >&2; exit 28"], "status 28: no space"),
        (["no-such-update-grub"], "cannot run no-such-update-grub"),
        (["true"], "the boot entry Debian lacks amd_pstate=active"),
    ],
)
def test_grub_failed_regeneration_leaves_the_old_file(
    tmp_path: Path, regenerate: list[str], said: str
) -> None:
    host = grub_host(tmp_path / "host")
    run(host, "nosmt")
    old = manifest(host.root)
    host.regenerate = regenerate
    with pytest.raises(CannotStart, match=said) as caught:
        run(host, *TOKENS)
    assert "the old command line is configured again" in str(caught.value)
    assert [p for p in changed_paths(old, manifest(host.root)) if not p.startswith("state/")] == []


def test_grub_later_assignment_is_named(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    later = host.root / "etc/default/grub.d/zzz-site.cfg"
    later.write_text("# ours\nGRUB_CMDLINE_LINUX='amd_pstate=disable'\n")
    with pytest.raises(CannotStart, match=r"zzz-site.cfg, line 2 sets the command line after"):
        run(host, *TOKENS)


def test_grub_unclosed_quote_is_refused_before_any_write(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host", "unclosed-quote.grub")
    (host.root / "boot/grub/grub.cfg").write_text("")
    old = manifest(host.root)
    with pytest.raises(CannotStart, match=r"default/grub, line 3: \" is not closed"):
        run(host, *TOKENS)
    assert changed_paths(old, manifest(host.root)) == []


@pytest.mark.parametrize("token", ["a=$HOME", "a=`id`", "a=b;reboot", "a='b'", "memmap=1G\\$4G"])
def test_grub_refuses_what_its_script_would_eat(tmp_path: Path, token: str) -> None:
    host = grub_host(tmp_path / "host")
    old = manifest(host.root)
    with pytest.raises(CannotStart, match="GRUB or its shell"):
        run(host, token)
    assert changed_paths(old, manifest(host.root)) == []


def test_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = grub_host(tmp_path / "host")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(boot_files.os, "fsync", full)
    old = manifest(host.root)
    with pytest.raises(CannotStart, match=r"No space left on device.*nothing was changed"):
        run(host, *TOKENS)
    assert [p for p in changed_paths(old, manifest(host.root)) if not p.startswith("state/journal")] == []


def test_restore_leaves_alone_what_somebody_else_changed(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    run(host, *TOKENS)
    path = host.root / "etc" / grub.DROP_IN
    path.write_text("GRUB_CMDLINE_LINUX=mine\n")
    result = run(host, state="restored")
    assert result["failed"]
    assert "changed by someone else since" in result["msg"]
    assert path.read_text() == "GRUB_CMDLINE_LINUX=mine\n"


WORDS = st.text(st.sampled_from('ab=-_"*?[ \t'), max_size=30)


@settings(max_examples=80, deadline=None)
@given(WORDS.filter(lambda t: t.count('"') % 2 == 0), st.sampled_from(["a", "a_b=1", "ab=b", "b-a"]))
def test_the_drop_ins_shell_does_what_the_model_does(line: str, token: str) -> None:
    """Words that go, go whole; where none goes, the variable keeps every byte."""
    wanted = Token(token)
    script = (grub.drop_in([wanted], []) or b"").decode() + 'printf "%s\\n%s." "$GRUB_CMDLINE_LINUX" '
    script += '"$GRUB_CMDLINE_LINUX_DEFAULT"'
    variables = {"GRUB_CMDLINE_LINUX": "", "GRUB_CMDLINE_LINUX_DEFAULT": line, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-ec", script], capture_output=True, text=True, check=True, env=variables, cwd=FIXTURES
    )
    added, _, left = done.stdout[:-1].partition("\n")
    assert added == token
    model = parse(line).changed([], [Token(wanted.name)])
    if model == parse(line):
        assert left == line
    else:
        # A quoted value's inner spaces are folded when a neighbour goes.
        assert left.split() == model.text.split()


def test_systemd_boot_file_and_entries(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    old = manifest(host.root)
    predicted = run(host, *TOKENS, check=True)
    assert changed_paths(old, manifest(host.root)) == []
    result = run(host, *TOKENS)
    assert result["loader"] == "systemd-boot"
    assert predicted["diff"] == result["diff"]
    cmdline = (host.root / "etc/kernel/cmdline").read_bytes()
    assert cmdline.endswith(b"console=ttyS0,115200 amd_pstate=active processor.max_cstate=1")
    entry = (host.root / "boot/efi/loader/entries/6.1.conf").read_text()
    old_entry = old["boot/efi/loader/entries/6.1.conf"].content.decode()
    assert entry == old_entry.replace(
        "systemd.machine_id=0123456789abcdef0123456789abcdef",
        "systemd.machine_id=0123456789abcdef0123456789abcdef amd_pstate=active processor.max_cstate=1",
    )
    by_hand = (host.root / "boot/efi/loader/entries/two-options.conf").read_text()
    assert by_hand.count("options") == 1
    assert 'amd_pstate=active "dyndbg=file x.c +p" processor.max_cstate=1' in by_hand
    assert not run(host, *TOKENS)["changed"]
    run(host, state="restored")
    assert [p for p in changed_paths(old, manifest(host.root)) if not p.startswith("state/")] == []


def test_systemd_boot_without_a_file_takes_the_running_line(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    (host.root / "etc/kernel/cmdline").unlink()
    run(host, *TOKENS)
    assert (
        host.root / "etc/kernel/cmdline"
    ).read_text() == f"root=UUID=6d1f ro console=ttyS0,115200 {' '.join(TOKENS)}\n"
    run(host, state="restored")
    assert not (host.root / "etc/kernel/cmdline").exists()


def test_another_installations_entries_are_left_alone(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    foreign = host.root / "boot/efi/loader/entries/other.conf"
    foreign.write_text("title Other\nmachine-id ffff\nlinux /ffff/linux\noptions root=/dev/vdb1\n")
    run(host, *TOKENS)
    assert "amd_pstate" not in foreign.read_text()


def test_proxmox_first_line_only_then_refresh(tmp_path: Path) -> None:
    host = proxmox_host(tmp_path / "host")
    result = run(host, *TOKENS, "console=ttyS0")
    assert result["loader"] == "proxmox-boot-tool"
    assert "2 ESPs of proxmox-boot-tool" in " ".join(result["evidence"])
    text = (host.root / "etc/kernel/cmdline").read_text()
    assert (
        text.splitlines()[0] == f"root=ZFS=rpool/ROOT/pve-1 boot=zfs quiet {' '.join(TOKENS)} console=ttyS0"
    )
    assert text.splitlines(True)[1:] == (FIXTURES / "cmdline/two-lines").read_text().splitlines(True)[1:]
    assert len(result["entries"]) == 4
    assert (host.root / "calls").read_text() == "refresh\nrefresh\n"
    assert not run(host, *TOKENS)["changed"]
    assert (host.root / "calls").read_text() == "refresh\nrefresh\n"


def test_proxmox_refresh_that_fails_on_one_esp(tmp_path: Path) -> None:
    host = proxmox_host(tmp_path / "host")
    (host.root / "fail").write_text("esp2")
    old = (host.root / "etc/kernel/cmdline").read_bytes()
    with pytest.raises(CannotStart, match=r"esp2.*the old command line is configured again"):
        run(host, *TOKENS)
    assert (host.root / "etc/kernel/cmdline").read_bytes() == old
    (host.root / "fail").unlink()
    assert run(host, *TOKENS)["changed"]


def test_proxmox_line_without_root_is_refused(tmp_path: Path) -> None:
    host = proxmox_host(tmp_path / "host")
    (host.root / "etc/kernel/cmdline").write_text("\nroot=ZFS=rpool/ROOT/pve-1 boot=zfs\n")
    with pytest.raises(CannotStart, match=r"first line of .* has no root="):
        run(host, *TOKENS)


@given(st.text(st.sampled_from('ab=r_" \n#\v\r\x85\u2028'), max_size=60), st.booleans())
def test_cmdline_file_other_lines_survive_byte_for_byte(text: str, only_first: bool) -> None:
    if any(line.count('"') % 2 for line in text.split("\n")):
        return
    new = edited(text, [Token("amd_pstate=active")], [], only_first)
    before, after = boot_files.lines(text), boot_files.lines(new)
    different = [i for i, (old, now) in enumerate(zip(before, after)) if old != now]
    assert len(different) <= 1
    assert edited(new, [Token("amd_pstate=active")], [], only_first) == new


def test_bls_entries_under_grub(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    entries = host.root / "boot/loader/entries"
    entries.mkdir(parents=True)
    (entries / "a.conf").write_text(
        f"title A\nlinux /vmlinuz-{OLD}\noptions root=/dev/vda3 ro $tuned_params\n"
    )
    (host.root / "boot/grub/grub.cfg").write_text("insmod blscfg\nblscfg\n")
    result = run(host, *TOKENS)
    assert result["loader"] == "bls"
    assert (entries / "a.conf").read_text().splitlines()[2] == (
        f"options root=/dev/vda3 ro $tuned_params {' '.join(TOKENS)}"
    )


def test_reboot_required_follows_the_running_kernel(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    run(host, *TOKENS)
    assert run(host, *TOKENS)["reboot_required"]
    host.running(f"BOOT_IMAGE=/boot/vmlinuz-{NEW} root=UUID=6d1f ro {' '.join(TOKENS)}", NEW)
    assert not run(host, *TOKENS)["reboot_required"]
    host.running(f"BOOT_IMAGE=/boot/vmlinuz-{NEW} {' '.join(TOKENS)} amd_pstate=passive", NEW)
    assert run(host, *TOKENS)["reboot_required"]
