"""Writers of what code shares with other code: the globals of its module, closure cells, modules as values.

All functions of one module share one namespace in a message. A global that is not defined here is left out:
it may be assigned later, or never be reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType, ModuleType
from typing import Any, Final

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization.encoding.encoder import Encoder
from nnsight_engine.serialization.message.node_kinds import NodeKind
from nnsight_engine.serialization.source.import_resolution import is_importable

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
