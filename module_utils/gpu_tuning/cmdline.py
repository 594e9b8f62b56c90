# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel command line as tokens, split and compared as the kernel itself does it (lib/cmdline.c).

Whitespace outside double quotes separates tokens, quotes may stand anywhere in one, dashes and underscores
in a name are the same, the last value of a name counts, and what follows ``--`` belongs to init.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Optional

#: Names whose every occurrence counts (the kernel's handlers add them up): set means "is among them".
REPEATED = frozenset(
    (
        *("acpi_osi", "amd_iommu", "cgroup_disable", "console", "crashkernel", "dyndbg", "earlycon", "efi"),
        *("hugepages", "hugepagesz", "intel_iommu", "iommu", "memmap", "module_blacklist", "pci"),
        *("rd.driver.blacklist", "rd.driver.pre", "rd.luks.uuid", "rd.lvm.lv", "rd.md.uuid"),
        *("systemd.mask", "systemd.setenv", "systemd.wants", "vfio_pci.ids"),
    )
)
#: COMMAND_LINE_SIZE on x86 and arm64, less the final NUL.
LONGEST = 2047

_SPACE = " \t\n\v\f\r"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/-]*\Z")
#: The boot loader's own words: they say how a kernel was started, not how it should be.
_OF_THE_LOADER = ("BOOT_IMAGE", "initrd")


@dataclasses.dataclass(frozen=True)
class Token:
    """One token as it was written, quotes and all."""

    text: str

    @property
    def _unquoted(self) -> str:
        if not self.text.startswith('"'):
            return self.text
        return self.text[1:-1] if self.text.endswith('"') and len(self.text) > 1 else self.text[1:]

    @property
    def name(self) -> str:
        """The name in the one spelling that all spellings share (underscores)."""
        return self._unquoted.partition("=")[0].replace("-", "_")

    @property
    def value(self) -> Optional[str]:
        """The value without its quotes; None for a token that has none."""
        _, equals, value = self._unquoted.partition("=")
        if not equals:
            return None
        if value.startswith('"'):
            value = value[1:-1] if value.endswith('"') and len(value) > 1 else value[1:]
        return value

    def means(self, other: Token) -> bool:
        """Tell whether the kernel cannot tell the two apart."""
        return (self.name, self.value) == (other.name, other.value)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Tokens for the kernel, and those after ``--`` for init."""

    tokens: tuple[Token, ...] = ()
    init: Optional[tuple[Token, ...]] = None

    @property
    def text(self) -> str:
        """The command line with single spaces between tokens."""
        words = [token.text for token in self.tokens]
        if self.init is not None:
            words += ["--", *(token.text for token in self.init)]
        return " ".join(words)

    def named(self, name: str) -> list[Token]:
        """Return the tokens of a name, in any of its spellings."""
        wanted = name.replace("-", "_")
        return [token for token in self.tokens if token.name == wanted]

    def has(self, token: Token) -> bool:
        """Tell whether a token takes effect: among a repeated name's, the last of any other."""
        same = self.named(token.name)
        counted = same if token.name in REPEATED else same[-1:]
        return any(token.means(each) for each in counted)

    def lacks(self, removal: Token) -> bool:
        """Tell whether a removal (a name, or a token with its value) has nothing left to remove."""
        return not any(matches(removal, token) for token in self.tokens)

    def changed(self, wanted: Sequence[Token], removed: Sequence[Token] = ()) -> CommandLine:
        """Return the line with tokens set in place of their name's, and others removed."""
        tokens = [t for t in self.tokens if not any(matches(removal, t) for removal in removed)]
        for token in wanted:
            if not CommandLine(tuple(tokens)).has(token):
                tokens = _with(tokens, token)
        return dataclasses.replace(self, tokens=tuple(tokens))

    def without_loader_words(self) -> CommandLine:
        """Return what was configured of a running kernel's line: no BOOT_IMAGE, no initrd."""
        kept = tuple(token for token in self.tokens if token.name not in _OF_THE_LOADER)
        return dataclasses.replace(self, tokens=kept)


def _with(tokens: list[Token], token: Token) -> list[Token]:
    """Put a token where the last of its name stands, instead of all of them, or at the end."""
    places = [i for i, each in enumerate(tokens) if each.name == token.name]
    if token.name in REPEATED or not places:
        return [*tokens, token]
    return [token if i == places[-1] else t for i, t in enumerate(tokens) if i not in places[:-1]]


def matches(removal: Token, token: Token) -> bool:
    """Tell whether a removal means a token: by name alone, or by name and value."""
    return removal.name == token.name and (removal.value is None or removal.value == token.value)


def parse(text: str) -> CommandLine:
    """Return any text as a command line; an unclosed quote runs to the end, as in the kernel."""
    tokens = split(text)
    texts = [token.text for token in tokens]
    if "--" not in texts:
        return CommandLine(tuple(tokens))
    at = texts.index("--")
    return CommandLine(tuple(tokens[:at]), tuple(tokens[at + 1 :]))


def split(text: str) -> list[Token]:
    """Return the tokens of a text."""
    tokens, current, quoted = [], "", False
    for character in text:
        if character in _SPACE and not quoted:
            tokens += [Token(current)] if current else []
            current = ""
            continue
        current += character
        quoted ^= character == '"'
    return [*tokens, Token(current)] if current else tokens


def closed(text: str) -> bool:
    """Tell whether every quote is closed."""
    return text.count('"') % 2 == 0


def wanted_tokens(texts: Iterable[str]) -> list[Token]:
    """Return checked tokens to set. Raises ValueError with one sentence."""
    tokens = [_checked(text, "set") for text in texts]
    for i, token in enumerate(tokens):
        rivals = [t for t in tokens[:i] if t.name == token.name and not t.means(token)]
        if rivals and token.name not in REPEATED:
            raise ValueError(f"{rivals[0].text} and {token.text} set the same name: keep one of them")
    return [t for i, t in enumerate(tokens) if not any(t.means(earlier) for earlier in tokens[:i])]


def removals(texts: Iterable[str], wanted: Sequence[Token] = ()) -> list[Token]:
    """Return checked tokens to remove, a name or a name with its value. Raises ValueError."""
    tokens = [_checked(text, "remove") for text in texts]
    for token in tokens:
        if any(matches(token, each) for each in wanted):
            raise ValueError(f"{token.text} is both to be set and to be removed: keep one of them")
        if '"' in token.text:
            raise ValueError(f"{token.text} cannot be removed by a quoted value: give the name alone")
    return tokens


def _checked(text: str, action: str) -> Token:
    tokens = split(text)
    if any(not 0x20 <= ord(character) < 0x7F for character in text):
        raise ValueError(f"cannot {action} {text!r}: only printable ASCII reaches a kernel unharmed")
    if not closed(text):
        raise ValueError(f"cannot {action} {text!r}: a quote is not closed")
    if len(tokens) != 1 or tokens[0].text != text:
        raise ValueError(f"cannot {action} {text!r}: give one token per entry, quoted if it has spaces")
    token = tokens[0]
    if not _NAME.match(token.name):
        raise ValueError(f"cannot {action} {text!r}: {token.name!r} is no parameter's name")
    if token.name in ("root", *_OF_THE_LOADER):
        raise ValueError(f"cannot {action} {text!r}: {token.name} belongs to the boot loader's own set-up")
    return token


def check(line: CommandLine, where: str) -> None:
    """Raise ValueError for a line that the kernel would cut, or in which a quote swallows what follows."""
    if not closed(line.text):
        raise ValueError(f"the command line of {where} has a quote that is not closed: correct it first")
    if len(line.text) > LONGEST:
        raise ValueError(
            f"the command line of {where} would have {len(line.text)} characters, and a kernel takes "
            f"{LONGEST}: remove tokens first"
        )
