"""The operation ``trace``: accepted requests, and refusals with the field at fault."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.fields import RequestLimits
from api_schemas.interventions import parse_interventions
from api_schemas.operations import Trace
from api_schemas.tensors import TensorObject

TENSOR = {"dtype": "float32", "shape": [1], "data": "AACAPw==", "encoding": "base64"}


def parse(**fields: Any) -> Trace:
    (operation,) = parse_interventions([{"op": "trace", **fields}], RequestLimits(max_tensor_bytes=16))
    assert isinstance(operation, Trace)
    return operation


def test_variables_are_json_or_tensors() -> None:
    trace = parse(code="x = 1", variables={"a": [1, {"b": None}], "vector": TENSOR, "scale": 2.5}, name="t")
    assert isinstance(trace.variables["vector"], TensorObject)
    assert trace.variables["vector"].raw == b"\x00\x00\x80?"
    assert (trace.variables["a"], trace.variables["scale"]) == ([1, {"b": None}], 2.5)
    assert parse(block=base64.b64encode(b"NNSW").decode()).data == b"NNSW"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, ErrorCode.INVALID_SHAPE, "code"),
        ({"code": "x = 1", "block": "AAAA"}, ErrorCode.INVALID_SHAPE, "code"),
        ({"code": ""}, ErrorCode.INVALID_VALUE, "code"),
        ({"code": 7}, ErrorCode.INVALID_SHAPE, "code"),
        ({"code": "x" * 65537}, ErrorCode.INVALID_VALUE, "code"),
        ({"code": "x = '\ud800'"}, ErrorCode.INVALID_VALUE, "code"),
        ({"code": "x", "at": "logits"}, ErrorCode.INVALID_SHAPE, "at"),
        ({"code": "x", "where": {}}, ErrorCode.INVALID_SHAPE, "where"),
        ({"code": "x", "variables": {"model": 1}}, ErrorCode.INVALID_VALUE, "variables"),
        ({"code": "x", "variables": {"a b": 1}}, ErrorCode.INVALID_VALUE, "variables"),
        ({"code": "x", "variables": {"class": 1}}, ErrorCode.INVALID_VALUE, "variables"),
        ({"code": "x", "variables": {str(i): 1 for i in range(40)}}, ErrorCode.INVALID_SHAPE, "variables"),
        (
            {"code": "x", "variables": {"v": {**TENSOR, "shape": [2]}}},
            ErrorCode.WRONG_ENCODING,
            "variables.v",
        ),
        (
            {"code": "x", "variables": {"v": {**TENSOR, "shape": [5]}}},
            ErrorCode.TENSOR_TOO_LARGE,
            "variables.v",
        ),
        ({"block": "not base64"}, ErrorCode.WRONG_ENCODING, "block"),
        ({"block": "AAAA", "variables": {"a": 1}}, ErrorCode.INVALID_SHAPE, "variables"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.code is code
    assert (caught.value.param or "").startswith(f"interventions.0.{param}")


def test_a_trace_stands_alone() -> None:
    trace = {"op": "trace", "code": "x = 1"}
    capture = {"op": "capture", "at": "layers.0.output"}
    for others in ([trace, trace], [capture, trace]):
        with pytest.raises(ApiError, match="no other operation") as caught:
            parse_interventions(others)
        assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
