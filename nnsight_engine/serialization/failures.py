"""Transport of errors, so that an error in a block looks to the client as if it had been raised locally.

A received traceback entry needs a frame, which a one-line function compiled at its position makes. No file is
opened because a sender gave its name, and no text of another sender with the same file name is shown.

A received error's type is looked up among the loaded types that are known to be safe to instantiate. Any
other type is replaced by a new type of the same name, derived from its nearest builtin base. Installation
paths are removed from texts that leave a server: clients do not see its file system.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import linecache
import os
import re
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

import msgspec

from nnsight_engine.serialization.limits import DecodeError
from nnsight_engine.serialization.source.received_code import SOURCE_CACHE
from nnsight_engine.tracing.frames import is_ours
from nnsight_engine.tracing.loaded_code import LinesFrom, SentFile, sent_name

_FOLDERS: Final = ("stdlib", "platstdlib", "purelib", "platlib", "scripts", "data")
_PACKAGES: Final = Path(__file__).parents[2]


@cache
def _installed() -> re.Pattern[str]:
    """Return a pattern for the start of paths to installed packages and to ours, cut off from texts."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in _FOLDERS}
    folders |= {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable))}
    folders |= {os.path.realpath(folder) for folder in folders}
    installed = sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
    own_packages = rf"{re.escape(str(_PACKAGES))}/(?=(?:nnsight_engine|app|api_schemas)/)"
    installed_paths = f"(?:{'|'.join(map(re.escape, installed))})/(?:lib/python[\\d.]+/)?(?:site-packages/)?"
    return re.compile(rf"(?<![\w.-])(?:{installed_paths}|{own_packages})")


def without_server_paths(text: str) -> str:
    """Return the text with files of Python and packages named like ``torch/functional.py``."""
    return _installed().sub("", text) if "/" in text else text


_MAX_FRAMES = 64
_MAX_CHAIN = 8
_MAX_TEXT = 100_000
_MAX_LINE = 1_000_000
_TRUSTED_PACKAGES = frozenset({"nnsight_engine", "torch"})
Plain = str | int | float | bool | None


class _TracebackEntry(msgspec.Struct):
    file: str
    line: int
    name: str
    source: str = ""
    end_line: int | None = None
    column: int | None = None
    end_column: int | None = None


class _Failure(msgspec.Struct):
    module: str
    name: str
    message: str
    bases: list[str]
    args: list[Plain]
    attributes: dict[str, Plain]
    notes: list[str]
    entries: list[_TracebackEntry]
    cause: _Failure | None = None
    context: _Failure | None = None
    hides_context: bool = False


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data, for JSON or ``encode``, without traceback entries of this package."""
    return dict(msgspec.to_builtins(_failure_of(error, _MAX_CHAIN)))


def restore_error(plain: Any) -> BaseException:
    """Return the error that ``encode_error`` described, or raise a ``DecodeError``."""
    try:
        failure = msgspec.convert(plain, _Failure)
        return _restored(failure, _MAX_CHAIN)
    except (msgspec.ValidationError, RecursionError, ValueError) as error:
        raise DecodeError(f"this describes no error: {error}") from error


def _failure_of(error: BaseException, num_left: int) -> _Failure:
    """Describe an error, with up to ``num_left`` levels of causes or contexts below it."""
    kind = type(error)
    cause, context = error.__cause__, error.__context__
    return _Failure(
        module=kind.__module__,
        name=kind.__qualname__,
        message=_text(error),
        bases=[base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"],
        args=[_plain(argument) for argument in error.args[:_MAX_CHAIN]],
        attributes=_attributes(error),
        notes=[without_server_paths(str(note)[:_MAX_TEXT]) for note in getattr(error, "__notes__", ())],
        entries=_entries_of(error.__traceback__),
        cause=_failure_of(cause, num_left - 1) if cause is not None and num_left else None,
        context=_failure_of(context, num_left - 1)
        if context is not None and cause is None and num_left
        else None,
        hides_context=error.__suppress_context__,
    )


def _text(error: BaseException) -> str:
    try:
        return without_server_paths(str(error)[:_MAX_TEXT])
    except Exception as failed:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<{type(error).__name__}, whose text is not available: {type(failed).__name__}>"


def _plain(value: Any) -> Plain:
    """Return a value that JSON has; other values become their ``repr``, of limited length."""
    if value is None or type(value) in {bool, float}:
        return value  # type: ignore[no-any-return] # of these types
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    try:
        return without_server_paths((value if type(value) is str else repr(value))[:_MAX_TEXT])
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<{type(value).__name__}>"


def _attributes(error: BaseException) -> dict[str, Plain]:
    """Return public attributes of plain types; ``name`` of builtin errors is not in ``vars``."""
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    if isinstance(error, (NameError, AttributeError, ImportError)):
        attributes["name"] = error.name
    plain_values = {
        name: value for name, value in attributes.items() if type(value) in {str, int, float, bool}
    }
    return {name: _plain(value) for name, value in plain_values.items()}


def _entries_of(tb: TracebackType | None) -> list[_TracebackEntry]:
    """Return entries outside of this package; of too many, the first and the last ones."""
    entries = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if not is_ours(code.co_filename):
            entries.append(_entry_of(tb, code))
        tb = tb.tb_next
    half = _MAX_FRAMES // 2
    return entries if len(entries) <= _MAX_FRAMES else [*entries[:half], *entries[-half:]]


def _entry_of(tb: TracebackType, code: CodeType) -> _TracebackEntry:
    """Describe an entry: its line's text, and the position of its instruction, two bytes of code each."""
    positions = itertools.islice(code.co_positions(), max(tb.tb_lasti, 0) // 2, None)
    _, end_line, column, end_column = next(positions, (None,) * 4)
    file = code.co_filename
    if isinstance(file, SentFile):
        text = file.line(tb.tb_lineno)
    else:
        text = linecache.getline(file, tb.tb_lineno, tb.tb_frame.f_globals)
    return _TracebackEntry(
        file=without_server_paths(sent_name(file)),
        line=tb.tb_lineno, name=code.co_name, source=text.rstrip("\n")[:_MAX_TEXT],
        end_line=end_line, column=column, end_column=end_column,
    )  # fmt: skip


def _restored(failure: _Failure, num_left: int) -> BaseException:
    """Return the error with its notes, traceback, and up to ``num_left`` levels of causes or contexts."""
    error = _error_of(failure)
    for note in failure.notes:
        BaseException.add_note(error, note)  # the description may set an attribute of this name
    if num_left:
        error.__context__ = _restored(failure.context, num_left - 1) if failure.context is not None else None
        if failure.cause is not None:
            error.__cause__ = _restored(failure.cause, num_left - 1)
    error.__suppress_context__ = failure.hides_context
    return BaseException.with_traceback(error, _traceback_of(failure.entries[:_MAX_FRAMES]))


def _error_of(failure: _Failure) -> BaseException:
    """Return an error of the described type, or of a new type with its name if this side lacks it."""
    kind = _known_type(failure)
    if kind is not None:
        error = _instance(kind, failure)
        if error is not None and _text(error) == failure.message:
            return error
    # The nearest base may not accept these arguments, so others are tried.
    for base in filter(None, map(_builtin_type, [*failure.bases, "RuntimeError"])):
        error = _instance(_named_after(failure, base), failure)
        if error is not None:
            return error
    return RuntimeError(f"{failure.name}: {failure.message}")


def _named_after(failure: _Failure, base: type[BaseException]) -> type[BaseException]:
    """Return a new type with a failure's name and text, derived from a builtin base."""
    body = {
        "__module__": failure.module,
        "__qualname__": failure.name,
        "__doc__": "An error of a type that this side does not have.",
        "__str__": lambda _self: failure.message,
    }
    name = _printable(failure.name.rpartition(".")[2]) or base.__name__
    return type(name, (base,), body)


def _printable(text: str) -> str:
    """Return a text without NUL and lone surrogates, which names in Python may not have."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def _known_type(failure: _Failure) -> type[BaseException] | None:
    """Return the type if it is loaded and belongs to Python, torch or this package; nothing is imported."""
    if failure.module == "builtins":
        return _builtin_type(failure.name)
    if failure.module.partition(".")[0] not in _TRUSTED_PACKAGES:
        return None
    # Not by getattr, since a module's own ``__getattr__`` may import others.
    known = getattr(sys.modules.get(failure.module), "__dict__", {}).get(failure.name)
    return known if isinstance(known, type) and issubclass(known, Exception) else None


def _builtin_type(name: str) -> type[BaseException] | None:
    builtin = getattr(builtins, name, None)
    if not isinstance(builtin, type) or not issubclass(builtin, Exception):
        return None  # not an exception, or one that would end the receiving program
    return None if issubclass(builtin, ExceptionGroup) else builtin


def _instance(kind: type[BaseException], failure: _Failure) -> BaseException | None:
    """Return an error of a type with the described arguments and attributes; None if it refuses them."""
    try:
        if kind.__init__ is BaseException.__init__ or kind.__module__ == "builtins":
            error = kind(*failure.args)
        else:  # its __init__ may need other arguments; its effect is in the attributes
            error = kind.__new__(kind, *failure.args)
            error.args = tuple(failure.args)
    except Exception:  # noqa: BLE001 - arguments were not plain data, or the type differs between versions
        return None
    for name, value in failure.attributes.items():
        if name != "args" and not name.startswith("_"):
            try:
                setattr(error, name, value)
            except (AttributeError, TypeError):
                continue
    return error


def _traceback_of(entries: list[_TracebackEntry]) -> TracebackType | None:
    """Return a traceback with these entries, outermost first, each with a frame of code that raises."""
    result: TracebackType | None = None
    for entry in reversed(entries):
        line = min(max(entry.line, 1), _MAX_LINE)
        if entry.source:
            SOURCE_CACHE.register(entry.file, line, entry.source, is_quoted=True)
        entered = _entered(_code_of(entry, line))
        result = TracebackType(result, entered.tb_frame, entered.tb_lasti, entered.tb_lineno)
    return result


def _code_of(entry: _TracebackEntry, line: int) -> CodeType:
    """Return code that raises at an entry's file, line and columns, under its function's name."""
    end = min(max(entry.end_line or line, line), _MAX_LINE)
    position: dict[str, Any] = {"lineno": line, "end_lineno": end, "col_offset": 0, "end_col_offset": 0}
    if entry.column is not None and entry.end_column is not None and 0 <= entry.column < _MAX_LINE:
        least_end = entry.column if end == line else 0
        position |= {
            "col_offset": entry.column,
            "end_col_offset": min(max(entry.end_column, least_end), _MAX_LINE),
        }
    body: list[ast.stmt] = [
        ast.Raise(exc=ast.Name(id="__nnsight_stop__", ctx=ast.Load(), **position), **position)
    ]
    file = SentFile(_printable(entry.file), LinesFrom(line, entry.source))
    code = compile(ast.Module(body=body, type_ignores=[]), file, "exec", dont_inherit=True)
    name = _printable(entry.name)
    return code.replace(co_name=name, co_qualname=name)


class _Stop(Exception):  # noqa: N818 - it does not signal an error
    pass


def _entered(code: CodeType) -> TracebackType:
    """Run code that raises ``_Stop``, and return the traceback entry with its frame."""
    try:
        FunctionType(code, {"__nnsight_stop__": _Stop, "__name__": "remote"})()
    except _Stop as stop:
        entry = stop.__traceback__
        if entry is not None and entry.tb_next is not None:
            return entry.tb_next
    raise AssertionError("code that raises does")
