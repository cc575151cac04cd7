"""Writers of code: by name if the other side has it, otherwise as source with its cells and used globals.

All functions of one module share one namespace in a message. A global that is not defined here is left out:
it may be assigned later, or never be reached. A traced block is sent as the whole lines of its ``with``
statement: nested blocks are compiled from them, at the sender's columns.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Protocol

import torch

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization.encoding.data import write_attributes
from nnsight_engine.serialization.encoding.encoder import Encoder, IdentityCache, Writer
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.source.fragments import (
    WHOLE_LINES,
    SourceFragment,
    compile_class,
    compile_function,
    global_names,
    mentioned_in,
    named_bases,
    nested_code,
    statement_at,
    type_parameters,
)
from nnsight_engine.serialization.source.import_resolution import is_importable, lookup, name_of
from nnsight_engine.serialization.source.loaded_source import (
    NoSourceError,
    fragment_of_class,
    fragment_of_function,
    functions_of,
)
from nnsight_engine.tracing.blocks import HELPERS, Block
from nnsight_engine.tracing.counted_stores import BIND
from nnsight_engine.tracing.loaded_code import sent_name
from nnsight_engine.tracing.tracer import Info

MODULE_ATTRIBUTES: Final = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
)
"""Globals that every module has, which are never sent."""


def bindings(encoder: Encoder, index: int, globals_: dict[str, Any], names: Iterable[str]) -> list[int]:
    """Return the nodes of the globals that code uses: one for the tuple of names, then one for each value."""
    found = bound_globals(globals_, names)
    values = [encoder.node(value, index, "global `{}`", name) for name, value in found.items()]
    return [encoder.node(tuple(found), index, ""), *values]


def bound_globals(globals_: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the globals in ``names`` that must be sent; none if the other side has the module."""
    if is_importable(str(globals_.get("__name__"))):
        return {}
    return {name: globals_[name] for name in names if name in globals_ and name not in MODULE_ATTRIBUTES}


def write_namespace(encoder: Encoder, index: int, value: dict[str, Any]) -> None:
    """Write the identity of a module's globals; their values are written by the code that uses them."""
    name = str(value.get("__name__", "__main__"))
    file = value.get("__file__")
    parts = (name, file if isinstance(file, str) else None, is_importable(name))
    encoder.emit(index, NodeKind.NAMESPACE, [encoder.node(part, index, "") for part in parts])


def write_cells(encoder: Encoder, index: int, value: dict[str, CellType]) -> None:
    encoder.emit(
        index,
        NodeKind.TUPLE,
        [encoder.node(cell, index, "variable `{}`", name) for name, cell in value.items()],
    )


def write_cell(encoder: Encoder, index: int, value: CellType) -> None:
    held = content(value)
    encoder.emit(index, NodeKind.CELL, [] if held is UNBOUND else [encoder.node(held, index, "")])


def write_module(encoder: Encoder, index: int, value: ModuleType) -> None:
    if is_importable(value.__name__):
        encoder.emit(index, NodeKind.MODULE, payload=value.__name__)
        return
    children = [encoder.node(vars(value), index, "", writer=write_namespace)]
    sent: dict[str, int] = {}
    names = encoder.node(sent, index, "", writer=_write_keys)

    def finish() -> bool:
        """Send the attributes that any code of the message mentions; others may not be serializable."""
        new = sorted((encoder.mentioned & vars(value).keys()) - sent.keys() - MODULE_ATTRIBUTES)
        for name in new:
            sent[name] = encoder.node(vars(value)[name], index, "attribute `.{}`", name)
        _write_keys(encoder, names, sent)
        encoder.emit(index, NodeKind.SENT_MODULE, [children[0], names, *sent.values()])
        return bool(new)

    encoder.finishers.append(finish)


def _write_keys(encoder: Encoder, index: int, value: dict[str, int]) -> None:
    encoder.emit(index, NodeKind.TUPLE, [encoder.node(name, index, "") for name in value])


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
    fragment: SourceFragment
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


_WRITTEN: IdentityCache[CodeType, _WrittenFunction] = IdentityCache()
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
        *_source(encoder, index, value.__globals__, written.fragment, cells),
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
    known = _WRITTEN.get(code)
    if known is not None:
        return known
    fragment = fragment_of_function(code, globals_)
    made = compile_function(fragment, code.co_freevars)
    return _WRITTEN.put(
        code, _WrittenFunction(fragment, tuple(global_names(made)), frozenset(mentioned_in(made)))
    )


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
        fragment, body, globals_ = fragment_of_class(value)
        cells = _cells_of_class(encoder, index, value, fragment, body, globals_)
        maker = compile_class(fragment, list(cells))
    except (NoSourceError, SyntaxError) as error:
        encoder.refuse(index, value, str(error))
    at_once = dict.fromkeys(global_names(maker, at_once=True))
    at_once |= dict.fromkeys(global_names(nested_code(maker, fragment.name), at_once=True))
    at_once |= dict.fromkeys(name for name in _names_in_annotations(value) if _has_name(globals_.get(name)))
    later = [name for name in global_names(maker) if name not in at_once]
    needed = {name: globals_[name] for name in at_once if name in globals_ and name not in MODULE_ATTRIBUTES}
    needed = {name: item for name, item in needed.items() if item is not value}
    changed = _changeable(value)
    children = [
        *_source(encoder, index, globals_, fragment, cells),
        encoder.node(tuple(needed), index, ""),
        encoder.node(tuple(needed.values()), index, "what its body uses"),
        encoder.node(changed or None, index, "", writer=write_attributes if changed else None),
    ]
    encoder.mentioned |= mentioned_in(maker)
    encoder.emit(index, NodeKind.CLASS, children + bindings(encoder, index, globals_, later))


def _names_in_annotations(kind: type) -> list[str]:
    """Return the names in annotations that are texts, in which decorators and base classes look them up."""
    given = vars(kind).get("__annotations__", {})
    texts = given.values() if isinstance(given, dict) else ()
    found: list[str] = []
    for text in texts:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a text need not be code
            if isinstance(text, str):
                tree = ast.parse(text.strip(), mode="eval")
                found += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return found


def _has_name(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return is_importable(value.__name__)
    return value is dataclasses.KW_ONLY or name_of(value) is not None


def _source(
    encoder: Encoder,
    index: int,
    globals_: dict[str, Any],
    fragment: SourceFragment,
    cells: dict[str, CellType],
) -> list[int]:
    if len(fragment.text) > encoder.limits.max_text_bytes:
        raise NoSourceError("its source is too long")
    return [
        encoder.node(globals_, index, "", writer=write_namespace),
        encoder.node(fragment.parts(), index, ""),
        encoder.node(tuple(cells), index, ""),
        encoder.node(cells, index, "", writer=write_cells),
    ]


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
    encoder: Encoder,
    index: int,
    kind: type,
    fragment: SourceFragment,
    body: CodeType,
    globals_: dict[str, Any],
) -> dict[str, CellType]:
    """Return the cells of the class's free variables, recovered from its methods and its bases."""
    found: dict[str, CellType] = {}
    for function in functions_of(kind):
        found.update(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    own = type_parameters(fragment)
    # For generic classes, Python adds internal variables whose names are not identifiers.
    wanted = [name for name in body.co_freevars if name.isidentifier() and name not in own | _OF_A_BODY]
    if "<locals>" in fragment.qualname:
        bases = named_bases(fragment)
        header = global_names(compile_class(fragment, wanted), at_once=True)
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
    ModuleType: write_module,
    CellType: write_cell,
}
"""The writer for objects of exactly this type. A class has its metaclass's type, see ``objects``."""


class _Sent(Protocol):
    @property
    def info(self) -> Info: ...

    @property
    def cells(self) -> Mapping[str, CellType]: ...

    @property
    def left_out(self) -> frozenset[str]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenBlock:
    """The parts of an encoded block that depend on its code; ``item`` is the index of its ``with`` item."""

    fragment: tuple[Any, ...]
    item: int
    variables: tuple[str, ...]
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


_WRITTEN_BLOCKS: IdentityCache[Block, WrittenBlock] = IdentityCache()
"""Recently written blocks: a loop sends the same block repeatedly."""


def write_sent_block(encoder: Encoder, index: int, value: Any) -> None:
    sent: _Sent = value
    block, globals_ = sent.info.block, sent.info.globals_
    written = written_block(block)
    cells = {name: sent.cells.get(name) or CellType() for name in written.variables}
    encoder.mentioned |= written.mentioned
    parts = [
        encoder.node(globals_, index, "", writer=write_namespace),
        encoder.node(written.fragment, index, ""),
        encoder.node((written.item, block.context.first_argument), index, ""),
        encoder.node(tuple(cells), index, ""),
        encoder.node(cells, index, "", writer=write_cells),
    ]
    names = [name for name in written.global_names if name not in sent.left_out]
    encoder.emit(index, NodeKind.BLOCK, parts + bindings(encoder, index, globals_, names))


def written_block(block: Block) -> WrittenBlock:
    known = _WRITTEN_BLOCKS.get(block)
    if known is not None:
        return known
    fragment, item = _statement_of(block)
    written = WrittenBlock(
        fragment=fragment.parts(),
        item=item,
        variables=tuple(_variables_of(block)),
        global_names=tuple(global_names(block.code)),
        mentioned=frozenset(mentioned_in(block.code)),
    )
    return _WRITTEN_BLOCKS.put(block, written)


def _variables_of(block: Block) -> list[str]:
    helpers = {BIND, *HELPERS}
    return sorted({*block.code.co_freevars, *block.stored} - helpers)


def _statement_of(block: Block) -> tuple[SourceFragment, int]:
    node, source, context = block.origin.node, block.source, block.context
    text = "".join(source.lines[node.lineno - 1 : node.end_lineno])
    fragment = SourceFragment(
        filename=sent_name(source.filename), text=text, line=node.lineno, column=WHOLE_LINES,
        name=context.name, qualname=context.name, class_name=context.class_name, flags=context.flags,
    )  # fmt: skip
    whole = statement_at(text, node.lineno, source.filename)
    # A block in `with A, B:` may hold the statement without its first items.
    num_before = len(whole.items) - len(node.items) if isinstance(whole, ast.With) else 0
    return fragment, num_before + block.origin.item
