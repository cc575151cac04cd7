"""Tensors in JSON: nested lists of numbers, objects with base64 data, or the names of stored vectors.

Limits apply to the data that was actually sent; memory is never allocated based on a claimed shape.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    model_validator,
)

from api_schemas.errors import ErrorCode
from api_schemas.fields import (
    DEFAULT_LIMITS,
    Integer,
    Items,
    NameOrText,
    Number,
    RequestLimits,
    Strict,
    field_error,
)

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
"""Bytes of one item of each dtype in requests and responses."""

INPUT_DTYPES: Final = ("float32", "float16", "bfloat16")
"""Dtypes that a request may send; ``int64`` is for captured ids of tokens and experts."""

_MAX_DIMENSIONS: Final = 8
_MAX_DIMENSION: Final = 2**40
_LIST_ITEM_BYTES: Final = DTYPE_BYTES["float32"]

Dtype = Literal["float32", "float16", "bfloat16", "int64"]
Dimension = Annotated[int, Field(strict=True, ge=0, le=_MAX_DIMENSION)]


class TensorObject(Strict):
    """A tensor's content: little-endian, row-major, in base64."""

    dtype: Dtype
    shape: Annotated[Items[Dimension], Field(max_length=_MAX_DIMENSIONS)]
    data: str = Field(strict=True, description="The content in base64 (RFC 4648, with padding).")
    encoding: Literal["base64"] = "base64"

    _raw: bytes | None = PrivateAttr(default=None)

    @classmethod
    def from_bytes(
        cls, dtype: Dtype, shape: list[int], data: bytes, *, with_text: bool = True
    ) -> TensorObject:
        """Wrap bytes of known dtype and shape, without checks; the server itself needs no text."""
        text = base64.b64encode(data).decode("ascii") if with_text else ""
        tensor = cls.model_construct(dtype=dtype, shape=shape, data=text, encoding="base64")
        tensor._raw = data  # noqa: SLF001, it is our own
        return tensor

    @property
    def raw(self) -> bytes:
        """The content: ``prod(shape)`` items, little-endian and row-major."""
        return base64.b64decode(self.data) if self._raw is None else self._raw

    @model_validator(mode="after")
    def _decode(self, info: ValidationInfo) -> Self:
        """Decode the data, after a check of the sizes that the shape and the text claim."""
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        claimed = max(expected, len(self.data) // 4 * 3 - 2)
        _check_size(claimed, info)
        try:
            raw = base64.b64decode(self.data, validate=True)
        except (ValueError, binascii.Error) as error:
            raise field_error(
                ErrorCode.WRONG_ENCODING,
                f"`data` must be base64 with padding (RFC 4648), and it is not: {error}. Encode the "
                "little-endian bytes of the tensor",
                "data",
            ) from error
        if len(raw) != expected:
            raise field_error(
                ErrorCode.WRONG_ENCODING,
                f"`data` must hold {expected} bytes for {self.dtype} of shape {self.shape}, got {len(raw)}",
                "data",
            )
        self._raw = raw
        return self


class VectorName(NameOrText):
    """A vector stored on the server: the newest version of a name, ``joy``, or a specific one, ``joy@2``.

    Also written as a plain string. Each point gets the vector's row for its own layer; with ``layer``, all
    get the row for that one. With ``id`` it is the vector with this id, whichever tenant's vector has the
    name for the caller.
    """

    layer: Integer | None = Field(default=None, description="Negatives count from the end.")


class VectorUsed(BaseModel):
    """The vector that a vector name resolved to."""

    name: str
    version: int
    id: str


class NamedTensor(TensorObject):
    """The numbers of a named vector; made by the server only."""

    _used: VectorUsed | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, used: VectorUsed, shape: list[int], data: bytes) -> NamedTensor:
        """Wrap float32 numbers, without checks."""
        # The server uses only `raw`, so the base64 text is not generated.
        tensor = cls.model_construct(dtype="float32", shape=shape, data="", encoding="base64")
        tensor._raw, tensor._used = data, used  # noqa: SLF001, it is our own
        return tensor

    @property
    def used(self) -> VectorUsed | None:
        return self._used


def _check_size(num_bytes: int, info: ValidationInfo) -> None:
    limits = info.context if isinstance(info.context, RequestLimits) else DEFAULT_LIMITS
    if num_bytes > limits.max_tensor_bytes:
        raise field_error(
            ErrorCode.TENSOR_TOO_LARGE,
            f"A tensor may have {limits.max_tensor_bytes} bytes, got {num_bytes}; send fewer rows, or a "
            "smaller dtype",
        )


def _form_of_tensor(value: Any) -> str:
    """Select the form by the first item; the form then checks the rest."""
    if isinstance(value, TensorObject):
        return "tensor"
    if isinstance(value, VectorName | str):
        return VectorName.__name__
    if isinstance(value, dict):
        return VectorName.__name__ if "name" in value else "tensor"
    depth = 0
    while isinstance(value, list | tuple) and depth < len(_LIST_KINDS):
        depth += 1
        value = value[0] if value else None
    return _LIST_KINDS[max(depth - 1, 0)]


_LIST_KINDS: Final = ("numbers", "rows", "stacks")


def _check_tensor(value: Any, info: ValidationInfo) -> Any:
    """Check the size of nested lists, and the dtype of an object; objects check their own size."""
    if isinstance(value, list):
        shape = _shape_of(value)
        _check_size(math.prod(shape) * _LIST_ITEM_BYTES, info)
    elif isinstance(value, TensorObject) and value.dtype not in INPUT_DTYPES:
        raise field_error(
            ErrorCode.WRONG_DTYPE,
            f"A tensor's `dtype` must be one of {', '.join(INPUT_DTYPES)}, got {value.dtype}",
            "dtype",
        )
    return value


def _shape_of(value: list[Any]) -> list[int]:
    """Return the shape of nested lists, going through all rows of one depth after the other."""
    shape = [len(value)]
    rows = value
    while rows and isinstance(rows[0], list):
        length = len(rows[0])
        if any(len(row) != length for row in rows):
            raise field_error(
                ErrorCode.INVALID_SHAPE, f"Rows of a list must have one length, got {length} and others"
            )
        shape.append(length)
        rows = [item for row in rows for item in row] if length and isinstance(rows[0][0], list) else []
    return shape


Numbers = Items[Number]
TensorInput = Annotated[
    Annotated[Numbers, Tag("numbers")]
    | Annotated[Items[Numbers], Tag("rows")]
    | Annotated[Items[Items[Numbers]], Tag("stacks")]
    | Annotated[TensorObject, Tag("tensor")]
    | Annotated[VectorName, Tag(VectorName.__name__)],
    Discriminator(_form_of_tensor),
    AfterValidator(_check_tensor),
]
"""A tensor of a request: nested lists of numbers (one to three deep), an object, or a name."""
