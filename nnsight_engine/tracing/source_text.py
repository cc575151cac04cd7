"""The source text that running code was compiled from: a file, cell, archive, ``-c``, stdin or the prompt.

The text is cached when the code is first looked up: a later edit of the file must not shift the code that
runs. Where a name such as ``<string>`` identifies no text, text is accepted only if it compiles to the code
in question. The caller checks whether a text fits (``loaded_code``), as a file may have been edited between
its import and the first look-up. Received code carries its text with it (``loaded_code``), and no other text
is used for it.

IPython compiles a cell that begins with ``%%time`` without registering its text. Older interpreters discard
the text of a statement typed at the prompt, so it is taken from readline's history. The history lacks blank
and repeated lines, so lines are accepted only if they compile to the same code, positions included.

One thread at a time parses, without garbage collection: CPython 3.11 keeps the depth of the tree in one place
for all threads; parsing in between, also by a collected object, makes its check fail with a ``SystemError``.
"""

from __future__ import annotations

import ast
import codeop
import collections
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import linecache
import os
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Generic, TypeVar, cast

from nnsight_engine.tracing.loaded_code import FUTURE_FLAGS, SentFile

_one_at_a_time = threading.RLock()


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    """Parse a text, on one thread at a time and without garbage collection; see the module."""
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text, filename)
        finally:
            if collects:
                gc.enable()


def parameters(names: Sequence[str]) -> ast.arguments:
    """Return the parameters of a function, all positional and required."""
    arguments = [ast.arg(arg=name) for name in names]
    return ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])


class WithBlockNotFoundError(Exception):
    """The ``with`` statement of a trace was not found, or there is none; the message names the place."""


class ChangedSourceError(Exception):
    """A file, or a notebook's cell, has changed since the running code was loaded from it."""


_MAX_STATEMENT_LINES = 500
# Line starts without indentation that may continue the statement above.
_CLAUSES = ("else", "elif", "except", "finally", "case", ")", "]", "}")


def find_statement(history: Sequence[str], wanted: CodeType) -> str | None:
    """Return the newest statement of the lines typed at the prompt whose code is or contains ``wanted``.

    The oldest line is the first. readline leaves out blank and repeated lines, so these are guessed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings were shown when the statement ran
        for start in reversed(range(len(history))):
            if not history[start][:1].strip():
                continue  # blank or indented: no statement starts here
            for lines in _statements_from(history, start, wanted):
                for text in _with_missing_lines(lines, wanted):
                    if compiles_to(text, wanted, mode="single"):
                        return text
    return None


def compiles_to(text: str | ast.Module, wanted: CodeType, *, mode: str) -> bool:
    """Return whether ``wanted`` is, or is inside, the code of ``text``; ``mode`` is that of ``compile``."""
    flags = wanted.co_flags & FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        root = compile(text, wanted.co_filename, mode, flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    codes = [root]
    while codes:
        code = codes.pop()
        if code == wanted:  # compares names, constants, instructions and positions, but not the file name
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _statements_from(history: Sequence[str], start: int, wanted: CodeType) -> Iterator[Sequence[str]]:
    """Yield the lines of each complete statement that begins at ``start``, the shortest first."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= wanted.co_flags & FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for end in range(start + 1, min(len(history), start + _MAX_STATEMENT_LINES) + 1):
        lines = history[start:end]
        try:
            complete = compiler("\n".join(lines) + "\n", wanted.co_filename, "single") is not None
        except (SyntaxError, ValueError, OverflowError):
            return
        if complete:
            yield lines
            if end < len(history) and not history[end].startswith((" ", "\t", *_CLAUSES)):
                return


def _with_missing_lines(lines: Sequence[str], wanted: CodeType) -> Iterator[str]:
    """Yield the statement as recorded, then with lines that readline may have left out."""
    yield "\n".join(lines) + "\n"
    num_missing = _last_line(wanted) - len(lines)
    if 0 < num_missing < _MAX_STATEMENT_LINES:
        for index, line in itertools.product(range(1, len(lines)), ("", None)):
            missing = [lines[index - 1] if line is None else line] * num_missing
            yield "\n".join([*lines[:index], *missing, *lines[index:]]) + "\n"
        yield "\n".join([*lines, *[lines[-1]] * num_missing]) + "\n"


def _last_line(code: CodeType) -> int:
    ends = (end for _, end, _, _ in code.co_positions() if end is not None)
    nested = (_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max(itertools.chain(ends, nested), default=0)


def find_timed_cell(wanted: CodeType) -> str | None:
    """Return the body of the newest ``%%time`` cell whose code is or contains ``wanted``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings were shown when the cell ran
        for text in _bodies():
            if compiles_to(text, wanted, mode="exec"):
                return text
            # A last expression is compiled separately, so that its value can be shown.
            try:
                without_last = parse(text)
            except (SyntaxError, ValueError):
                continue
            del without_last.body[-1:]
            if compiles_to(without_last, wanted, mode="exec"):
                return text
    return None


def _bodies() -> Iterator[str]:
    """Yield the bodies of ``%%time`` cells, newest first, as IPython compiled them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    for entry in reversed(list(linecache.cache.values())):
        lines = entry[2] if len(entry) == 4 else []  # a shorter entry is a file that was not read yet
        if not any("run_cell_magic(" in line for line in lines):
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            for node in ast.walk(parse("".join(lines))):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr="run_cell_magic"),
                        args=[ast.Constant(value="time"), _, ast.Constant(value=str(body))],
                    ):
                        yield shell.transform_cell(body)


KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

_MAX_HISTORY_LINES = 1000
_MAX_STDIN_BYTES = 16 * 2**20
# Options of python whose value may be the next argument; -c gives the program, -m ends the search.
_OPTIONS_WITH_VALUE = "WX"


@dataclasses.dataclass(frozen=True)
class SourceText:
    """Source as it was compiled: line 1 of the code's positions is ``lines[0]``.

    Attributes:
        lines: The text, each line with its line end.
        tree: The syntax tree of the text. Shared between callers: copy before editing.
    """

    filename: str
    lines: Sequence[str]
    tree: ast.Module


class SourceReader:
    """Finds source text and caches it, within bounds; safe to share between threads."""

    def __init__(self, max_texts: int = 64, max_codes: int = 512) -> None:
        self._texts: _Recent[tuple[str, tuple[str, ...]], SourceText] = _Recent(max_texts)
        # By identity, since equal codes may come from different files; the code is referenced so that its id
        # stays valid.
        self._by_code: _Recent[int, tuple[CodeType, SourceText]] = _Recent(max_codes)

    def read(
        self,
        code: CodeType,
        globals_: dict[str, object],
        fits: Callable[[SourceText], bool] | None = None,
    ) -> SourceText | None:
        """Return the text that contains ``code``; None if it is not available or cannot be parsed.

        The ``__loader__`` of ``globals_`` finds modules that are not in a file. If no text ``fits``, it
        raises a ``ChangedSourceError``.
        """
        cached = self._by_code.get(id(code))
        if cached is not None and (fits is None or fits(cached[1])):
            return cached[1]
        name = code.co_filename
        if isinstance(name, SentFile) and name.tree is not None:
            return SourceText(name, name.lines, name.tree())  # not cached: it dies with the code
        num_read = 0
        for text in self._texts_of(code, globals_):
            num_read += 1
            if fits is None or fits(text):
                self._by_code.put(id(code), (code, text))
                return text
        if num_read:
            raise ChangedSourceError(
                f"{name!r} has changed since the running code was loaded: its text from line "
                f"{code.co_firstlineno} on is not that code. Restart, or import it again (run the cell "
                "again) and use the new definitions. If it was not edited, a tool has rewritten the code "
                "(typeguard's @typechecked, Streamlit's magic): move the trace into a function or a module "
                "that the tool does not rewrite."
            )
        return None

    def _texts_of(self, code: CodeType, globals_: dict[str, object]) -> Iterator[SourceText]:
        """Yield the texts that may contain the code: cached ones, then the file's current content."""
        name = code.co_filename
        lines = _find_lines(code, globals_)
        text = self._parsed(name, lines) if lines else None
        if text is not None:
            yield text
        for earlier in self._texts.values():
            if earlier.filename == name and earlier is not text:
                yield earlier
        linecache.checkcache(name)
        current_lines = _find_lines(code, globals_)
        if current_lines != lines:
            text = self._parsed(name, current_lines) if current_lines else None
            if text is not None:
                yield text

    def clear(self) -> None:
        """Drop all cached texts; files that have changed are read again."""
        self._texts.clear()
        self._by_code.clear()
        linecache.checkcache()

    def _parsed(self, filename: str, lines: Sequence[str]) -> SourceText | None:
        """Return the text with its tree, from the cache if it is there; None if it does not parse."""
        key = (filename, tuple(lines))
        text = self._texts.get(key)
        if text is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings were shown when the code was compiled
                    text = SourceText(*key, parse("".join(lines), filename))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
            self._texts.put(key, text)
        return text


def _find_lines(code: CodeType, globals_: dict[str, object]) -> Sequence[str]:
    """Return the lines that a code object's file name refers to, wherever they are kept; else none."""
    lines = linecache.getlines(code.co_filename, globals_)
    if not lines:
        # From Python 3.13 on, the prompt and -c register their text under the code rather than its file.
        by_code = getattr(linecache, "_getlines_from_code", None)
        lines = by_code(code) if by_code is not None else lines
    if lines:
        return lines
    if code.co_filename == "<timed exec>":
        return _lines(find_timed_cell(code))
    # Python 3.13 numbers some of these names, <stdin-3>.
    if code.co_filename.startswith("<string"):
        return _if_compiled_to(code, _command_text(sys.orig_argv))
    if code.co_filename.startswith(("<stdin", "<console")):
        return _if_compiled_to(code, _stdin_text()) or _lines(find_statement(_typed_lines(), code))
    return ()


def _if_compiled_to(code: CodeType, text: str | None) -> Sequence[str]:
    if text is None or not compiles_to(text, code, mode="exec"):
        return ()
    return _lines(text)


def _lines(text: str | None) -> Sequence[str]:
    """Split at line feeds only, as the compiler does; ``splitlines`` splits at several other characters."""
    if not text:
        return ()
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def _command_text(argv: Sequence[str]) -> str | None:
    """Return the program of ``python -c`` from the interpreter's arguments; None for other programs."""
    rest = iter(argv[1:])
    for argument in rest:
        if argument.startswith("--"):
            if argument == "--check-hash-based-pycs":
                next(rest, None)
            continue
        if not argument.startswith("-") or argument == "-":
            return None  # a script, or stdin; the remaining arguments are the program's
        for index, option in enumerate(argument[1:], start=2):
            if option == "c":
                text = argument[index:] or next(rest, None)
                return None if text is None else text.replace("\r\n", "\n").replace("\r", "\n")
            if option == "m":
                return None
            if option in _OPTIONS_WITH_VALUE:
                if not argument[index:]:
                    next(rest, None)
                break
    return None


def _stdin_text() -> str | None:
    """Return the whole of stdin if it is a file; a pipe cannot be read twice."""
    try:
        status = os.fstat(0)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_STDIN_BYTES:
            return None
        # With an explicit position: the program may be reading from the same descriptor.
        return importlib.util.decode_source(os.pread(0, status.st_size, 0))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _typed_lines() -> list[str]:
    """Return the latest lines of the prompt's history; importing readline here would change the prompt."""
    readline = sys.modules.get("readline")
    if readline is None:
        return []
    num_lines = cast("Callable[[], int]", readline.get_current_history_length)()
    item = cast("Callable[[int], str | None]", readline.get_history_item)
    return [item(index) or "" for index in range(max(1, num_lines - _MAX_HISTORY_LINES + 1), num_lines + 1)]


class _Recent(Generic[KeyT, ValueT]):
    """A cache that drops the entry least recently used; safe to share between threads."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: collections.OrderedDict[KeyT, ValueT] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: KeyT) -> ValueT | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def values(self) -> list[ValueT]:
        with self._lock:
            return list(self._entries.values())

    def put(self, key: KeyT, value: ValueT) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
