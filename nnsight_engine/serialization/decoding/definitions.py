"""Makers of functions, classes, modules, cells and blocks, for policies that allow source.

The code's globals are those of a namespace of this message, because CPython gives code whose globals lack
``__builtins__`` the reader's own builtins.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from nnsight_engine.serialization.decoding.decoder import MISSING, Decoder, Maker
from nnsight_engine.serialization.limits import Check, DecodeError
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.source.fragments import (
    FUTURE_FLAGS,
    OURS,
    WHOLE_LINES,
    SourceFragment,
    compile_class,
    compile_function,
    statement_at,
)
from nnsight_engine.serialization.source.import_resolution import RECEIVED
from nnsight_engine.serialization.source.received_code import CodeCache, compile_received, show
from nnsight_engine.tracing.blocks import Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.loaded_code import LinesFrom, SentFile
from nnsight_engine.tracing.source_text import SourceText
from nnsight_engine.tracing.tracer import Info

_LONGEST_SHOWN = 200
_MODULES = threading.RLock()
"""Held while ``sys.modules`` has a namespace of a message; it is the process's."""
_FIELD_TYPES: tuple[Any, ...] = (str, str, int, int, str, str, (str, type(None)), int)


def refuse_source(decoder: Decoder) -> None:
    """Raise a ``DecodeError`` if the policy allows data only."""
    if not decoder.policy.allow_source:
        raise DecodeError("the message holds code, and this side takes data alone")


def fragment_of(decoder: Decoder, parts: Any) -> SourceFragment:
    """Return the fragment; raise a ``DecodeError`` if its fields are malformed or exceed a limit."""
    if not isinstance(parts, tuple) or len(parts) != len(_FIELD_TYPES):
        raise DecodeError("the message is broken: a source fragment lacks parts")
    if not all(isinstance(part, kind) for part, kind in zip(parts, _FIELD_TYPES, strict=True)):
        raise DecodeError("the message is broken: a source fragment has parts of other types")
    fragment = SourceFragment(*parts)
    _check_names(decoder, fragment)
    if fragment.flags & ~FUTURE_FLAGS:
        raise DecodeError(
            f"{fragment.qualname}, {fragment.filename}, line {fragment.line}, uses a feature from "
            f"__future__ that this side's Python does not have{decoder.between_versions}"
        )
    if not 1 <= fragment.line <= decoder.limits.max_lines or not WHOLE_LINES <= fragment.column < 2**20:
        raise DecodeError(f"a source fragment claims line {fragment.line} and column {fragment.column}")
    return fragment


def _check_names(decoder: Decoder, fragment: SourceFragment) -> None:
    most = decoder.limits.max_name_characters
    longest = max(map(len, (fragment.filename, fragment.name, fragment.qualname, fragment.class_name or "")))
    if longest > most:
        raise DecodeError(f"a name of a source fragment has {longest:,} characters and may have {most:,}")
    around = fragment.class_name
    if around is not None and (not around.isidentifier() or around.startswith(OURS)):
        raise DecodeError(f"the message is broken: no class is called {around!r}")


@contextlib.contextmanager
def compiling(decoder: Decoder, fragment: SourceFragment) -> Iterator[None]:
    """Convert syntax errors of a fragment to ``DecodeError``; the syntax may be of another Python version."""
    try:
        yield
    except SyntaxError as error:
        lines = fragment.text.split("\n")
        line = min(max(error.lineno or 0, fragment.line), fragment.line + len(lines) - 1)
        raise DecodeError(
            f"{fragment.qualname} cannot be compiled: {error.msg} in {fragment.filename}, line {line}: "
            f"`{lines[line - fragment.line].strip()[:_LONGEST_SHOWN]}`{decoder.between_versions}"
        ) from error


def globals_of(decoder: Decoder, module: Any) -> dict[str, Any]:
    """Return the globals of a namespace of this message; raise a ``DecodeError`` if it is not one."""
    if decoder.state.get(("namespace", id(module))) is not module:
        raise DecodeError("the message is broken: code has no namespace")
    found: dict[str, Any] = vars(module)
    return found


def bind_globals(globals_: dict[str, Any], names: Any, values: list[Any]) -> None:
    """Bind those globals of a namespace whose values are made already."""
    if not isinstance(names, tuple) or len(names) != len(values):
        raise DecodeError("the message is broken: globals have other names than values")
    globals_.update((name, value) for name, value in zip(names, values, strict=True) if value is not MISSING)


def cells_by_name(names: Any, cells: Any) -> dict[str, CellType]:
    found = dict(zip(names, cells, strict=True))
    if not all(isinstance(cell, CellType) for cell in found.values()):
        raise DecodeError("the message is broken: a variable has no cell")
    return found


def _namespace(decoder: Decoder, _index: int, parts: list[Any]) -> ModuleType:
    refuse_source(decoder)
    name, file, is_real = parts
    if is_real:
        module: ModuleType = decoder.import_name(name, "")
    else:
        module = ModuleType(name)
        vars(module).update(
            {"__builtins__": builtins, "__file__": file} if file else {"__builtins__": builtins}
        )
    decoder.state["namespace", id(module)] = module
    return module


def _make_function(decoder: Decoder, _index: int, parts: list[Any]) -> FunctionType:
    refuse_source(decoder)
    module, fields, names, cells = parts
    globals_ = globals_of(decoder, module)
    fragment = fragment_of(decoder, fields)
    by_name = cells_by_name(names, cells)
    with compiling(decoder, fragment):
        code = compile_received(compile_function, fragment, names, decoder.policy.check)
    closure = tuple(by_name[name] for name in code.co_freevars)
    return FunctionType(code, globals_, code.co_name, None, closure)


def _fill_function(_decoder: Decoder, value: FunctionType, parts: list[Any]) -> None:
    called, defaults, keyword_defaults, attributes, names, *values = parts
    if called is not MISSING:
        value.__name__, value.__qualname__, value.__module__ = called
    if defaults is not MISSING:
        value.__defaults__ = defaults
    if keyword_defaults is not MISSING:
        value.__kwdefaults__ = keyword_defaults
    if attributes is not MISSING and attributes:
        vars(value).update(attributes)
    if names is not MISSING:
        bind_globals(value.__globals__, names, values)


@contextlib.contextmanager
def _findable(module: ModuleType) -> Iterator[None]:
    """Have ``sys.modules`` lead to a namespace while a class of it is made, as dataclasses look there.

    Not for longer: the next message may be another sender's, with a module of the same name.
    """
    name = module.__name__
    with _MODULES:
        before = sys.modules.get(name)
        sys.modules[name] = module
        try:
            yield
        finally:
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before


def _make_class(decoder: Decoder, _index: int, parts: list[Any]) -> type:
    refuse_source(decoder)
    module, fields, names, cells, needed, values = parts
    globals_ = globals_of(decoder, module)
    fragment = fragment_of(decoder, fields)
    by_name = cells_by_name(names, cells)
    bind_globals(globals_, needed, list(values))
    with compiling(decoder, fragment):
        code = compile_received(compile_class, fragment, names, decoder.policy.check)
    closure = tuple(by_name[name] for name in code.co_freevars)
    with _findable(module):
        made = FunctionType(code, globals_, code.co_name, None, closure)()
    if not isinstance(made, type):
        raise DecodeError(f"{fragment.qualname} is a class there and {type(made).__name__} here")
    decoder.state["globals", id(made)] = globals_
    RECEIVED.add(made)
    return made


def _fill_class(decoder: Decoder, value: type, parts: list[Any]) -> None:
    attributes, names, *values = parts
    if attributes is not MISSING:
        for name, item in (attributes or {}).items():
            setattr(value, name, item)
    if names is not MISSING:
        bind_globals(decoder.state["globals", id(value)], names, values)


def _make_sent_module(decoder: Decoder, _index: int, parts: list[Any]) -> ModuleType:
    refuse_source(decoder)
    module: ModuleType = parts[0]
    globals_of(decoder, module)
    return module


def _fill_sent_module(_decoder: Decoder, value: ModuleType, parts: list[Any]) -> None:
    names, *values = parts
    if names is not MISSING:
        bind_globals(vars(value), names, values)


def _make_method(decoder: Decoder, _index: int, parts: list[Any]) -> MethodType:
    refuse_source(decoder)
    function, owner = parts
    return MethodType(function, owner)


def _make_member(decoder: Decoder, _index: int, parts: list[Any]) -> Any:
    refuse_source(decoder)
    owner, name = parts
    return getattr(owner, name)


def _make_cell(decoder: Decoder, _index: int, _parts: list[Any]) -> CellType:
    refuse_source(decoder)  # long chains of cells are freed by recursion
    return CellType()


def _fill_cell(_decoder: Decoder, value: CellType, parts: list[Any]) -> None:
    if parts:
        (value.cell_contents,) = parts


CODE_MAKERS: dict[NodeKind, Maker] = {
    NodeKind.CELL: Maker(_make_cell, num_first=0, fill=_fill_cell),
    NodeKind.NAMESPACE: Maker(_namespace),
    NodeKind.FUNCTION: Maker(_make_function, num_first=4, fill=_fill_function, partly=True, copies=True),
    NodeKind.CLASS: Maker(_make_class, num_first=6, fill=_fill_class, partly=True, copies=True),
    NodeKind.METHOD: Maker(_make_method),
    NodeKind.MEMBER: Maker(_make_member),
    NodeKind.SENT_MODULE: Maker(_make_sent_module, num_first=1, fill=_fill_sent_module, partly=True),
}


_CACHE: Final[CodeCache[Block]] = CodeCache(256)


def _make_block(decoder: Decoder, _index: int, parts: list[Any]) -> Info:
    refuse_source(decoder)
    module, fields, (item, first_argument), names, cells = parts
    if type(item) is not int or not isinstance(first_argument, str | None):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    globals_ = globals_of(decoder, module)
    variables = cells_by_name(names, cells)
    fragment = fragment_of(decoder, fields)
    with compiling(decoder, fragment):
        block = block_of(fragment, item, first_argument, frozenset(variables), decoder.policy.check)
    return Info(block, variables, None, globals_)


def block_of(
    fragment: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None = None,
) -> Block:
    """Return a statement's compiled block; cached, as it is often sent again with the next request."""
    block = _CACHE.get(
        (fragment, item, first_argument, variables, check),
        fragment.num_characters + len(first_argument or "") + sum(map(len, variables)),
        lambda: _compiled(fragment, item, first_argument, variables, check),
    )
    show(fragment)
    return block


def _compiled(
    fragment: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None,
) -> Block:
    statement = statement_at(fragment.text, fragment.line, fragment.filename)
    if not isinstance(statement, ast.With) or not 0 <= item < len(statement.items):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    lines, tree = LinesFrom(fragment.line, fragment.text), ast.Module(body=[statement], type_ignores=[])
    file = SentFile(fragment.filename, lines, lambda: tree)
    if check is not None:
        check(Nested(statement, item), fragment.filename)
    context = BlockContext(fragment.name, fragment.class_name, first_argument, fragment.flags & FUTURE_FLAGS)
    return compile_block(Nested(statement, item), SourceText(file, lines, tree), variables, context)


def _fill_block(_decoder: Decoder, value: Info, parts: list[Any]) -> None:
    names, *values = parts
    if names is not MISSING:
        bind_globals(value.globals_, names, values)


BLOCK_MAKERS: dict[NodeKind, Maker] = {
    NodeKind.BLOCK: Maker(_make_block, num_first=5, fill=_fill_block, partly=True)
}
