"""File names of received code: the name object itself holds the source text.

A client may state any file name, of this machine or of another client. So such a name is never used to look
up text: code objects keep the name object that they were compiled with, and the text is read from that
object.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload


class Lines(Sequence[str]):
    """Lines by number from 0, each of which can be computed on access."""

    __slots__ = ()

    @abstractmethod
    def at(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(len(self))[index]
        return self.at(found) if isinstance(found, int) else list(map(self.at, found))

    def __iter__(self) -> Iterator[str]:
        return map(self.at, range(len(self)))


class LinesFrom(Lines):
    """The lines of a text at their numbers in a file, after empty lines that use no memory."""

    __slots__ = ("_before", "_lines", "num_characters")

    def __init__(self, first: int, text: str) -> None:
        """Place a text; ``first`` is the number of its first line, from 1."""
        self.num_characters = len(text)
        self._before = first - 1
        self._lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []

    def __len__(self) -> int:
        return self._before + len(self._lines)

    def at(self, index: int) -> str:
        return self._lines[index - self._before] if index >= self._before else "\n"


class SentFile(str):
    """The file name of received code; ``sent`` is the name as the client sent it, shown in errors.

    ``tree`` returns the syntax tree of ``lines`` as it was compiled here.
    """

    __slots__ = ("lines", "sent", "tree")
    sent: str
    lines: LinesFrom
    tree: Callable[[], ast.Module] | None

    def __new__(
        cls,
        sent: str,
        lines: LinesFrom | None = None,
        tree: Callable[[], ast.Module] | None = None,
    ) -> SentFile:
        made = super().__new__(cls, sent)
        made.sent, made.tree = str(sent), tree
        made.lines = lines if lines is not None else LinesFrom(1, "")
        return made

    def line(self, number: int) -> str:
        """Return a line by its number, from 1; empty if it was not received."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.sent,)


def sent_name(filename: str) -> str:
    return filename.sent if isinstance(filename, SentFile) else filename
