"""The operation ``trace``: Python code that runs with a request, inside the forward pass.

The code is checked where it is compiled (``nnsight_engine.vllm_backend.request_code``); here it is text.
"""

from __future__ import annotations

import base64
import binascii
import keyword
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Discriminator, Field, JsonValue, PrivateAttr, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.errors import ErrorCode
from api_schemas.fields import Name, Strict
from api_schemas.tensors import TensorObject

MAX_CODE_CHARACTERS: Final = 65536
MODEL_NAME: Final = "model"
TRACER_NAME: Final = "tracer"


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, TensorObject) or (
        isinstance(value, dict) and {"dtype", "data"} <= value.keys()
    )
    return "tensor" if is_tensor else "plain"


Variable = Annotated[
    Annotated[TensorObject, Tag("tensor")] | Annotated[JsonValue, Tag("plain")], Discriminator(_kind)
]
"""A value of JSON, or a tensor."""


class Trace(Strict):
    """Run Python with the request; its saved values are the result.

    The code is the inside of ``with model.trace(prompt) as tracer:``, with the names ``model``, ``tracer``,
    ``torch``, ``save`` and ``nnsight_engine``, and the variables.
    """

    op: Literal["trace"] = "trace"
    name: Name | None = Field(
        default=None, description="Key of the result; by default the operation and its index, `trace_0`."
    )
    code: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_CODE_CHARACTERS)] | None = Field(
        default=None, description="Python statements."
    )
    variables: dict[Name, Variable] = Field(
        default={}, description="Variables of the code, by name: JSON values or tensor objects."
    )
    block: str | None = Field(
        default=None,
        description="Instead of `code`: the library's message of one block, in base64.",
    )

    _data: bytes = PrivateAttr(default=b"")

    @property
    def data(self) -> bytes:
        """The decoded message of ``block``."""
        return self._data

    @field_validator("variables")
    @classmethod
    def _check_names(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if not name.isidentifier() or keyword.iskeyword(name) or name in {MODEL_NAME, TRACER_NAME}:
                raise PydanticCustomError(
                    ErrorCode.INVALID_VALUE.value,
                    "`variables` must be named as Python's variables are, and neither `model` nor `tracer`",
                    {"field": ""},
                )
        return variables

    @model_validator(mode="after")
    def _check_code(self) -> Self:
        if (self.code is None) == (self.block is None):
            raise PydanticCustomError(
                ErrorCode.INVALID_SHAPE.value,
                "`trace` needs `code` or `block`, and not both",
                {"field": "code"},
            )
        if self.block is not None:
            self._data = _decoded(self.block)
            if self.variables:
                raise PydanticCustomError(
                    ErrorCode.INVALID_SHAPE.value,
                    "a `block` brings its variables itself; `variables` belong to `code`",
                    {"field": "variables"},
                )
        return self


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise PydanticCustomError(
            ErrorCode.WRONG_ENCODING.value,
            "`block` must be base64 with padding (RFC 4648), and it is not",
            {"field": "block"},
        ) from error


__all__ = ["MAX_CODE_CHARACTERS", "MODEL_NAME", "TRACER_NAME", "Trace", "Variable"]
