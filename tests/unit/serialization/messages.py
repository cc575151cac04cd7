"""Messages that no honest sender writes."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine.sandbox.block_checker import CHECKED
from nnsight_engine.serialization import MessageLimits, Policy, decode
from nnsight_engine.serialization.message import NodeKind, NodeTable, pack

Node = tuple[NodeKind, list[int], Any]


def message(*nodes: Node, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """Return a message of nodes; the first is the root."""
    kinds, children, payloads = [list(column) for column in zip(*nodes, strict=True)]
    return b"".join(pack(NodeTable([*map(int, kinds)], children, payloads, tensors or {}), MessageLimits()))


def piece(text: str, name: str, *, file: str = "<hostile>", line: int = 1) -> tuple[Any, ...]:
    """Return a piece of source, as functions and classes are sent."""
    return (file, text, line, -1, name, name, None, 0)


class Writer:
    """Builds a message of nodes, parts before what is made of them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [(NodeKind.LIST, [], None)]

    def add(self, kind: NodeKind, *children: int, payload: Any = None) -> int:
        self.nodes.append((kind, list(children), payload))
        return len(self.nodes) - 1

    def value(self, value: Any) -> int:
        if isinstance(value, tuple):
            return self.add(NodeKind.TUPLE, *map(self.value, value))
        if isinstance(value, dict):
            return self.add(NodeKind.DICT, *[self.value(one) for item in value.items() for one in item])
        kind = {str: NodeKind.STR, int: NodeKind.INT, type(None): NodeKind.NONE, bool: NodeKind.TRUE}[
            type(value)
        ]
        if value is False:
            kind = NodeKind.FALSE
        return self.add(kind, payload=value if kind in {NodeKind.STR, NodeKind.INT} else None)

    def name(self, module: str, name: str) -> int:
        return self.add(NodeKind.NAME, payload=f"{module}:{name}")

    def namespace(self, name: str = "mine", *, is_real: bool = False) -> int:
        return self.add(NodeKind.NAMESPACE, self.value(name), self.value(None), self.value(is_real))

    def function(
        self,
        source: tuple[Any, ...],
        *,
        namespace: int | None = None,
        globals_: dict[str, int] | None = None,
        cells: dict[str, int] | None = None,
        attributes: int | None = None,
        is_real: bool = False,
    ) -> int:
        name = source[4]
        held = [self.add(NodeKind.CELL, value) for value in (cells or {}).values()]
        none = self.value(None)
        return self.add(
            NodeKind.FUNCTION,
            self.namespace("os" if is_real else "mine", is_real=is_real) if namespace is None else namespace,
            self.value(source),
            self.value(tuple(cells or ())),
            self.add(NodeKind.TUPLE, *held),
            self.value((name, name, "mine")),
            none,
            none,
            none if attributes is None else attributes,
            self.value(tuple(globals_ or ())),
            *(globals_ or {}).values(),
        )

    def error(self) -> int:
        """Add an object that has attributes, as a namespace has."""
        none, nothing = self.value(None), self.value(())
        return self.add(NodeKind.NEW, self.name("builtins", "ValueError"), nothing, none, *[none] * 4)

    def call(self, function: int, *args: Any) -> int:
        none = self.value(None)
        return self.add(NodeKind.CALL, function, self.value(args), none, *[none] * 4)

    def message(self, *roots: int) -> bytes:
        """Return the message of a list of what was added."""
        self.nodes[0] = (NodeKind.LIST, [*roots], None)
        return message(*self.nodes)

    def read(self, root: int, policy: Policy = CHECKED) -> Any:
        """Return what a reader makes of it."""
        (value,) = decode(self.message(root), policy=policy)
        return value
