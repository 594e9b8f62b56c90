# SPDX-License-Identifier: GPL-3.0-or-later
"""What stands in for typing behaves as typing does."""

from __future__ import annotations

import typing

import pytest
from gpu_tuning import typed


def made(base: typing.Any) -> typing.Any:
    class Lanes(base):  # type: ignore[misc]
        """A link's width."""

        now: int
        most: typing.Optional[int] = None

        @property
        def narrow(self) -> bool:
            return self.most is not None and self.now < self.most

    return Lanes


@pytest.mark.parametrize("base", [typing.NamedTuple, typed.NamedTuple], ids=["typing", "typed"])
def test_a_named_tuple_with_a_default_and_a_property(base: typing.Any) -> None:
    lanes = made(base)
    assert (lanes.__name__, lanes.__doc__, lanes._fields) == ("Lanes", "A link's width.", ("now", "most"))
    assert lanes(8) == (8, None) == lanes(now=8)
    assert lanes(8, 16).narrow
    assert not lanes(8, 16)._replace(now=16).narrow
    assert repr(lanes(8, most=16)) == "Lanes(now=8, most=16)"
    for bad in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            lanes(*bad)
    with pytest.raises(AttributeError):
        lanes(8).now = 4
    with pytest.raises(AttributeError):
        lanes(8).other = 4


def test_every_form_can_be_part_of_an_alias() -> None:
    dict[str, typed.Optional[typed.Any]]
    assert typed.Union[str, int, None] is typed.Any
