"""Names of files whose code came from elsewhere: the name itself has the text that the code was made from.

Whoever sends code says which file and line it stands in, and may say anything: the name of a file of this
machine, or of another sender's. So nothing is looked up under such a name. Code objects keep the very object
that they were compiled with as their file's name, those within them too, and what needs their text asks it:
``SourceReader`` for the blocks in received functions, the wire for the lines of a traceback.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload


class Lines(Sequence[str]):
    """Lines by number from 0, each of which can be made when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def at(self, index: int) -> str:
        """Return one of them."""

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return a line, or those of a slice."""
        found = range(len(self))[index]
        return self.at(found) if isinstance(found, int) else list(map(self.at, found))

    def __iter__(self) -> Iterator[str]:
        """Go through all lines."""
        return map(self.at, range(len(self)))


class LinesFrom(Lines):
    """A text's lines at their numbers in a file, after empty ones that take no room.

    Attributes:
        num_characters: How long the text is.
    """

    __slots__ = ("_before", "_lines", "num_characters")

    def __init__(self, first: int, text: str) -> None:
        """Place a text whose first line has this number, from 1."""
        self.num_characters = len(text)
        self._before = first - 1
        self._lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []

    def __len__(self) -> int:
        """Return the number of the last line."""
        return self._before + len(self._lines)

    def at(self, index: int) -> str:
        """Return a line."""
        return self._lines[index - self._before] if index >= self._before else "\n"


class SentFile(str):
    """The name of a file that received code stands in.

    Attributes:
        sent: The name as the sender gave it, which errors show.
        lines: What came of the file; no others are known.
        tree: Makes the same, parsed, as it was compiled here; None where that is not known.
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
        *,
        is_hidden: bool = False,
    ) -> SentFile:
        """Name a file.

        Args:
            sent: What its sender calls it.
            lines: Its lines, as far as they came.
            tree: See ``SentFile``.
            is_hidden: Whether Python's own tools, which open files by such names to show their lines, are to
                take it for none: what torch warns of at a line of a block's is shown so.
        """
        made = super().__new__(cls, f"<sent {sent}>" if is_hidden else sent)
        made.sent, made.tree = str(sent), tree
        made.lines = lines if lines is not None else LinesFrom(1, "")
        return made

    def line(self, number: int) -> str:
        """Return a line by its number, from 1, as it came; empty if it did not."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Go elsewhere as the plain name."""
        return str, (self.sent,)


def sent_name(filename: str) -> str:
    """Return the name of code's file as its author knows it."""
    return filename.sent if isinstance(filename, SentFile) else filename
