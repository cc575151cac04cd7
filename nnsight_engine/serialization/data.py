"""Kinds of plain data: constants, numbers, text, containers, tensors and arrays.

What is read comes from an untrusted sender: sizes are checked before memory is allocated, and hashes before a
table is filled. A wrong type raises an exception, which the decoder converts to a ``DecodeError``.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.tensors import flat_bytes
from nnsight_engine.serialization.graph import (
    SCALAR,
    Decoder,
    Encoder,
    Filler,
    Kind,
    Maker,
    Unsendable,
    Writer,
    Written,
    of_content,
    of_parts,
    typed,
)
from nnsight_engine.serialization.limits import DecodeError
from nnsight_engine.serialization.message import SENT_DTYPES, NodeKind

# Constants, numbers and text.

_CONSTANTS: Final = {
    None: NodeKind.NONE,
    True: NodeKind.TRUE,
    False: NodeKind.FALSE,
    ...: NodeKind.ELLIPSIS,
    NotImplemented: NodeKind.NOT_IMPLEMENTED,
}
_INT64: Final = range(-(2**63), 2**63)


def _write_int(_encoder: Encoder, value: int) -> Written:
    if value in _INT64:
        return NodeKind.INT, value
    return NodeKind.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _make_big_int(decoder: Decoder, data: bytes) -> int:
    """Return an integer, and record that hashing it takes the longer the larger it is."""
    decoder.work[decoder.index] = 1 + len(data) // 8
    return int.from_bytes(data, "little", signed=True)


def _write_str(_encoder: Encoder, value: str) -> Written:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        return NodeKind.ODD_STR, value.encode("utf-8", "surrogatepass")
    return NodeKind.STR, value


def _write_complex(encoder: Encoder, value: complex) -> Written:
    return NodeKind.COMPLEX, encoder.nodes((value.real, value.imag))


_DTYPES: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def _make_dtype(_decoder: Decoder, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise DecodeError(f"this side's torch has no type {name!r}")
    return _DTYPES[name]


# Containers.

_CHECKED_FROM: Final = 64
"""Number of keys from which on their hashes are checked for collisions."""


def write_items(kind: NodeKind, step: str) -> Writer:
    """Return a writer of sequences; errors show ``step`` with an item's index."""

    def write(encoder: Encoder, value: Any) -> Written:
        return kind, [encoder.node(item, step, index) for index, item in enumerate(value)]

    return write


def write_pairs(step: str, shown: Callable[[Any], str]) -> Writer:
    """Return a writer of dicts; errors show text keys as ``shown`` does, and other keys by their ``repr``."""

    def write(encoder: Encoder, value: dict[Any, Any]) -> Written:
        children: list[int] = []
        for key, item in value.items():
            children.append(encoder.node(key, "a key"))
            children.append(encoder.node(item, step, shown(key) if type(key) is str else key))
        return NodeKind.DICT, children

    return write


write_attributes: Final = write_pairs("attribute `.{}`", str)


def _write_members(encoder: Encoder, value: set[Any] | frozenset[Any]) -> Written:
    kind = NodeKind.SET if isinstance(value, set) else NodeKind.FROZENSET
    return kind, encoder.nodes(value, "a member")


def _write_bounds(encoder: Encoder, value: slice | range) -> Written:
    kind = NodeKind.SLICE if isinstance(value, slice) else NodeKind.RANGE
    return kind, encoder.nodes((value.start, value.stop, value.step), "a bound")


def _check_keys(decoder: Decoder, keys: list[Any], nodes: Sequence[int]) -> None:
    """Refuse keys that would take too much stack or time to hash."""
    limits, depths, work = decoder.limits, decoder.depths, decoder.work
    if depths:
        depth = max((depths.get(node, 0) for node in nodes), default=0)
        if depth > limits.max_key_depth:
            raise DecodeError(f"a key is {depth} tuples deep and may be {limits.max_key_depth}")
    if work and sum(work.get(node, 0) for node in nodes) > limits.max_key_work:
        raise DecodeError(f"to hash the keys takes more than {limits.max_key_work:,} steps")
    if len(keys) >= _CHECKED_FROM:
        _, num_equal = collections.Counter(map(hash, keys)).most_common(1)[0]
        if num_equal > limits.max_equal_hashes:
            raise DecodeError(f"{num_equal:,} keys have the same hash; {limits.max_equal_hashes:,} may")


def _fill_list(_decoder: Decoder, value: list[Any], parts: list[Any]) -> None:
    value.extend(parts)


def _fill_dict(decoder: Decoder, value: dict[Any, Any], parts: list[Any]) -> None:
    keys = parts[::2]
    if len(parts) % 2:
        raise DecodeError("the message is broken: a key has no value")
    _check_keys(decoder, keys, decoder.children[::2])
    value.update(zip(keys, parts[1::2], strict=True))


def _fill_set(decoder: Decoder, value: set[Any], parts: list[Any]) -> None:
    _check_keys(decoder, parts, decoder.children)
    value.update(parts)


def _make_frozenset(decoder: Decoder, parts: list[Any]) -> frozenset[Any]:
    _check_keys(decoder, parts, decoder.children)
    return frozenset(parts)


# Tensors and arrays.

_MAX_DIMENSIONS: Final = 64
_ARRAY_KINDS: Final = "biufcSUmM"
_ARRAY_DTYPE: Final = re.compile(r"[<>|=]?[biufcSUmM?]\d{0,6}(\[\w{1,8}\])?")


def unsendable(tensor: torch.Tensor) -> str | None:
    """Return why the tensor cannot be serialized, or None if it can."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return "it is of a subclass of Tensor; send tensor.as_subclass(torch.Tensor)"
    if tensor.layout is not torch.strided:
        return "it is sparse; send tensor.to_dense()"
    if tensor.is_quantized:
        return "it is quantized; send tensor.dequantize()"
    if tensor.is_nested:
        return "it is nested; send tensor.unbind()"
    return None


def _write_tensor(encoder: Encoder, value: torch.Tensor) -> Written:
    """Write a tensor: its segment's name, type, shape, device, role, and last its gradient or None."""
    reason = unsendable(value)
    if reason is not None:
        raise Unsendable(reason)
    num_bytes = 0 if value.is_meta else value.numel() * value.element_size()
    name = encoder.add_tensor(num_bytes, lambda: _segment_of(value))
    gradient = value.grad if value.is_leaf else None
    role = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    if isinstance(value, torch.nn.Buffer):
        role = "buffer" if value.persistent else "passing buffer"
    parts = (name, value.dtype, tuple(value.shape), value.device, value.requires_grad, role, gradient)
    return NodeKind.TENSOR, encoder.nodes(parts, "attribute `.grad`")


def _segment_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values to send; None if there are none, as for an empty tensor or one on the meta device."""
    if tensor.is_meta or not tensor.numel():
        return None
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return values if values.dtype in SENT_DTYPES else flat_bytes(values)


def _make_tensor(decoder: Decoder, parts: list[Any]) -> torch.Tensor:
    """Return a tensor, parameter or buffer on the decoder's device; a meta tensor remains one."""
    name, dtype, shape, device, requires_grad, role = parts
    segment = _sent_segment(decoder, name, shape)
    target = torch.device("meta") if device.type == "meta" else decoder.device
    tensor = _tensor_of(segment, dtype, shape, target)
    if role == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if role in {"buffer", "passing buffer"}:
        tensor = torch.nn.Buffer(tensor, persistent=role == "buffer")
    return tensor.requires_grad_(requires_grad)


def _sent_segment(decoder: Decoder, name: str | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Check a shape, and return the segment of this name; None for a tensor without values."""
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
        raise DecodeError("a tensor has an impossible shape")
    return None if name is None else decoder.table.tensors[typed(name, str)]


def _tensor_of(
    segment: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return a tensor with a segment's bytes; without a segment an empty one or one on the meta device."""
    if segment is None:
        if device.type != "meta" and 0 not in shape:
            raise DecodeError(f"a tensor of shape {shape} has no values")
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    if num_bytes != segment.nbytes or not num_bytes:
        raise DecodeError(
            f"a tensor of shape {shape} and {dtype} has {num_bytes} bytes, not {segment.nbytes}"
        )
    values = segment if segment.dtype is dtype else segment.reshape(-1).view(torch.uint8).view(dtype)
    return values.reshape(shape).to(device)


def _fill_tensor(decoder: Decoder, value: torch.Tensor, parts: list[Any]) -> None:
    """Set a tensor's gradient, if it was sent with one."""
    (gradient,) = parts
    if gradient is None:
        return
    # Freeing a long chain of gradients of gradients would overflow the stack.
    if gradient.grad is not None or ("gradient", id(value)) in decoder.state:
        raise DecodeError("a tensor's gradient has a gradient, which cannot travel")
    decoder.state["gradient", id(gradient)] = True
    value.grad = gradient


def _write_array(encoder: Encoder, value: np.ndarray[Any, Any] | np.generic) -> Written:
    """Write an array or a numpy scalar: the name of the segment with its bytes, its type and shape."""
    array, is_scalar = np.asarray(value), isinstance(value, np.generic)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.hasobject:
        raise Unsendable(
            "send its fields by themselves"
            if is_scalar
            else f"an array of {array.dtype} has no bytes of its own; send a list or columns"
        )
    name = encoder.add_tensor(array.nbytes, lambda: _bytes_of(array))
    parts = (name, array.dtype.str, tuple(array.shape))
    return NodeKind.SCALAR if is_scalar else NodeKind.ARRAY, encoder.nodes(parts, "its shape")


def _bytes_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    if not array.nbytes:
        return None
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy())


def _make_array(decoder: Decoder, parts: list[Any]) -> Any:
    """Return an array or a numpy scalar, after its bytes were compared with its shape and type."""
    name, dtype, shape = parts
    segment = _sent_segment(decoder, name, shape)
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise DecodeError(f"an array has the type {dtype!r}, which cannot travel")
    parsed = np.dtype(dtype)
    num_bytes = math.prod(shape) * parsed.itemsize
    num_sent = 0 if segment is None else segment.nbytes
    if num_bytes != num_sent:
        raise DecodeError(f"an array of shape {shape} and {parsed} has {num_bytes} bytes, not {num_sent}")
    if segment is not None and num_bytes:
        array = segment.reshape(-1).view(torch.uint8).numpy().view(parsed).reshape(shape)
    elif 0 in shape:
        array = np.empty(shape, parsed)
    else:  # zero-length text, for which numpy would allocate memory
        raise DecodeError(f"an array of shape {shape} has no values")
    return array[()] if decoder.kind == NodeKind.SCALAR else array


def _write_constant(_encoder: Encoder, value: Any) -> Written:
    return _CONSTANTS[value], ()


def _scalar(number: NodeKind, kind: type, write: Callable[[Any], Any] | None = None, **more: Any) -> Kind:
    """Return the kind of objects that are one scalar in a message; ``write`` turns an object into it."""

    def written(_encoder: Encoder, value: Any) -> Written:
        return number, value if write is None else write(value)

    return Kind(number, (kind,), written, **more)


def _filled(number: NodeKind, kind: type, write: Writer, fill: Filler) -> Kind:
    return Kind(number, (kind,), write, make=of_parts(kind), first=(), fill=fill)


def _nested(number: NodeKind, kind: type, write: Writer, make: Maker, **more: Any) -> Kind:
    return Kind(number, (kind,), write, make=make, is_nested=True, **more)


_ITEM: Final = "item [{}]"
_ARRAY_PARTS: Final = (object, str, tuple)
DATA_KINDS: Final = (
    *(
        Kind(number, (type(constant),), _write_constant, ready=constant)
        for constant, number in _CONSTANTS.items()
    ),
    Kind(NodeKind.INT, (int,), _write_int, ready=SCALAR),
    Kind(NodeKind.BIG_INT, make=_make_big_int),
    _scalar(NodeKind.FLOAT, float, ready=SCALAR),
    Kind(NodeKind.COMPLEX, (complex,), _write_complex, make=of_parts(complex), first=(float, float)),
    Kind(NodeKind.STR, (str,), _write_str, ready=SCALAR),
    Kind(NodeKind.ODD_STR, make=of_content(lambda data: data.decode("utf-8", "surrogatepass"))),
    _scalar(NodeKind.BYTES, bytes, ready=SCALAR),
    _scalar(NodeKind.BYTEARRAY, bytearray, bytes, make=of_content(bytearray)),
    _scalar(NodeKind.DTYPE, torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), make=_make_dtype),
    _scalar(NodeKind.DEVICE, torch.device, str, make=of_content(torch.device)),
    _filled(NodeKind.LIST, list, write_items(NodeKind.LIST, _ITEM), _fill_list),
    _filled(NodeKind.DICT, dict, write_pairs(_ITEM, repr), _fill_dict),
    _filled(NodeKind.SET, set, _write_members, _fill_set),
    _nested(NodeKind.TUPLE, tuple, write_items(NodeKind.TUPLE, _ITEM), of_content(tuple)),
    _nested(NodeKind.SIZE, torch.Size, write_items(NodeKind.SIZE, _ITEM), of_content(torch.Size)),
    _nested(NodeKind.FROZENSET, frozenset, _write_members, _make_frozenset),
    _nested(NodeKind.SLICE, slice, _write_bounds, of_parts(slice), first=(object, object, object)),
    _nested(NodeKind.RANGE, range, _write_bounds, of_parts(range), first=(int, int, int)),
    Kind(
        NodeKind.TENSOR,
        (torch.Tensor,),
        _write_tensor,
        bases=(torch.Tensor,),
        make=_make_tensor,
        first=(object, torch.dtype, tuple, torch.device, bool, object),
        fill=_fill_tensor,
    ),
    Kind(NodeKind.ARRAY, (np.ndarray,), _write_array, make=_make_array, first=_ARRAY_PARTS),
    Kind(NodeKind.SCALAR, write=_write_array, bases=(np.generic,), make=_make_array, first=_ARRAY_PARTS),
)
