# SPDX-License-Identifier: GPL-3.0-or-later
"""Pack part of this package into one executable zip file (PEP 441) that needs only Python.

What runs on a host at boot is the code that a play ran there: the archive is made of the sources that are
loaded, found by following their relative imports from one main module.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import marshal
import pkgutil
import sys
import zipfile
from collections.abc import Iterator
from typing import Optional

#: The package's name inside an archive, whatever it is called where this code runs.
PACKAGE = "gpu_tuning"

#: Taking the interpreter down at the end would be a tenth of a short run.
_MAIN = """import os
import sys

from {package}.{module} import main

status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


def sources(main: str) -> dict[str, str]:
    """Return {path in the package: text} of a module ("agent", "lxc.repair") and all that it imports."""
    found: dict[str, str] = {}
    waiting = [main]
    while waiting:
        module = waiting.pop()
        path, text = _source(module)
        if path in found:
            continue
        found[path] = text
        waiting += _parents(module)
        waiting += [name for name in _imported(module, path, text) if _exists(name)]
    return found


def build(main: str, python: str = "/usr/bin/python3", compiled: bool = False) -> bytes:
    """Return an archive that runs ``main(argv)`` of a module of this package.

    ``compiled`` adds byte code for the running Python's version, which saves another Python of that version
    most of its start; any other version uses the sources. The bytes of byte code may differ from one process
    to the next: compare archives with ``same``.
    """
    packed = io.BytesIO()
    packed.write(f"#!{python} -I\n".encode())
    files = {f"{PACKAGE}/{path}": text for path, text in sorted(sources(main).items())}
    files["__main__.py"] = _MAIN.format(package=PACKAGE, module=main)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        if compiled:
            archive.comment = str(sys.implementation.cache_tag).encode()
        for path, text in files.items():
            archive.writestr(_member(path), text)
            if compiled:
                archive.writestr(_member(f"{path}c"), _byte_code(path, text))
    return packed.getvalue()


def same(one: bytes, other: bytes) -> bool:
    """Tell whether two archives hold the same sources, for the same Python."""
    return _identity(one) == _identity(other)


def _identity(packed: bytes) -> Optional[tuple[bytes, bytes, dict[str, int]]]:
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            listed = {each.filename: each.CRC for each in archive.infolist() if each.filename.endswith(".py")}
            return packed.partition(b"\n")[0], archive.comment, listed
    except (zipfile.BadZipFile, ValueError):
        return None


def _member(path: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
    member.external_attr = 0o644 << 16
    return member


def _byte_code(path: str, text: str) -> bytes:
    """Return a .pyc that is used without a look at its source (PEP 552, unchecked)."""
    code = compile(text, path, "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + b"\x01\0\0\0" + bytes(8) + marshal.dumps(code)


def _source(module: str) -> tuple[str, str]:
    """Return a module's path in the package and its text. Raises FileNotFoundError."""
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py") if stem else ("__init__.py",):
        text = _text(path)
        if text is not None:
            return path, text
    raise FileNotFoundError(f"no module {module} in {__package__}")


def _text(path: str) -> Optional[str]:
    assert __package__
    try:
        data = pkgutil.get_data(__package__, path)
    except OSError:
        return None
    return None if data is None else data.decode("utf-8")


def _exists(module: str) -> bool:
    try:
        _source(module)
    except FileNotFoundError:
        return False
    return True


def _parents(module: str) -> list[str]:
    """Return the packages around a module; "" is this package itself."""
    return [module.rpartition(".")[0]] if module else []


def _imported(module: str, path: str, text: str) -> Iterator[str]:
    """Yield what a module's relative imports may name: modules, and names that may be modules."""
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = _up(package, node.level - 1)
            named = ".".join(filter(None, (base, node.module)))
            yield named
            yield from (".".join(filter(None, (named, alias.name))) for alias in node.names)


def _up(package: str, levels: int) -> str:
    parts = package.split(".") if package else []
    return ".".join(parts[: len(parts) - levels])
