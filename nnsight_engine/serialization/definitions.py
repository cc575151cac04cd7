"""Kinds of definitions, functions, methods and classes: by name if the other side has them, or as source."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from nnsight_engine.core.closure_cells import content
from nnsight_engine.serialization.data import write_attributes
from nnsight_engine.serialization.graph import MISSING, Decoder, Encoder, Kind, Unsendable, Written, of_parts
from nnsight_engine.serialization.limits import DecodeError
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.objects import write_name
from nnsight_engine.serialization.scopes import (
    MODULE_ATTRIBUTES,
    bind_globals,
    bindings,
    cells_by_name,
    compiling,
    fragment_of,
    globals_of,
    write_source,
)
from nnsight_engine.serialization.source.fragments import (
    SourceFragment,
    compile_class,
    compile_function,
    global_names,
    mentioned_in,
    named_bases,
    nested_code,
    type_parameters,
)
from nnsight_engine.serialization.source.import_resolution import RECEIVED, is_importable, lookup, name_of
from nnsight_engine.serialization.source.loaded_source import (
    NoSourceError,
    fragment_of_class,
    fragment_of_function,
    functions_of,
)
from nnsight_engine.serialization.source.received_code import CodeCache, Compiler, compile_received


class _Source(NamedTuple):
    """What is known of code to be sent: its text, the globals that it uses, and what it mentions."""

    fragment: SourceFragment
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


def _make_definer(
    decoder: Decoder, compiler: Compiler, globals_: dict[str, Any], source: list[Any]
) -> FunctionType:
    """Return a function whose code is compiled from a source, on the variables sent with it."""
    fields, names, cells = source
    fragment, by_name = fragment_of(decoder, fields), cells_by_name(names, cells)
    with compiling(decoder, fragment):
        code = compile_received(compiler, fragment, names, decoder.policy.check)
    return FunctionType(code, globals_, code.co_name, None, tuple(by_name[name] for name in code.co_freevars))


# Functions and methods.

_SOURCES: Final[CodeCache[tuple[CodeType, _Source]]] = CodeCache(256)
"""Recently written functions, by the identity of their code: equal code may come from different files."""


def _write_function(encoder: Encoder, value: FunctionType) -> Written:
    """Write a function by name, as a member of a class that is sent itself, or as source."""
    name_node = write_name(value)
    if name_node is not None:
        return name_node
    owner = _owner_of(value)
    if owner is not None:
        return _write_member(encoder, owner, value.__name__)
    code = value.__code__
    _, source = _SOURCES.get(id(code), 0, lambda: (code, _source_of(code, value.__globals__)))
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
    attributes = {key: item for key, item in vars(value).items() if key != "__signature__"}
    encoder.mentioned |= source.mentioned
    return NodeKind.FUNCTION, [
        *write_source(encoder, value.__globals__, source.fragment, cells),
        encoder.node((value.__name__, value.__qualname__, value.__module__)),
        encoder.node(value.__defaults__, "its defaults"),
        encoder.node(value.__kwdefaults__, "its defaults"),
        encoder.node(attributes or None, writer=write_attributes if attributes else None),
        *bindings(encoder, value.__globals__, source.global_names),
    ]


def _source_of(code: CodeType, globals_: dict[str, Any]) -> _Source:
    """Return a function's text with the globals and names of the code that it compiles to."""
    try:
        fragment = fragment_of_function(code, globals_)
        compiled = compile_function(fragment, code.co_freevars)
    except (NoSourceError, SyntaxError) as error:
        raise Unsendable(str(error)) from error
    return _Source(fragment, tuple(global_names(compiled)), frozenset(mentioned_in(compiled)))


def _owner_of(function: FunctionType) -> type | None:
    """Return the class that the function is a member of, which is sent instead; None if there is none."""
    name = function.__name__
    parent = function.__qualname__.rpartition(".")[0]
    candidates = [lookup(function.__module__, parent)] if parent and "<" not in parent else []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if variable == "__class__":
            candidates.append(content(cell))
    for candidate in candidates:
        if isinstance(candidate, type):
            member = vars(candidate).get(name)
            if getattr(member, "__func__", member) is function:
                return candidate
    return None


def _make_function(decoder: Decoder, parts: list[Any]) -> FunctionType:
    module, *source = parts
    return _make_definer(decoder, compile_function, globals_of(decoder, module), source)


def _fill_function(_decoder: Decoder, value: FunctionType, parts: list[Any]) -> None:
    """Set what is made by now beside the code; called again with more, as parts may refer back."""
    identity, defaults, keyword_defaults, attributes, names, *values = parts
    if identity is not MISSING:
        value.__name__, value.__qualname__, value.__module__ = identity
    if defaults is not MISSING:
        value.__defaults__ = defaults
    if keyword_defaults is not MISSING:
        value.__kwdefaults__ = keyword_defaults
    if attributes is not MISSING and attributes:
        vars(value).update(attributes)
    bind_globals(value.__globals__, names, values)


def _write_method(encoder: Encoder, value: MethodType) -> Written:
    """Write a bound method: as a member of its object, if it is one by its name, or as its two parts."""
    name = getattr(value.__func__, "__name__", "")
    if getattr(type(value.__self__), name, None) is value.__func__:
        return _write_member(encoder, value.__self__, name)
    return NodeKind.METHOD, [
        encoder.node(value.__func__),
        encoder.node(value.__self__, "what it is bound to"),
    ]


def _write_member(encoder: Encoder, owner: Any, name: str) -> Written:
    return NodeKind.MEMBER, encoder.nodes((owner, name))


# Classes.

_OF_A_BODY: Final = frozenset({"__class__", "__classdict__"})
_OVERLAID: Final = (
    bool, int, float, complex, str, bytes, list, dict, set, tuple, frozenset, torch.Tensor, type(None),
)  # fmt: skip
_MODULES: Final = threading.RLock()
"""Held while ``sys.modules`` has a namespace of a message; it is the process's."""


def _write_class(encoder: Encoder, value: type) -> Written:
    """Write a class by name, as a member of its enclosing class, or as source.

    Globals that its body uses are sent before it (``at_once``), those of its methods are bound later.
    """
    name_node = write_name(value)
    if name_node is not None:
        return name_node
    parent, _, own_name = value.__qualname__.rpartition(".")
    owner = lookup(value.__module__, parent) if parent else None
    if isinstance(owner, type) and vars(owner).get(own_name) is value:
        return _write_member(encoder, owner, own_name)
    try:
        fragment, body, globals_ = fragment_of_class(value)
        cells = _cells_of_class(value, fragment, body, globals_)
        maker = compile_class(fragment, list(cells))
    except (NoSourceError, SyntaxError) as error:
        raise Unsendable(str(error)) from error
    at_once = dict.fromkeys(global_names(maker, at_once=True))
    at_once |= dict.fromkeys(global_names(nested_code(maker, fragment.name), at_once=True))
    at_once |= dict.fromkeys(name for name in _names_in_annotations(value) if _has_name(globals_.get(name)))
    later = [name for name in global_names(maker) if name not in at_once]
    needed = {name: globals_[name] for name in at_once if name in globals_ and name not in MODULE_ATTRIBUTES}
    needed = {name: item for name, item in needed.items() if item is not value}
    changed = _changeable(value)
    encoder.mentioned |= mentioned_in(maker)
    return NodeKind.CLASS, [
        *write_source(encoder, globals_, fragment, cells),
        encoder.node(tuple(needed)),
        encoder.node(tuple(needed.values()), "what its body uses"),
        encoder.node(changed or None, writer=write_attributes if changed else None),
        *bindings(encoder, globals_, later),
    ]


def _names_in_annotations(kind: type) -> list[str]:
    """Return the names in annotations that are texts, in which decorators and base classes look them up."""
    by_name = vars(kind).get("__annotations__", {})
    texts = by_name.values() if isinstance(by_name, dict) else ()
    names: list[str] = []
    for text in texts:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a text need not be code
            if isinstance(text, str):
                tree = ast.parse(text.strip(), mode="eval")
                names += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return names


def _has_name(value: Any) -> bool:
    """Return whether the other side finds this object by name, so that sending it costs nothing."""
    if isinstance(value, ModuleType):
        return is_importable(value.__name__)
    return value is dataclasses.KW_ONLY or name_of(value) is not None


def _cells_of_class(
    kind: type, fragment: SourceFragment, body: CodeType, globals_: dict[str, Any]
) -> dict[str, CellType]:
    """Return the cells of the class's free variables, recovered from its methods and its bases."""
    cells: dict[str, CellType] = {}
    for function in functions_of(kind):
        cells.update(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    parameters = type_parameters(fragment)
    # For generic classes, Python adds internal variables whose names are not identifiers.
    wanted = [
        name for name in body.co_freevars if name.isidentifier() and name not in parameters | _OF_A_BODY
    ]
    if "<locals>" in fragment.qualname:
        bases = named_bases(fragment)
        header = global_names(compile_class(fragment, wanted), at_once=True)
        known = (globals_.keys() | vars(builtins).keys()) - cells.keys() - bases.keys()
        wanted += [name for name in header if name not in wanted and name not in known]
        for name, index in bases.items():
            cells.setdefault(name, CellType(vars(kind).get("__orig_bases__", kind.__bases__)[index]))
        cells.setdefault(kind.__name__, CellType(kind))
    for name in wanted:
        if name not in cells:
            raise Unsendable(f"it uses `{name}` of the function around it, which is gone; use it in a method")
    return {name: cells[name] for name in wanted}


def _changeable(kind: type) -> dict[str, Any]:
    """Return plain class variables, which may have been assigned since the body ran, to set them again."""
    if hasattr(kind, "__members__") or hasattr(kind, "__dataclass_fields__"):
        return {}
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not name.startswith("_abc_") and type(value) in _OVERLAID
    }


def _make_class(decoder: Decoder, parts: list[Any]) -> type:
    """Run a received class statement on its globals, and return the class; see ``_write_class``."""
    module, *source, needed, values = parts
    globals_ = globals_of(decoder, module)
    bind_globals(globals_, needed, list(values))
    define = _make_definer(decoder, compile_class, globals_, source)
    with _findable(module):
        new_class = define()
    if not isinstance(new_class, type):
        raise DecodeError(
            f"{SourceFragment(*source[0]).qualname} is a class there and {type(new_class).__name__} here"
        )
    decoder.state["globals", id(new_class)] = globals_
    RECEIVED.add(new_class)
    return new_class


@contextlib.contextmanager
def _findable(module: ModuleType) -> Iterator[None]:
    """Have ``sys.modules`` lead to a namespace while a class of it is made, as dataclasses look there.

    Not for longer: the next message may be another sender's, with a module of the same name.
    """
    name = module.__name__
    with _MODULES:
        previous = sys.modules.get(name)
        sys.modules[name] = module
        try:
            yield
        finally:
            if previous is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = previous


def _fill_class(decoder: Decoder, value: type, parts: list[Any]) -> None:
    attributes, names, *values = parts
    if attributes is not MISSING:
        for name, item in (attributes or {}).items():
            setattr(value, name, item)
    bind_globals(decoder.state["globals", id(value)], names, values)


_SOURCE: Final = (object,) * 4
"""Namespace, source, names of free variables, and their cells."""
DEFINITION_KINDS: Final = (
    Kind(
        NodeKind.FUNCTION,
        (FunctionType,),
        _write_function,
        first=_SOURCE,
        make=_make_function,
        fill=_fill_function,
        partly=True,
        copies=True,
        is_code=True,
    ),
    Kind(
        NodeKind.CLASS,
        write=_write_class,
        bases=(type,),
        first=(*_SOURCE, object, object),
        make=_make_class,
        fill=_fill_class,
        partly=True,
        copies=True,
        is_code=True,
    ),
    Kind(
        NodeKind.METHOD,
        (MethodType,),
        _write_method,
        first=(object, object),
        make=of_parts(MethodType),
        is_code=True,
    ),
    Kind(
        NodeKind.MEMBER,
        first=(object, object),
        make=of_parts(getattr),
        is_code=True,
    ),
)
