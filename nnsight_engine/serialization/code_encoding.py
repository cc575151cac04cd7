"""Writers of code: by name if the other side has it, otherwise as source.

A function sent as source consists of its text, its defaults, the closure cells it shares with other
functions, and the globals that its code uses. All functions of one module share one namespace in a message,
so that they see each other's globals on the other side as they do here. A global that is not defined here is
left out: it may be assigned later, or never be reached.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization.data_encoding import write_attributes
from nnsight_engine.serialization.definitions import (
    NoSourceError,
    functions_of,
    piece_of_class,
    piece_of_function,
)
from nnsight_engine.serialization.encoder import Encoder, Writer
from nnsight_engine.serialization.identity_cache import IdentityCache
from nnsight_engine.serialization.import_resolution import is_importable, lookup, name_of
from nnsight_engine.serialization.node_kinds import NodeKind
from nnsight_engine.serialization.source_fragments import (
    SourceFragment,
    class_body,
    compile_class,
    compile_function,
    global_names,
    mentioned_in,
    named_bases,
    type_parameters,
)

_OF_A_MODULE = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
)
_OF_A_BODY = frozenset({"__class__", "__classdict__"})
_OVERLAID = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    dict,
    set,
    tuple,
    frozenset,
    torch.Tensor,
    type(None),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _WrittenFunction:
    """The parts of an encoded function that depend only on its code, so they can be cached.

    Attributes:
        piece: Its source.
        global_names: Names of module globals that its code uses.
        mentioned: All names and strings in its code.
    """

    piece: SourceFragment
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


_KNOWN: IdentityCache[CodeType, _WrittenFunction] = IdentityCache()
"""Recently written functions, by their code."""


def write_function(encoder: Encoder, index: int, value: FunctionType) -> None:
    """Write a function by name, as a member of a class that is sent itself, or as source."""
    name = name_of(value)
    if name is not None:
        encoder.emit(index, NodeKind.NAME, payload=":".join(name))
        return
    owner = _owner_of(value)
    if owner is not None:
        _write_member(encoder, index, owner, value.__name__)
        return
    try:
        written = _written_function(value.__code__, value.__globals__)
    except (NoSourceError, SyntaxError) as error:
        encoder.refuse(index, value, str(error))
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    attributes = {key: item for key, item in vars(value).items() if key != "__signature__"}
    children = [
        *_source(encoder, index, value.__globals__, written.piece, cells),
        encoder.node((value.__name__, value.__qualname__, value.__module__), index, ""),
        encoder.node(value.__defaults__, index, "its defaults"),
        encoder.node(value.__kwdefaults__, index, "its defaults"),
        encoder.node(attributes or None, index, "", writer=write_attributes if attributes else None),
    ]
    encoder.mentioned |= written.mentioned
    encoder.emit(
        index, NodeKind.FUNCTION, children + bindings(encoder, index, value.__globals__, written.global_names)
    )


def _written_function(code: CodeType, globals_: dict[str, Any]) -> _WrittenFunction:
    known = _KNOWN.get(code)
    if known is not None:
        return known
    piece = piece_of_function(code, globals_)
    made = compile_function(piece, code.co_freevars)
    return _KNOWN.put(code, _WrittenFunction(piece, tuple(global_names(made)), frozenset(mentioned_in(made))))


def write_class(encoder: Encoder, index: int, value: type) -> None:
    """Write a class by name, as a member of its enclosing class, or as source."""
    name = name_of(value)
    if name is not None:
        encoder.emit(index, NodeKind.NAME, payload=":".join(name))
        return
    parent, _, last = value.__qualname__.rpartition(".")
    owner = lookup(value.__module__, parent) if parent else None
    if isinstance(owner, type) and vars(owner).get(last) is value:
        _write_member(encoder, index, owner, last)
        return
    try:
        piece, body, globals_ = piece_of_class(value)
        cells = _cells_of_class(encoder, index, value, piece, body, globals_)
        maker = compile_class(piece, list(cells))
    except (NoSourceError, SyntaxError) as error:
        encoder.refuse(index, value, str(error))
    at_once = dict.fromkeys(global_names(maker, at_once=True))
    at_once |= dict.fromkeys(global_names(class_body(maker, piece.name), at_once=True))
    later = [name for name in global_names(maker) if name not in at_once]
    needed = {name: globals_[name] for name in at_once if name in globals_ and name not in _OF_A_MODULE}
    needed = {name: item for name, item in needed.items() if item is not value}
    changed = _changeable(value)
    children = [
        *_source(encoder, index, globals_, piece, cells),
        encoder.node(tuple(needed), index, ""),
        encoder.node(tuple(needed.values()), index, "what its body uses"),
        encoder.node(changed or None, index, "", writer=write_attributes if changed else None),
    ]
    encoder.mentioned |= mentioned_in(maker)
    encoder.emit(index, NodeKind.CLASS, children + bindings(encoder, index, globals_, later))


def bindings(encoder: Encoder, index: int, globals_: dict[str, Any], names: Iterable[str]) -> list[int]:
    """Return the nodes of the globals that code uses: one for the tuple of names, then one for each value."""
    found = bound_globals(globals_, names)
    values = [encoder.node(value, index, "global `{}`", name) for name, value in found.items()]
    return [encoder.node(tuple(found), index, ""), *values]


def bound_globals(globals_: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the globals in ``names`` that must be sent; none if the other side has the module."""
    if is_importable(str(globals_.get("__name__"))):
        return {}
    return {name: globals_[name] for name in names if name in globals_ and name not in _OF_A_MODULE}


def write_namespace(encoder: Encoder, index: int, value: dict[str, Any]) -> None:
    """Write the identity of a module's globals; their values are written by the code that uses them."""
    name = str(value.get("__name__", "__main__"))
    file = value.get("__file__")
    parts = (name, file if isinstance(file, str) else None, is_importable(name))
    encoder.emit(index, NodeKind.NAMESPACE, [encoder.node(part, index, "") for part in parts])


def _source(
    encoder: Encoder, index: int, globals_: dict[str, Any], piece: SourceFragment, cells: dict[str, CellType]
) -> list[int]:
    """Return the nodes that every source fragment has."""
    if len(piece.text) > encoder.limits.max_text_bytes:
        raise NoSourceError("its source is too long")
    return [
        encoder.node(globals_, index, "", writer=write_namespace),
        encoder.node(piece.parts(), index, ""),
        encoder.node(tuple(cells), index, ""),
        encoder.node(cells, index, "", writer=write_cells),
    ]


def write_cells(encoder: Encoder, index: int, value: dict[str, CellType]) -> None:
    """Write a tuple of cells; error messages name them by their variables."""
    encoder.emit(
        index,
        NodeKind.TUPLE,
        [encoder.node(cell, index, "variable `{}`", name) for name, cell in value.items()],
    )


def _write_cell(encoder: Encoder, index: int, value: CellType) -> None:
    held = content(value)
    encoder.emit(index, NodeKind.CELL, [] if held is UNBOUND else [encoder.node(held, index, "")])


def _write_method(encoder: Encoder, index: int, value: MethodType) -> None:
    name = getattr(value.__func__, "__name__", "")
    if getattr(type(value.__self__), name, None) is value.__func__:
        _write_member(encoder, index, value.__self__, name)
    else:
        parts = [
            encoder.node(value.__func__, index, ""),
            encoder.node(value.__self__, index, "what it is bound to"),
        ]
        encoder.emit(index, NodeKind.METHOD, parts)


def _write_member(encoder: Encoder, index: int, owner: Any, name: str) -> None:
    encoder.emit(index, NodeKind.MEMBER, [encoder.node(owner, index, ""), encoder.node(name, index, "")])


def _write_module(encoder: Encoder, index: int, value: ModuleType) -> None:
    if is_importable(value.__name__):
        encoder.emit(index, NodeKind.MODULE, payload=value.__name__)
        return
    children = [encoder.node(vars(value), index, "", writer=write_namespace)]
    sent: dict[str, int] = {}
    names = encoder.node(sent, index, "", writer=_write_keys)

    def finish() -> bool:
        """Send the attributes that any code of the message mentions; others may not be serializable."""
        new = sorted((encoder.mentioned & vars(value).keys()) - sent.keys() - _OF_A_MODULE)
        for name in new:
            sent[name] = encoder.node(vars(value)[name], index, "attribute `.{}`", name)
        _write_keys(encoder, names, sent)
        encoder.emit(index, NodeKind.SENT_MODULE, [children[0], names, *sent.values()])
        return bool(new)

    encoder.finishers.append(finish)


def _write_keys(encoder: Encoder, index: int, value: dict[str, int]) -> None:
    encoder.emit(index, NodeKind.TUPLE, [encoder.node(name, index, "") for name in value])


def _owner_of(function: FunctionType) -> type | None:
    """Return the class that the function is a member of, which is sent instead; None if there is none."""
    name = function.__name__
    parent = function.__qualname__.rpartition(".")[0]
    candidates = [lookup(function.__module__, parent)] if parent and "<" not in parent else []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if variable == "__class__":
            candidates.append(content(cell))
    for candidate in candidates:
        if (
            isinstance(candidate, type)
            and getattr(vars(candidate).get(name), "__func__", vars(candidate).get(name)) is function
        ):
            return candidate
    return None


def _cells_of_class(
    encoder: Encoder, index: int, kind: type, piece: SourceFragment, body: CodeType, globals_: dict[str, Any]
) -> dict[str, CellType]:
    """Return the cells of the class's free variables, recovered from its methods and its bases."""
    found: dict[str, CellType] = {}
    for function in functions_of(kind):
        found.update(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    own = type_parameters(piece)
    # For generic classes, Python adds internal variables whose names are not identifiers.
    wanted = [name for name in body.co_freevars if name.isidentifier() and name not in own | _OF_A_BODY]
    if "<locals>" in piece.qualname:
        bases = named_bases(piece)
        header = global_names(compile_class(piece, wanted), at_once=True)
        known = (globals_.keys() | vars(builtins).keys()) - found.keys() - bases.keys()
        wanted += [name for name in header if name not in wanted and name not in known]
        for name, at in bases.items():
            found.setdefault(name, CellType(vars(kind).get("__orig_bases__", kind.__bases__)[at]))
        found.setdefault(kind.__name__, CellType(kind))
    for name in wanted:
        if name not in found:
            encoder.refuse(
                index, kind, f"it uses `{name}` of the function around it, which is gone; use it in a method"
            )
    return {name: found[name] for name in wanted}


def _changeable(kind: type) -> dict[str, Any]:
    """Return the class's data attributes, which may have changed since its body ran."""
    if hasattr(kind, "__members__") or hasattr(kind, "__dataclass_fields__"):
        return {}
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not name.startswith("_abc_") and type(value) in _OVERLAID
    }


CODE_WRITERS: dict[type, Writer] = {
    FunctionType: write_function,
    MethodType: _write_method,
    ModuleType: _write_module,
    CellType: _write_cell,
}
"""The writer for objects of exactly this type. A class has its metaclass's type, see ``object_encoding``."""
