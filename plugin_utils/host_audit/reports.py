# SPDX-License-Identifier: GPL-3.0-or-later
"""Write an audit's reports on the controller, and find the one before it."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, Optional

import jinja2
from markdown_text import plain

from . import document, drawing
from .document import Audit
from .evaluate import CLEAR, NOT_APPLICABLE, UNKNOWN, gib


class ReportError(Exception):
    """A report that cannot be written or an earlier one that cannot be read: one sentence."""


def host_folder(reports_root: str, host: str) -> str:
    """Return a host's directory; a name with a slash or a leading dot cannot lead elsewhere."""
    return os.path.join(reports_root, re.sub(r"[^\w.:@-]|^\.+", "_", host))


def earlier(reports_root: str, host: str, path: Optional[str] = None) -> Optional[Audit]:
    """Return the audit at ``path``, else the host's newest one, None where there is none.

    Raises ReportError for a file that was asked for and is no audit.
    """
    if path:
        return _load(path)
    folder = host_folder(reports_root, host)
    names = sorted(os.listdir(folder), reverse=True) if os.path.isdir(folder) else []
    for name in names:
        candidate = os.path.join(folder, name, "audit.json")
        if os.path.isfile(candidate):
            return _load(candidate)
    return None


def _load(path: str) -> Audit:
    try:
        with open(path, encoding="utf-8") as handle:
            audit = json.load(handle)
        if audit["schema"] != document.SCHEMA or not isinstance(audit["rows"], list):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"the earlier audit {path} cannot be used: {error}") from error
    return dict(audit)


def write(audit: Audit, reports_root: str, templates: str) -> str:
    """Write audit.json, system-improve.md and audit.html to a new directory and return it."""
    texts = {
        "audit.json": json.dumps(audit, indent=1, sort_keys=True) + "\n",
        "system-improve.md": render(audit, templates, "system-improve.md.j2"),
        "audit.html": render(audit, templates, "audit.html.j2"),
    }
    try:
        folder = _new_folder(host_folder(reports_root, audit["host"]))
        for name, text in texts.items():
            with open(os.path.join(folder, name), "x", encoding="utf-8") as handle:
                handle.write(text)
    except OSError as error:
        raise ReportError(f"the report cannot be written below {reports_root}: {error}") from error
    return folder


def _new_folder(parent: str) -> str:
    """Make a directory named after the time; two runs in one second get two of them."""
    os.makedirs(parent, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for number in range(1, 100):
        folder = os.path.join(parent, stamp if number == 1 else f"{stamp}-{number}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"a hundred reports of one second in {parent}")


def render(audit: Audit, templates: str, name: str) -> str:
    """Return a report's text; an HTML one escapes all that comes from the host."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({"cell": plain, "where": document.where, "gib": gib})
    return environment.get_template(name).render(**_view(audit))


def _view(audit: Audit) -> dict[str, Any]:
    """Return what the templates show."""
    rows = audit["rows"]
    return {
        "audit": audit,
        "facts": audit["facts"],
        "findings": document.groups(rows),
        "unchecked": document.groups(rows, UNKNOWN),
        "clear": document.groups(rows, CLEAR),
        "not_applicable": document.groups(rows, NOT_APPLICABLE),
        "topology": drawing.topology(audit["facts"], rows),
    }
