# SPDX-License-Identifier: GPL-3.0-or-later
"""What the program on a managed host needs of ``typing``, whose import would be a seventh of a check.

Its modules evaluate no annotation (PEP 563), so that all but NamedTuple only has to be there.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import Optional as Optional
    from typing import Union as Union
else:

    class Any:
        """Stands for every form: a class, and any index into it is the class."""

        def __class_getitem__(cls, _):
            """Return the class."""
            return cls

    Optional = Union = Any

    class _Fields(type):
        """Makes of a class with annotations a subclass of the named tuple that they describe."""

        def __new__(mcs, name, bases, space):
            if not bases:
                return super().__new__(mcs, name, bases, space)
            fields = list(space.pop("__annotations__"))
            defaults = [space.pop(field) for field in fields if field in space]
            return type(name, (namedtuple(name, fields, defaults=defaults),), {**space, "__slots__": ()})

    class NamedTuple(metaclass=_Fields):
        """As typing's."""
