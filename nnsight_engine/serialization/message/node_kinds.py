"""The node kinds of a message (``docs/wire-format.md``), and the type of payload that each kind carries.

The numbers are part of the format: append new kinds and never renumber.
"""

from __future__ import annotations

import enum


class NodeKind(enum.IntEnum):
    NONE = 0
    TRUE = 1
    FALSE = 2
    ELLIPSIS = 3
    NOT_IMPLEMENTED = 4
    INT = 5
    BIG_INT = 6
    FLOAT = 7
    COMPLEX = 8
    STR = 9
    ODD_STR = 10
    BYTES = 11
    BYTEARRAY = 12
    LIST = 13
    TUPLE = 14
    DICT = 15
    SET = 16
    FROZENSET = 17
    SLICE = 18
    RANGE = 19
    ENUM_MEMBER = 20
    DTYPE = 21
    DEVICE = 22
    SIZE = 23
    TENSOR = 24
    ARRAY = 25
    SCALAR = 26
    NAME = 27
    MODULE = 28
    NEW = 29
    CALL = 30
    REFERENCE = 31
    CELL = 32
    NAMESPACE = 33
    FUNCTION = 34
    CLASS = 35
    METHOD = 36
    MEMBER = 37
    SENT_MODULE = 38
    BLOCK = 39


PAYLOADS: dict[NodeKind, type] = {
    NodeKind.INT: int,
    NodeKind.BIG_INT: bytes,
    NodeKind.FLOAT: float,
    NodeKind.STR: str,
    NodeKind.ODD_STR: bytes,
    NodeKind.BYTES: bytes,
    NodeKind.BYTEARRAY: bytes,
    NodeKind.DTYPE: str,
    NodeKind.DEVICE: str,
    NodeKind.NAME: str,
    NodeKind.MODULE: str,
}
"""The type of the scalar that a node of this kind carries; other kinds carry none."""
