# SPDX-License-Identifier: GPL-3.0-or-later
"""Disk images that boot, made without loop devices: mke2fs -d, mtools, grub-mkimage.

One image holds a root file system with an old kernel, and a package source of its own with a new one. It
boots with GRUB under a BIOS, or with systemd-boot under EFI.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vm.machine import MAC

UUID, ESP_ID = "6d1f0f5e-2b7c-4a55-9d0e-0a5d7f3b9c11", "4E565249"
MACHINE_ID = "0123456789abcdef0123456789abcdef"
#: The old kernel's command line; panic= because its own panics have to end too.
CMDLINE = "console=ttyS0,115200 panic=5"
#: With systemd-boot also what forbids a MaxReadReq above MaxPayload; GRUB's machine has its GPUs tuned.
EFI_CMDLINE = f"{CMDLINE} pci=pcie_bus_perf"
_MIB = 1 << 20
_ROOT_MIB = 3000
_FILES = Path(__file__).resolve().parent / "files"

#: Units that cost time under emulation and that nothing here needs.
_MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
    *("fstrim.timer", "e2scrub_reap.service", "lxc-net.service", "lxc.service", "lxc-monitord.service"),
    *("systemd-networkd-wait-online.service", "systemd-timesyncd.service", "systemd-pstore.service"),
    *("getty@tty1.service", "serial-getty@ttyS0.service", "systemd-firstboot.service"),
    *("systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "systemd-update-utmp.service"),
    *("systemd-update-utmp-runlevel.service", "sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    *("sys-fs-fuse-connections.mount", "systemd-random-seed.service", "systemd-user-sessions.service"),
    "systemd-journal-flush.service",
)
#: What an initramfs does without here: with busybox, a third of the minute and a half that making one takes.
_NO_HOOKS = ("dmsetup", "fsck", "keymap", "resume", "thermal")
_BLACKLIST = (
    *("kvm_amd", "kvm_intel", "powernow_k8", "acpi_cpufreq", "crct10dif_pclmul", "crc32_pclmul"),
    *("ghash_clmulni_intel", "sha512_ssse3", "sha256_ssse3", "sha1_ssse3", "aesni_intel", "qemu_fw_cfg"),
    "ip_tables",
)


class Parts(NamedTuple):
    """What an image is made of. ``repository``: the packages it can install; ``extra``: unpacked into it."""

    root_tar: Path
    old_kernel: Path
    old_release: str
    repository: list[Path]
    public_key: Path
    systemd_boot: list[Path]


def cached(parts: Parts, cache: Path, efi: bool) -> Path:
    """Return an image, made anew when anything that goes into it has another name or content."""
    sources = [Path(__file__), Path(__file__).with_name("grub-probe"), parts.public_key]
    sources += sorted(each for each in _FILES.rglob("*") if each.is_file())
    names = [each.name for each in (parts.root_tar, parts.old_kernel, *parts.repository, *parts.systemd_boot)]
    content = b"\0".join([*(each.read_bytes() for each in sources), *(name.encode() for name in names)])
    image = cache / f"{'efi' if efi else 'bios'}-{hashlib.sha256(content).hexdigest()[:12]}.img"
    if not image.exists():
        for old in cache.glob(f"{image.name.partition('-')[0]}-*.img"):
            old.unlink()
        build(parts, image, efi)
    return image


def build(parts: Parts, image: Path, efi: bool) -> None:
    """Build an image: GRUB under a BIOS, or systemd-boot with ``efi``."""
    with tempfile.TemporaryDirectory(prefix="vm-image-", dir=image.parent) as scratch:
        root = Path(scratch, "root")
        root.mkdir()
        subprocess.run(["tar", "-C", root, "--numeric-owner", "--xattrs", "-xf", parts.root_tar], check=True)
        _configure(root, parts)
        with _chroot(root):
            if efi:
                _install_systemd_boot(root, parts)
            else:
                _install_grub(root, parts)
        partial = image.with_suffix(".part")
        if efi:
            _write_efi_disk(root, partial, Path(scratch), parts)
        else:
            _write_bios_disk(root, partial)
        partial.rename(image)


def _configure(root: Path, parts: Parts) -> None:
    shutil.copytree(_FILES, root, dirs_exist_ok=True)
    (root / "etc/systemd/network/10-lan.network").write_text(
        f"[Match]\nMACAddress={MAC}\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    )
    (root / "etc/fstab").write_text(f"UUID={UUID} / ext4 defaults,noatime 0 0\n")
    (root / "etc/hostname").write_text("vm\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 vm\n")
    (root / "etc/machine-id").write_text(f"{MACHINE_ID}\n")
    (root / "etc/modprobe.d/vm.conf").write_text("".join(f"blacklist {name}\n" for name in _BLACKLIST))
    for name in _MASKED:
        unit = root / "etc/systemd/system" / name
        unit.unlink(missing_ok=True)
        unit.symlink_to("/dev/null")
    wanted = root / "etc/systemd/system/multi-user.target.wants/systemd-networkd.service"
    wanted.unlink(missing_ok=True)
    wanted.symlink_to("/lib/systemd/system/systemd-networkd.service")
    for each in [*root.glob("usr/lib/modules-load.d/*.conf")]:
        each.unlink()
    for name in _NO_HOOKS:
        (root / "usr/share/initramfs-tools/hooks" / name).chmod(0o644)
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(parts.public_key, ssh / "authorized_keys")
    _add_repository(root, parts)


def _add_repository(root: Path, parts: Parts) -> None:
    source = root / "srv/repository"
    source.mkdir(parents=True)
    for deb in parts.repository:
        shutil.copy(deb, source)
    for name, command in (("Packages", "packages"), ("Release", "release")):
        with open(source / name, "wb") as stream:
            subprocess.run(["apt-ftparchive", command, "."], cwd=source, check=True, stdout=stream)
    shutil.rmtree(root / "var/lib/apt/lists")
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
    for each in root.glob("etc/apt/sources.list.d/*"):
        each.unlink()
    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/repository ./\n")


@contextlib.contextmanager
def _chroot(root: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, source, place in (("-t", "proc", root / "proc"), ("--bind", "/dev", root / "dev")):
            argv = ["mount", kind, source, *([source] if kind == "-t" else []), str(place)]
            subprocess.run(argv, check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
        yield


def _in(root: Path, *argv: str) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(
        ["chroot", root, *argv], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _install_kernel(root: Path, parts: Parts) -> None:
    shutil.copy(parts.old_kernel, root / "tmp/kernel.deb")
    _in(root, "dpkg", "--install", "/tmp/kernel.deb")
    (root / "tmp/kernel.deb").unlink()


def _install_grub(root: Path, parts: Parts) -> None:
    """Install the kernel and GRUB's menu, with a stand-in for grub-probe: there is no disk yet to probe."""
    probe = root / "usr/sbin/grub-probe"
    probe.rename(probe.with_suffix(".real"))
    shutil.copy(Path(__file__).with_name("grub-probe"), probe)
    modules = root / "boot/grub/i386-pc"
    modules.mkdir(parents=True)
    for pattern in ("*.mod", "*.lst"):
        for each in root.glob(f"usr/lib/grub/i386-pc/{pattern}"):
            shutil.copy(each, modules)
    for name in ("20_linux_xen", "30_os-prober", "30_uefi-firmware"):
        (root / "etc/grub.d" / name).chmod(0o644)  # nothing to find, and slow under emulation
    _in(root, "grub-editenv", "/boot/grub/grubenv", "create")
    _install_kernel(root, parts)
    _in(root, "update-grub")
    probe.with_suffix(".real").rename(probe)
    prefix = "(hd0,gpt3)/boot/grub"
    _in(
        root,
        *(
            "grub-mkimage",
            "-O",
            "i386-pc",
            "-o",
            "/boot/core.img",
            "-p",
            prefix,
            "biosdisk",
            "part_gpt",
            "ext2",
        ),
    )


def _install_systemd_boot(root: Path, parts: Parts) -> None:
    """Install the kernel, then systemd-boot without a loader of its own: the ESP is made beside the root."""
    _in(root, "dpkg", "--purge", "--force-depends", "grub-pc-bin", "grub2-common", "grub-common")
    _install_kernel(root, parts)
    for deb in parts.systemd_boot:
        shutil.copy(deb, root / "tmp")
    _in(root, "dpkg", "--install", *(f"/tmp/{deb.name}" for deb in parts.systemd_boot))
    (root / "etc/kernel").mkdir(exist_ok=True)
    (root / "etc/kernel/cmdline").write_text(f"root=UUID={UUID} ro {EFI_CMDLINE}\n")
    (root / "boot/efi").mkdir(exist_ok=True)
    with open(root / "etc/fstab", "a", encoding="ascii") as stream:
        stream.write(f"UUID={ESP_ID[:4]}-{ESP_ID[4:]} /boot/efi vfat umask=0077 0 0\n")


def _partition(image: Path, size_mib: int, table: str) -> None:
    image.unlink(missing_ok=True)
    with open(image, "wb") as stream:
        stream.truncate(size_mib * _MIB)
    subprocess.run(["sfdisk", "--quiet", image], input=table, text=True, check=True)


def _write_root(root: Path, image: Path, start_mib: int) -> None:
    argv = [
        *("mke2fs", "-q", "-t", "ext4", "-O", "^metadata_csum_seed,^orphan_file", "-U", UUID, "-L", "root"),
        *("-E", f"offset={start_mib * _MIB},lazy_itable_init=1,lazy_journal_init=1", "-d", root, image),
    ]
    subprocess.run([*argv, f"{_ROOT_MIB}M"], check=True)


_ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"
_ESP_TYPE = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
_BIOS_TYPE = "21686148-6449-6E6F-744E-656564454649"


def _write_bios_disk(root: Path, image: Path) -> None:
    """1 MiB of GRUB, a small ESP that nothing uses, and the root as the third partition."""
    table = (
        f"label: gpt\nstart=2048, size=2048, type={_BIOS_TYPE}\n"
        f"start=4096, size=98304, type={_ESP_TYPE}\nstart=102400, type={_ROOT_TYPE}\n"
    )
    _partition(image, 50 + _ROOT_MIB + 2, table)
    core = (root / "boot/core.img").read_bytes()
    (root / "boot/core.img").unlink()
    boot = (root / "usr/lib/grub/i386-pc/boot.img").read_bytes()
    _write_root(root, image, 50)
    _embed_grub(image, boot, core)


def _embed_grub(image: Path, boot: bytes, core: bytes) -> None:
    """Do what grub-bios-setup does: boot.img into the MBR, core.img into the BIOS boot partition."""
    first = 2048
    sector = bytearray(boot[:512])
    struct.pack_into("<Q", sector, 0x5C, first)
    sector[0x66:0x68] = b"\x90\x90"  # no check of the BIOS drive number
    padded = bytearray(core + bytes(-len(core) % 512))
    # The block list of core.img's own first sector: where the rest of it is, and where to load it.
    struct.pack_into("<QHH", padded, 0x1F4, first + 1, len(padded) // 512 - 1, 0x820)
    with open(image, "r+b") as stream:
        stream.write(sector[:440])
        stream.seek(first * 512)
        stream.write(padded)


def _write_efi_disk(root: Path, image: Path, scratch: Path, parts: Parts) -> None:
    """An ESP with systemd-boot and the old kernel's entry, and the root."""
    table = f"label: gpt\nstart=4096, size=524288, type={_ESP_TYPE}\nstart=528384, type={_ROOT_TYPE}\n"
    _partition(image, 258 + _ROOT_MIB + 2, table)
    esp = scratch / "esp"
    _fill_esp(root, esp, parts.old_release)
    with open(image, "r+b") as stream, open(esp, "rb") as source:
        stream.seek(2 * _MIB)
        shutil.copyfileobj(source, stream)
    _write_root(root, image, 258)


def _fill_esp(root: Path, esp: Path, release: str) -> None:
    with open(esp, "wb") as stream:
        stream.truncate(256 * _MIB)
    subprocess.run(
        ["mkfs.vfat", "-F32", "-n", "ESP", "-i", ESP_ID, esp], check=True, stdout=subprocess.DEVNULL
    )
    place = f"{MACHINE_ID}/{release}"
    tree = esp.with_name("esp-tree")
    loader = root / "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
    files = {
        "EFI/BOOT/BOOTX64.EFI": loader.read_bytes(),
        "EFI/systemd/systemd-bootx64.efi": loader.read_bytes(),
        f"{place}/linux": (root / f"boot/vmlinuz-{release}").read_bytes(),
        f"{place}/initrd.img-{release}": (root / f"boot/initrd.img-{release}").read_bytes(),
        "loader/loader.conf": b"timeout 0\n",
        "loader/entries.srel": b"type1\n",
        f"loader/entries/{MACHINE_ID}-{release}.conf": (
            f"title Debian GNU/Linux 12 (bookworm)\nversion {release}\nmachine-id {MACHINE_ID}\n"
            f"options root=UUID={UUID} ro {EFI_CMDLINE}\n"
            f"linux /{place}/linux\ninitrd /{place}/initrd.img-{release}\n"
        ).encode(),
    }
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    tops = [str(each) for each in sorted(tree.iterdir())]
    environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1"}
    subprocess.run(["mcopy", "-s", "-i", esp, *tops, "::"], check=True, env=environment)
