"""Namespaces, variables and source text: what code is sent with, and made from.

All functions of one module share one namespace in a message: CPython gives code whose globals lack
``__builtins__`` the reader's own. A global that is not defined in the sender is left out: it may be assigned
later, or never be reached.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from types import CellType, ModuleType
from typing import Any, Final

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization.graph import MISSING, Decoder, Encoder, Kind, Unsendable, Written, of_parts
from nnsight_engine.serialization.limits import DecodeError
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.objects import import_name
from nnsight_engine.serialization.source.fragments import FUTURE_FLAGS, OURS, WHOLE_LINES, SourceFragment
from nnsight_engine.serialization.source.import_resolution import is_importable

# Namespaces: a module's identity, whose globals are bound by the code that uses them.

MODULE_ATTRIBUTES: Final = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
)
"""Globals that every module has, which are never sent."""


def bound_globals(globals_: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the globals in ``names`` that must be sent; none if the other side has the module."""
    if is_importable(str(globals_.get("__name__"))):
        return {}
    return {name: globals_[name] for name in names if name in globals_ and name not in MODULE_ATTRIBUTES}


def bindings(encoder: Encoder, globals_: dict[str, Any], names: Iterable[str]) -> list[int]:
    """Return the nodes of the globals that code uses: one for the tuple of names, then one for each value."""
    bound = bound_globals(globals_, names)
    values = [encoder.node(value, "global `{}`", name) for name, value in bound.items()]
    return [encoder.node(tuple(bound)), *values]


def bind_globals(globals_: dict[str, Any], names: Any, values: list[Any]) -> None:
    """Bind those globals of a namespace whose values are made already."""
    if names is MISSING:
        return
    if not isinstance(names, tuple) or len(names) != len(values):
        raise DecodeError("the message is broken: globals have other names than values")
    globals_.update((name, value) for name, value in zip(names, values, strict=True) if value is not MISSING)


def write_namespace(encoder: Encoder, value: dict[str, Any]) -> Written:
    name, file = str(value.get("__name__", "__main__")), value.get("__file__")
    parts = (name, file if isinstance(file, str) else None, is_importable(name))
    return NodeKind.NAMESPACE, encoder.nodes(parts)


def _make_namespace(decoder: Decoder, parts: list[Any]) -> ModuleType:
    """Return the module whose globals code uses: the installed one, or a new one for the user's own."""
    name, file, is_real = parts
    if is_real:
        module: ModuleType = import_name(decoder, name, "")
    else:
        module = ModuleType(name)
        vars(module).update({"__builtins__": builtins, **({"__file__": file} if file else {})})
    decoder.state["namespace", id(module)] = module
    return module


def globals_of(decoder: Decoder, module: Any) -> dict[str, Any]:
    """Return the globals of a namespace of this message; raise a ``DecodeError`` if it is not one."""
    if decoder.state.get(("namespace", id(module))) is not module:
        raise DecodeError("the message is broken: code has no namespace")
    globals_: dict[str, Any] = vars(module)
    return globals_


def _write_module(encoder: Encoder, value: ModuleType) -> Written:
    """Write a module by name if the other side has it; else its namespace, and attributes at the end."""
    if is_importable(value.__name__):
        return NodeKind.MODULE, value.__name__
    index, sent = encoder.index, dict[str, int]()
    namespace = encoder.node(vars(value), writer=write_namespace)
    names = encoder.node(sent, writer=_write_names)

    def finish() -> bool:
        """Send the attributes that any code of the message mentions; others may not be serializable."""
        new = sorted((encoder.mentioned & vars(value).keys()) - sent.keys() - MODULE_ATTRIBUTES)
        for name in new:
            sent[name] = encoder.node(vars(value)[name], "attribute `.{}`", name)
        encoder.emit(names, *_write_names(encoder, sent))
        encoder.emit(index, NodeKind.SENT_MODULE, [namespace, names, *sent.values()])
        return bool(new)

    encoder.at_the_end(finish)
    return NodeKind.SENT_MODULE, ()


def _write_names(encoder: Encoder, value: dict[str, int]) -> Written:
    return NodeKind.TUPLE, encoder.nodes(value)


def _make_sent_module(decoder: Decoder, parts: list[Any]) -> ModuleType:
    module: ModuleType = parts[0]
    globals_of(decoder, module)
    return module


def _fill_sent_module(_decoder: Decoder, value: ModuleType, parts: list[Any]) -> None:
    names, *values = parts
    bind_globals(vars(value), names, values)


# Variables.


def write_cells(encoder: Encoder, value: dict[str, CellType]) -> Written:
    return NodeKind.TUPLE, [encoder.node(cell, "variable `{}`", name) for name, cell in value.items()]


def _write_cell(encoder: Encoder, value: CellType) -> Written:
    contents = content(value)
    return NodeKind.CELL, () if contents is UNBOUND else [encoder.node(contents)]


def _fill_cell(_decoder: Decoder, value: CellType, parts: list[Any]) -> None:
    if parts:
        (value.cell_contents,) = parts


def cells_by_name(names: Any, cells: Any) -> dict[str, CellType]:
    by_name = dict(zip(names, cells, strict=True))
    if not all(isinstance(cell, CellType) for cell in by_name.values()):
        raise DecodeError("the message is broken: a variable has no cell")
    return by_name


# Source.


_LONGEST_SHOWN: Final = 200
_FIELD_TYPES: Final[tuple[Any, ...]] = (str, str, int, int, str, str, (str, type(None)), int)


def write_source(
    encoder: Encoder, globals_: dict[str, Any], fragment: SourceFragment, cells: dict[str, CellType]
) -> list[int]:
    """Return the nodes that code is made from: its namespace, its source, and its variables."""
    if len(fragment.text) > encoder.limits.max_text_bytes:
        raise Unsendable("its source is too long")
    return [
        encoder.node(globals_, writer=write_namespace),
        encoder.node(tuple(fragment)),
        encoder.node(tuple(cells)),
        encoder.node(cells, writer=write_cells),
    ]


def fragment_of(decoder: Decoder, parts: Any) -> SourceFragment:
    """Return the fragment; raise a ``DecodeError`` if its fields are malformed or exceed a limit."""
    if not isinstance(parts, tuple) or len(parts) != len(_FIELD_TYPES):
        raise DecodeError("the message is broken: a source fragment lacks parts")
    if not all(isinstance(part, kind) for part, kind in zip(parts, _FIELD_TYPES, strict=True)):
        raise DecodeError("the message is broken: a source fragment has parts of other types")
    fragment = SourceFragment(*parts)
    max_characters, class_name = decoder.limits.max_name_characters, fragment.class_name
    longest = max(map(len, (fragment.filename, fragment.name, fragment.qualname, class_name or "")))
    if longest > max_characters:
        raise DecodeError(
            f"a name of a source fragment has {longest:,} characters and may have {max_characters:,}"
        )
    if class_name is not None and (not class_name.isidentifier() or class_name.startswith(OURS)):
        raise DecodeError(f"the message is broken: no class is called {class_name!r}")
    if fragment.flags & ~FUTURE_FLAGS:
        raise DecodeError(
            f"{fragment.qualname}, {fragment.filename}, line {fragment.line}, uses a feature from "
            f"__future__ that this side's Python does not have{decoder.between_versions}"
        )
    if not 1 <= fragment.line <= decoder.limits.max_lines or not WHOLE_LINES <= fragment.column < 2**20:
        raise DecodeError(f"a source fragment claims line {fragment.line} and column {fragment.column}")
    return fragment


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


SCOPE_KINDS: Final = (
    Kind(
        NodeKind.MODULE,
        (ModuleType,),
        _write_module,
        bases=(ModuleType,),
        make=lambda decoder, name: import_name(decoder, name, ""),
    ),
    Kind(
        NodeKind.CELL,
        (CellType,),
        _write_cell,
        first=(),
        make=of_parts(CellType),
        fill=_fill_cell,
        is_code=True,  # long chains of cells are freed by recursion
    ),
    Kind(NodeKind.NAMESPACE, first=(object,) * 3, make=_make_namespace, is_code=True),
    Kind(
        NodeKind.SENT_MODULE,
        first=(object,),
        make=_make_sent_module,
        fill=_fill_sent_module,
        partly=True,
        is_code=True,
    ),
)
