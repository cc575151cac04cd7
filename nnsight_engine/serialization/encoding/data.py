"""Writers of plain data, by an object's exact type; instances of subclasses are written by ``objects``."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch

from nnsight_engine.serialization.encoding.encoder import Encoder, Writer, fits_in_64_bits
from nnsight_engine.serialization.message import NodeKind, array_bytes, segment_of, unsendable

_ARRAY_KINDS = "biufcSUmM"


def _none(encoder: Encoder, index: int, _value: None) -> None:
    encoder.emit(index, NodeKind.NONE)


def _bool(encoder: Encoder, index: int, value: bool) -> None:  # noqa: FBT001 - a writer is called with a value
    encoder.emit(index, NodeKind.TRUE if value else NodeKind.FALSE)


def _int(encoder: Encoder, index: int, value: int) -> None:
    if fits_in_64_bits(value):
        encoder.emit(index, NodeKind.INT, payload=value)
    else:
        size = value.bit_length() // 8 + 1
        encoder.emit(index, NodeKind.BIG_INT, payload=value.to_bytes(size, "little", signed=True))


def _float(encoder: Encoder, index: int, value: float) -> None:
    encoder.emit(index, NodeKind.FLOAT, payload=value)


def _complex(encoder: Encoder, index: int, value: complex) -> None:
    parts = [encoder.node(value.real, index, ""), encoder.node(value.imag, index, "")]
    encoder.emit(index, NodeKind.COMPLEX, parts)


def _str(encoder: Encoder, index: int, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        encoder.emit(index, NodeKind.ODD_STR, payload=value.encode("utf-8", "surrogatepass"))
    else:
        encoder.emit(index, NodeKind.STR, payload=value)


def _bytes(encoder: Encoder, index: int, value: bytes) -> None:
    encoder.emit(index, NodeKind.BYTES, payload=value)


def _bytearray(encoder: Encoder, index: int, value: bytearray) -> None:
    encoder.emit(index, NodeKind.BYTEARRAY, payload=bytes(value))


def _items(kind: NodeKind) -> Writer:
    def write(encoder: Encoder, index: int, value: Any) -> None:
        encoder.emit(
            index, kind, [encoder.node(item, index, "item [{}]", at) for at, item in enumerate(value)]
        )

    return write


def _members(kind: NodeKind) -> Writer:
    def write(encoder: Encoder, index: int, value: Any) -> None:
        encoder.emit(index, kind, [encoder.node(item, index, "a member") for item in value])

    return write


def write_dict(encoder: Encoder, index: int, value: dict[Any, Any]) -> None:
    _pairs(encoder, index, value, "item [{}]", shown=repr)


def write_attributes(encoder: Encoder, index: int, value: dict[str, Any]) -> None:
    """Write an object's attribute dict; error messages show its keys as attribute names."""
    _pairs(encoder, index, value, "attribute `.{}`", shown=str)


def _pairs(encoder: Encoder, index: int, value: dict[Any, Any], step: str, shown: Any) -> None:
    children: list[int] = []
    for key, item in value.items():
        children.append(encoder.node(key, index, "a key"))
        label = shown(key) if type(key) is str else key
        children.append(encoder.node(item, index, step, label))
    encoder.emit(index, NodeKind.DICT, children)


def _slice(encoder: Encoder, index: int, value: slice | range) -> None:
    parts = [encoder.node(part, index, "a bound") for part in (value.start, value.stop, value.step)]
    encoder.emit(index, NodeKind.SLICE if isinstance(value, slice) else NodeKind.RANGE, parts)


def _ellipsis(encoder: Encoder, index: int, _value: object) -> None:
    encoder.emit(index, NodeKind.ELLIPSIS)


def _not_implemented(encoder: Encoder, index: int, _value: object) -> None:
    encoder.emit(index, NodeKind.NOT_IMPLEMENTED)


def _dtype(encoder: Encoder, index: int, value: torch.dtype) -> None:
    encoder.emit(index, NodeKind.DTYPE, payload=str(value).removeprefix("torch."))


def _device(encoder: Encoder, index: int, value: torch.device) -> None:
    encoder.emit(index, NodeKind.DEVICE, payload=str(value))


def write_tensor(encoder: Encoder, index: int, value: torch.Tensor) -> None:
    why = unsendable(value)
    if why is not None:
        encoder.refuse(index, value, why)
    encoder.make_room(0 if value.is_meta else value.numel() * value.element_size())
    name = encoder.add_tensor(segment_of(value))
    gradient = value.grad if value.is_leaf else None
    role = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    if isinstance(value, torch.nn.Buffer):
        role = "buffer" if value.persistent else "passing buffer"
    parts = (name, value.dtype, tuple(value.shape), value.device, value.requires_grad, role, gradient)
    encoder.emit(index, NodeKind.TENSOR, [encoder.node(part, index, "attribute `.grad`") for part in parts])


def _array(encoder: Encoder, index: int, value: np.ndarray[Any, Any]) -> None:
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.hasobject:
        encoder.refuse(
            index, value, f"an array of {value.dtype} has no bytes of its own; send a list or columns"
        )
    _write_array(encoder, index, value, NodeKind.ARRAY)


def _write_array(encoder: Encoder, index: int, value: np.ndarray[Any, Any], kind: NodeKind) -> None:
    encoder.make_room(value.nbytes)
    parts = (encoder.add_tensor(array_bytes(value)), value.dtype.str, tuple(value.shape))
    encoder.emit(index, kind, [encoder.node(part, index, "its shape") for part in parts])


def write_numpy_scalar(encoder: Encoder, index: int, value: np.generic) -> None:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS:
        encoder.refuse(index, value, "send its fields by themselves")
    _write_array(encoder, index, array, NodeKind.SCALAR)


def write_enum(encoder: Encoder, index: int, value: enum.Enum) -> None:
    """Write an enum member by its class and value; the value of a flag may combine several members."""
    parts = [encoder.node(type(value), index, "its class"), encoder.node(value.value, index, "its value")]
    encoder.emit(index, NodeKind.ENUM_MEMBER, parts)


WRITERS: dict[type, Writer] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    list: _items(NodeKind.LIST),
    tuple: _items(NodeKind.TUPLE),
    torch.Size: _items(NodeKind.SIZE),
    dict: write_dict,
    set: _members(NodeKind.SET),
    frozenset: _members(NodeKind.FROZENSET),
    slice: _slice,
    range: _slice,
    type(...): _ellipsis,
    type(NotImplemented): _not_implemented,
    torch.dtype: _dtype,
    torch.device: _device,
    np.ndarray: _array,
}
"""The writer for objects of exactly this type."""
