# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel modules: when they apply, what counts as loaded, and what modprobe's words become."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_tuning import engine, journal, kernel_module
from gpu_tuning.rows import Row
from support.small_host import SmallHost, small_host

PEERMEM = kernel_module.wanted_module("nvidia-peermem", ["rdma_device", "nvidia_driver"])
#: Loads and unloads as the kernel shows it, and writes down how it was called.
STUB = """\
#!/bin/sh
echo "${0##*/} $*" >>"$0.log"
case "${0##*/} $*" in
    "modprobe --dry-run "*) exit 0 ;;
    "rmmod "*) rm -r "@SYS@/module/$1" ;;
    *) mkdir -p "@SYS@/module/$1" && echo live >"@SYS@/module/$1/initstate" ;;
esac
"""


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    host = small_host(memory_path / "host", cpus=1, gpus=1)
    for folder in ("class/infiniband/mlx5_0", "module/nvidia"):
        (host.root / "sys" / folder).mkdir(parents=True)
    return host


def stub(host: SmallHost, body: str = STUB) -> str:
    for name in ("modprobe", "rmmod"):
        path = host.root.parent / name
        path.write_text(body.replace("@SYS@", str(host.root / "sys")))
        path.chmod(0o755)
    return str(host.root.parent / "modprobe")


def calls(host: SmallHost) -> list[str]:
    """Return how modprobe and rmmod were called."""
    logs = sorted(host.root.parent.glob("*.log"))
    return [line for log in logs for line in log.read_text().splitlines()]


def kind(host: SmallHost, modprobe: str | None, *modules: kernel_module.WantedModule) -> engine.Kind:
    return kernel_module.KernelModules(
        list(modules or (PEERMEM,)), str(host.root / "proc"), str(host.root / "sys"), modprobe
    )


def apply(host: SmallHost, modprobe: str | None) -> Row:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        (row,) = engine.applied([kind(host, modprobe)], kept)
    return row


def restore(host: SmallHost, modprobe: str | None) -> Row:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        (row,) = engine.restored([kind(host, modprobe)], kept, check=False)
    return row


@pytest.mark.parametrize("name", ["", "-x", "--remove", "a b", "a/b", "../x", "x;y", "x\n"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a kernel module's name"):
        kernel_module.wanted_module(name)


def test_dashes_and_underscores_are_the_same() -> None:
    assert PEERMEM.name == "nvidia_peermem"


def test_one_module_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="nvidia_peermem is named twice"):
        kernel_module.checked_modules([PEERMEM, kernel_module.wanted_module("nvidia_peermem")])


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("class/infiniband/mlx5_0", "no RDMA device: "),
        ("class/infiniband", "no RDMA device: "),
        ("module/nvidia", "no NVIDIA driver: "),
    ],
)
def test_not_applicable_says_what_is_missing(host: SmallHost, missing: str, reason: str) -> None:
    path = host.root / "sys" / missing
    for each in path.iterdir():
        each.rmdir()
    path.rmdir()
    row = apply(host, stub(host))
    assert (row.status, row.desired) == ("not_applicable", "loaded")
    assert str(row.reason).startswith(reason)
    assert calls(host) == []


def test_a_recorded_machine_has_no_kernel(host: SmallHost) -> None:
    row = apply(host, None)
    assert row.status == "not_applicable"
    assert str(row.reason).startswith("recorded machine: ")


def test_load_and_give_back(host: SmallHost) -> None:
    modprobe = stub(host)
    row = apply(host, modprobe)
    assert (row.id, row.before, row.after, row.status) == (
        "module:nvidia_peermem",
        "absent",
        "loaded",
        "changed",
    )
    assert apply(host, modprobe).status == "ok"
    row = restore(host, modprobe)
    assert (row.after, row.status) == ("absent", "changed")


def test_unloading_leaves_the_modules_that_it_used(host: SmallHost) -> None:
    """``modprobe --remove`` takes every module with it that nothing else uses: the GPU's driver."""
    modprobe = stub(host)
    apply(host, modprobe)
    restore(host, modprobe)
    assert calls(host) == [
        "modprobe --dry-run nvidia_peermem",
        "modprobe nvidia_peermem",
        "rmmod nvidia_peermem",
    ]


@pytest.mark.parametrize(
    ("initstate", "status"),
    [("live\n", "ok"), (None, "ok"), ("coming\n", "changed"), ("going\n", "changed")],
)
def test_what_counts_as_loaded(host: SmallHost, initstate: str | None, status: str) -> None:
    """A built-in module has a folder and no initstate."""
    folder = host.root / "sys/module/nvidia_peermem"
    folder.mkdir()
    if initstate:
        (folder / "initstate").write_text(initstate)
    assert apply(host, stub(host)).status == status


def test_what_was_loaded_already_stays(host: SmallHost) -> None:
    (host.root / "sys/module/nvidia_peermem").mkdir()
    modprobe = stub(host)
    apply(host, modprobe)
    row = restore(host, modprobe)
    assert (row.status, row.after, calls(host)) == ("ok", "loaded", [])


FAILING = """\
#!/bin/sh
[ "$1" = --dry-run ] && exit 0
echo 'modprobe: ERROR: could not insert:' >&2
printf 'Invalid\\377 argument\\n' >&2
exit 1
"""


def test_the_kernels_message_is_passed_on(host: SmallHost) -> None:
    row = apply(host, stub(host, FAILING))
    assert (row.status, row.after) == ("rejected", "absent")
    assert "modprobe nvidia_peermem failed: modprobe: ERROR: could not insert: Invalid" in str(row.reason)


def test_a_module_that_is_not_installed_is_predicted(host: SmallHost) -> None:
    modprobe = stub(
        host, '#!/bin/sh\necho "FATAL: Module $2 not found in directory /lib/modules/x" >&2; exit 1\n'
    )
    (row,) = kind(host, modprobe).capture()
    assert row.status == "rejected"
    assert "FATAL: Module nvidia_peermem not found" in str(row.reason)


def test_messages_are_in_the_language_people_search_in(
    host: SmallHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    modprobe = stub(host, '#!/bin/sh\necho "language $LC_ALL" >&2\nexit 1\n')
    (row,) = kind(host, modprobe).capture()
    assert str(row.reason).endswith("failed: language C")


def test_a_modprobe_that_says_nothing(host: SmallHost) -> None:
    (row,) = kind(host, stub(host, "#!/bin/sh\nexit 3\n")).capture()
    assert str(row.reason).endswith("failed: exit status 3 and no word")


def test_a_modprobe_that_lies(host: SmallHost) -> None:
    row = apply(host, stub(host, "#!/bin/sh\nexit 0\n"))
    assert (row.status, row.after) == ("clamped", "absent")


def test_no_modprobe_at_all(host: SmallHost) -> None:
    row = apply(host, str(host.root / "nowhere/modprobe"))
    assert row.status == "failed"
    assert "cannot run" in str(row.reason)
    assert "install kmod" in str(row.reason)


def test_unloading_that_is_refused_stays_recorded(host: SmallHost) -> None:
    modprobe = stub(host)
    apply(host, modprobe)
    stub(host, "#!/bin/sh\necho 'rmmod: ERROR: Module nvidia_peermem is in use' >&2\nexit 1\n")
    row = restore(host, modprobe)
    assert row.status == "rejected"
    assert "is in use" in str(row.reason)
    stub(host)
    assert restore(host, modprobe).status == "changed"


@pytest.mark.parametrize("root", ["/sys", "/sys/", "/sys/."])
def test_built_in_modules_of_this_kernel(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """They need not have a folder in /sys/module; the list on the disk names them."""
    monkeypatch.setattr(kernel_module, "_lines", lambda path: ["kernel/drivers/made-up.ko"])
    (row,) = kernel_module.KernelModules([kernel_module.wanted_module("made_up")], sysfs_root=root).capture()
    assert row.before == "loaded"


def test_tools_are_found_outside_a_users_path(host: SmallHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ssh, PATH need not have /usr/sbin, where they are."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    modprobe = stub(host, '#!/bin/sh\necho "path $PATH" >&2\nexit 1\n')
    (row,) = kind(host, modprobe).capture()
    assert str(row.reason).endswith("failed: path /usr/bin:/bin:/usr/sbin:/sbin")
