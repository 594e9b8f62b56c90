# SPDX-License-Identifier: GPL-3.0-or-later
"""What others say cannot become markup, and stays readable as it stands in the file."""

from __future__ import annotations

import pytest
from markdown_text import plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        ("one\n two\t|three", "one two \\|three"),
        ("vm.dirty_background_ratio", "vm.dirty_background_ratio"),
        ("_this_ and *that*", "\\_this\\_ and \\*that\\*"),
        ("<b>`x`</b> [y](z)", "&lt;b>\\`x\\`&lt;/b> \\[y](z)"),
        ("a\\|b", "a\\\\\\|b"),
    ],
)
def test_a_value_is_one_line_and_no_markup(value: object, text: str) -> None:
    assert plain(value) == text
