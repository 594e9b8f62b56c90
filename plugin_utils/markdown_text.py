# SPDX-License-Identifier: GPL-3.0-or-later
"""What hosts and people say, as text in the Markdown that this project writes."""

from __future__ import annotations

import re

#: An underscore within a word is no markup in GitHub's Markdown, and names of settings are full of them.
_MARKUP = re.compile(r"[\\`*\[|]|(?<!\w)_|_(?!\w)")


def plain(value: object) -> str:
    """Return a value (None: nothing) as one line that neither ends a table's cell nor is markup."""
    text = _MARKUP.sub(r"\\\g<0>", " ".join(str("" if value is None else value).split()))
    return text.replace("<", "&lt;")
