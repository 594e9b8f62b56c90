# SPDX-License-Identifier: GPL-3.0-or-later
"""The trial build of DKMS modules with Debian's dkms, headers that are not installed, and a real compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_tuning import kernel_dkms
from gpu_tuning.boot_files import BootError

from vm import packages
from vm.conftest import alone

HEADERS = packages.NEW_KERNEL.replace("image", "headers")
MODULE = kernel_dkms.Module("gpu-tuning-trial", "1.0")
SOURCE = Path("/usr/src") / f"{MODULE.name}-{MODULE.version}"
GOOD = '#include <linux/module.h>\nMODULE_LICENSE("GPL");\nMODULE_DESCRIPTION("builds");\n'


@pytest.fixture
def module() -> Iterator[Path]:
    """Give dkms a module of three lines; return its source."""
    if shutil.which("dkms") is None or os.geteuid() != 0:
        pytest.skip("needs root and dkms")
    with alone():
        packages.refresh()
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir()
    (SOURCE / "dkms.conf").write_text(
        f'PACKAGE_NAME="{MODULE.name}"\nPACKAGE_VERSION="{MODULE.version}"\n'
        'BUILT_MODULE_NAME[0]="trial"\nDEST_MODULE_LOCATION[0]="/updates"\nAUTOINSTALL="yes"\n'
    )
    (SOURCE / "Makefile").write_text("obj-m := trial.o\n")
    (SOURCE / "trial.c").write_text(GOOD)
    subprocess.run(["dkms", "add", "-m", MODULE.name, "-v", MODULE.version], check=True)
    yield SOURCE / "trial.c"
    subprocess.run(["dkms", "remove", "-m", MODULE.name, "-v", MODULE.version, "--all"], check=True)
    shutil.rmtree(SOURCE)


def outside() -> list[str]:
    """Return what is where dkms, the headers' packages and the kernel's modules go."""
    return sorted(
        str(path) for root in ("/var/lib/dkms", "/lib/modules", "/usr/src") for path in Path(root).rglob("*")
    )


def test_a_module_is_built_for_a_kernel_that_is_not_here(module: Path) -> None:
    release = packages.release_of(packages.image_behind(packages.NEW_KERNEL))
    assert not os.path.exists(f"/lib/modules/{release}")
    before = outside()
    assert MODULE in kernel_dkms.modules()
    assert MODULE in kernel_dkms.unbuilt(release)
    kernel_dkms.trial_build([MODULE], release, HEADERS)
    assert outside() == before

    module.write_text(GOOD + "int missing = no_such_symbol;\n")
    with pytest.raises(BootError) as failed:
        kernel_dkms.trial_build([MODULE], release, HEADERS)
    assert str(failed.value).startswith(f"{MODULE.name} 1.0 does not build for kernel {release}: ")
    assert re.search(r"error: .no_such_symbol. undeclared", str(failed.value))
    assert outside() == before
