"""From JSON to operations, and every way in which the JSON can be wrong."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import pytest

from api_schemas.conditions import inner_tests
from api_schemas.detectors import DetectorName
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.generation import CompletionRequest
from api_schemas.interventions import OPERATIONS, RequestLimits, parse_interventions
from api_schemas.operations import (
    Capture,
    Detect,
    Feature,
    Features,
    Flag,
    LogitLens,
    Patch,
    Probe,
    Steer,
    Stop,
)
from api_schemas.results import ChoiceInterventions
from api_schemas.tensors import TensorObject, VectorName

STEER: dict[str, Any] = {"op": "steer", "at": "layers.3.output", "vector": [1.0, 2.0]}
SEVERAL: dict[str, Any] = {
    "op": "steer",
    "at": "layers.3.output",
    "vectors": [{"vector": [1.0, 2.0]}, {"vector": [3.0, 4.0], "weight": -1}],
}
TENSOR: dict[str, Any] = {
    "dtype": "float32",
    "shape": [2],
    "data": base64.b64encode(b"\x00" * 8).decode(),
    "encoding": "base64",
}


def parse_error(raw: object, limits: RequestLimits | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_interventions(raw, limits or RequestLimits())
    json.dumps(caught.value.body().model_dump(), ensure_ascii=False).encode("utf-8")
    assert len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize("raw", [None, []])
def test_nothing_asked_is_no_operation(raw: object) -> None:
    assert parse_interventions(raw) == ()


def test_operations_keep_their_order_and_fields() -> None:
    ops = parse_interventions(
        [
            STEER | {"scale": 4, "mode": "clamp", "where": {"phase": "generated"}},
            {"op": "ablate", "at": ["layers.0.mlp.act"], "units": [3, 1]},
            {"op": "patch", "at": "logits", "values": [[1, 2]], "where": {"positions": [-1]}},
            {"op": "capture", "at": "layers.*.output", "reduce": "mean", "dtype": "float16", "name": "x"},
            {"op": "probe", "at": "logits", "weights": TENSOR, "bias": 1},
            {"op": "logit_lens", "layers": [0, -1], "targets": [" Paris", 7]},
            {"op": "detect", "detector": "refusal@2"},
            {"op": "features", "dictionary": {"name": "sae", "id": "dict_1"}, "features": [7, "cats"]},
            {"op": "feature", "dictionary": "sae@2", "changes": [{"feature": 7, "mode": "ablate"}]},
            {"op": "stop", "when": {"not": {"detector": {"name": "refusal"}, "below": 0.5}}},
            {"op": "flag", "when": {"probe": {"at": "layers.1.output", "weights": [1]}, "above": 0}},
        ]
    )
    assert [op.op for op in ops] == [name for name in OPERATIONS if name != "trace"]
    steer, _, patch, capture, probe, lens, detect, features, feature, stop, flag = ops
    assert isinstance(steer, Steer)
    assert (steer.scale, steer.mode, steer.where.phase) == (4.0, "clamp", "generated")
    assert isinstance(patch, Patch)
    assert patch.values == [[1.0, 2.0]]
    assert isinstance(capture, Capture)
    assert (capture.reduce, capture.dtype, capture.name) == ("mean", "float16", "x")
    assert isinstance(probe, Probe)
    assert isinstance(probe.weights, TensorObject)
    assert probe.weights.raw == b"\x00" * 8
    assert isinstance(lens, LogitLens)
    assert lens.targets == [" Paris", 7]
    assert isinstance(detect, Detect)
    assert detect.detector.name == "refusal@2"
    assert isinstance(features, Features)
    assert (features.dictionary.id, features.features, features.top_k) == ("dict_1", [7, "cats"], None)
    assert isinstance(feature, Feature)
    assert (feature.dictionary.name, feature.changes[0].mode, feature.when) == ("sae@2", "ablate", None)
    assert isinstance(stop, Stop)
    (low,) = inner_tests(stop.when).values()
    assert (low.detector, low.below) == (DetectorName(name="refusal"), 0.5)
    assert isinstance(flag, Flag)
    assert list(inner_tests(flag.when)) == ["when"]


def test_a_vector_s_name_may_be_plain_text() -> None:
    (steer,) = parse_interventions([STEER | {"vector": "joy@2"}], RequestLimits())
    assert isinstance(steer, Steer)
    assert steer.vector == VectorName(name="joy@2")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({}, "interventions"),
        ("steer", "interventions"),
        ([3], "interventions.0"),
        ([{"at": "logits"}], "interventions.0.op"),
        ([{"op": ["steer"]}], "interventions.0.op"),
        ([{"op": "steer", "vector": [1]}], "interventions.0.at"),
        ([STEER, STEER | {"scale": True}], "interventions.1.scale"),
        ([STEER | {"scale": "4"}], "interventions.0.scale"),
        ([STEER | {"mode": "push"}], "interventions.0.mode"),
        ([STEER | {"strength": 1}], "interventions.0.strength"),
        ([STEER | {"at": 3}], "interventions.0.at"),
        ([STEER | {"at": ["logits", None]}], "interventions.0.at.1"),
        ([STEER | {"vector": [1, False]}], "interventions.0.vector.1"),
        ([STEER | {"vector": [[1, 2], [3]]}], "interventions.0.vector"),
        ([STEER | {"vector": [[1, 2], 3]}], "interventions.0.vector.1"),
        ([STEER | {"vector": [[[[1]]]]}], "interventions.0.vector.0.0.0"),
        ([STEER | {"vector": True}], "interventions.0.vector"),
        ([STEER | {"vector": {"dtype": "float32"}}], "interventions.0.vector.shape"),
        ([STEER | {"vector": {"name": 3}}], "interventions.0.vector.name"),
        ([STEER | {"vector": TENSOR | {"shape": 2}}], "interventions.0.vector.shape"),
        ([STEER | {"vector": TENSOR | {"shape": [2.0]}}], "interventions.0.vector.shape.0"),
        ([STEER | {"where": []}], "interventions.0.where"),
        ([STEER | {"where": {"phase": "decode"}}], "interventions.0.where.phase"),
        ([STEER | {"where": {"positions": [True]}}], "interventions.0.where.positions.0"),
        ([STEER | {"where": {"positions": 3}}], "interventions.0.where.positions"),
        ([STEER | {"where": {"range": [1]}}], "interventions.0.where.range.1"),
        ([STEER | {"where": {"tokens": [1.5]}}], "interventions.0.where.tokens.0"),
        ([STEER | {"where": {"exclude": {"exclude": {}}}}], "interventions.0.where.exclude.exclude"),
        ([{"op": "ablate", "at": "logits", "method": "vector"}], "interventions.0.vector"),
        ([{"op": "ablate", "at": "logits", "vector": [1]}], "interventions.0.vector"),
        ([{"op": "ablate", "at": "logits", "units": [1.0]}], "interventions.0.units.0"),
        ([{"op": "patch", "at": "logits", "values": [[1]]}], "interventions.0.where"),
        ([{"op": "patch", "at": "logits", "values": [[1]], "where": {}}], "interventions.0.where.positions"),
        ([{"op": "logit_lens", "layers": [True]}], "interventions.0.layers.0"),
        ([{"op": "steer", "at": "logits"}], "interventions.0.vector"),
        ([STEER | {"vectors": [{"vector": [1]}]}], "interventions.0.vector"),
        ([SEVERAL | {"vectors": {"vector": [1]}}], "interventions.0.vectors"),
        ([SEVERAL | {"vectors": [[1]]}], "interventions.0.vectors.0"),
        ([SEVERAL | {"vectors": [{"weight": 1}]}], "interventions.0.vectors.0.vector"),
        ([SEVERAL | {"vectors": [{"vector": [1], "weight": "1"}]}], "interventions.0.vectors.0.weight"),
        ([SEVERAL | {"vectors": [{"vector": [1], "scale": 1}]}], "interventions.0.vectors.0.scale"),
        (
            [SEVERAL | {"vectors": [{"vector": [1]} | {f"x{i}": 1 for i in range(100_000)}]}],
            "interventions.0.vectors.0.x0",
        ),
        ([SEVERAL | {"mode": "project_out"}], "interventions.0.vectors.1.weight"),
        ([STEER | {"mode": "affine"}], "interventions.0.gain"),
        ([STEER | {"mode": "affine", "gain": 2, "scale": 1}], "interventions.0.scale"),
        ([STEER | {"gain": 2}], "interventions.0.gain"),
        ([STEER | {"mode": "clamp", "offset": 2}], "interventions.0.offset"),
        ([STEER | {"low": 2}], "interventions.0.low"),
        ([STEER | {"mode": "affine", "gain": 1, "high": 2}], "interventions.0.high"),
        ([STEER | {"mode": "clamp", "high": 2, "scale": 1}], "interventions.0.scale"),
        ([STEER | {f"x{i}": 1 for i in range(100_000)}], "interventions.0"),
        ([STEER | {"where": {f"x{i}": 1 for i in range(100_000)}}], "interventions.0.where"),
    ],
)
def test_wrong_shape_is_422_and_names_the_field(raw: object, param: str) -> None:
    error = parse_error(raw)
    assert (error.code, error.status, error.param) == (ErrorCode.INVALID_SHAPE, 422, param)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"op": "sneer"}, ErrorCode.UNKNOWN_OPERATION, "op"),
        ({"scale": float("nan")}, ErrorCode.NOT_FINITE, "scale"),
        ({"scale": float("inf")}, ErrorCode.NOT_FINITE, "scale"),
        ({"vector": [0.0, float("-inf")]}, ErrorCode.NOT_FINITE, "vector.1"),
        ({"mode": "affine", "gain": float("nan")}, ErrorCode.NOT_FINITE, "gain"),
        ({"mode": "clamp", "low": float("-inf")}, ErrorCode.NOT_FINITE, "low"),
        ({"mode": "clamp", "low": 2, "high": 1.5}, ErrorCode.INVALID_VALUE, "low"),
        ({"vector": None, "vectors": []}, ErrorCode.INVALID_VALUE, "vectors"),
        ({"vector": None, "vectors": [{"vector": [1]}] * 100_000}, ErrorCode.INVALID_VALUE, "vectors"),
        (
            {"vector": None, "vectors": [{"vector": [1], "weight": float("nan")}]},
            ErrorCode.NOT_FINITE,
            "vectors.0.weight",
        ),
        (
            {"vector": None, "vectors": [{"vector": [float("nan")]}]},
            ErrorCode.NOT_FINITE,
            "vectors.0.vector.0",
        ),
        ({"vector": TENSOR | {"data": "AAA"}}, ErrorCode.WRONG_ENCODING, "vector.data"),
        ({"vector": TENSOR | {"data": "é{}"}}, ErrorCode.WRONG_ENCODING, "vector.data"),
        ({"vector": TENSOR | {"data": "AAAA\n"}}, ErrorCode.WRONG_ENCODING, "vector.data"),
        ({"vector": TENSOR | {"data": "AAAA"}}, ErrorCode.WRONG_ENCODING, "vector.data"),
        ({"vector": TENSOR | {"encoding": "hex"}}, ErrorCode.WRONG_ENCODING, "vector.encoding"),
        ({"vector": TENSOR | {"dtype": "float64"}}, ErrorCode.WRONG_DTYPE, "vector.dtype"),
        ({"vector": TENSOR | {"dtype": "int64", "shape": [1]}}, ErrorCode.WRONG_DTYPE, "vector.dtype"),
        ({"vector": TENSOR | {"shape": [-2]}}, ErrorCode.INVALID_VALUE, "vector.shape.0"),
        ({"vector": TENSOR | {"shape": [10**4000]}}, ErrorCode.INVALID_VALUE, "vector.shape.0"),
        ({"vector": TENSOR | {"shape": [1] * 9}}, ErrorCode.INVALID_VALUE, "vector.shape"),
        ({"vector": TENSOR | {"shape": [10**9, 10**9]}}, ErrorCode.TENSOR_TOO_LARGE, "vector"),
        ({"at": []}, ErrorCode.INVALID_VALUE, "at"),
        ({"at": "x" * 1000}, ErrorCode.INVALID_VALUE, "at"),
        ({"at": "\ud800"}, ErrorCode.INVALID_VALUE, "at"),
        ({"at": ["logits"] * 1025}, ErrorCode.INVALID_VALUE, "at"),
        ({"name": ""}, ErrorCode.INVALID_VALUE, "name"),
        ({"where": {"positions": [1] * 131073}}, ErrorCode.INVALID_VALUE, "where.positions"),
        ({"where": {"exclude": {"tokens": [1] * 131073}}}, ErrorCode.INVALID_VALUE, "where.exclude.tokens"),
        ({"where": {"tokens": ["\udfff"]}}, ErrorCode.INVALID_VALUE, "where.tokens.0"),
    ],
)
def test_wrong_values_are_400_with_their_own_code(
    change: dict[str, Any], code: ErrorCode, param: str
) -> None:
    error = parse_error([STEER | change])
    assert (error.code, error.status, error.param) == (code, 400, f"interventions.0.{param}")


@pytest.mark.parametrize(
    "raw",
    [
        STEER,
        STEER | {"scale": None, "vectors": None},
        SEVERAL | {"scale": 2, "mode": "norm_match"},
        SEVERAL | {"mode": "clamp", "low": 1, "high": 1},
        STEER | {"mode": "affine", "offset": 0},
    ],
)
def test_a_steer_that_was_read_can_be_sent_again(raw: dict[str, Any]) -> None:
    (read,) = parse_interventions([raw])
    (again,) = parse_interventions([read.model_dump(mode="json")])
    assert again == read


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    message = parse_error([{"op": "sneer"}]).message
    assert all(operation in message for operation in OPERATIONS)
    assert "'sneer'" in message


@pytest.mark.parametrize("change", [{"top_k": -1}, {"top_k": 101}, {"top_k": 0}, {"targets": [1] * 101}])
def test_a_lens_has_bounds(change: dict[str, Any]) -> None:
    assert parse_error([{"op": "logit_lens"} | change]).code is ErrorCode.INVALID_VALUE


def test_a_lens_may_ask_for_targets_alone() -> None:
    (lens,) = parse_interventions([{"op": "logit_lens", "top_k": 0, "targets": [1]}])
    assert isinstance(lens, LogitLens)


def test_too_many_operations_are_refused_unread() -> None:
    error = parse_error([{"op": "sneer"}] * 3, RequestLimits(max_operations=2))
    assert error.code is ErrorCode.TOO_MANY_OPERATIONS
    assert "2" in error.message
    assert "3" in error.message


def test_operations_are_counted_for_each_prompt() -> None:
    two = RequestLimits(max_operations=2)
    each = [STEER | {"prompts": [prompt]} for prompt in range(5)]
    assert len(parse_interventions([STEER, *each], two, 5)) == 6
    for raw in ([STEER, STEER, *each], [*each, *each, STEER], [STEER | {"prompts": [0, 1]}] * 3, each * 5):
        with pytest.raises(ApiError) as caught:
            parse_interventions(raw, two, 5)
        assert caught.value.code is ErrorCode.TOO_MANY_OPERATIONS


def test_all_prompts_together_have_a_limit_too() -> None:
    few = RequestLimits(max_operations=2, max_request_operations=4, max_request_points=6)
    each = [STEER | {"prompts": [prompt]} for prompt in range(5)]
    assert len(parse_interventions(each[:4], few, 5)) == 4
    long = STEER | {"at": ["layers.0.output"] * 7}
    for raw in (each, [each[0], each[1], STEER | {"prompts": [2] * 6}], [long]):
        with pytest.raises(ApiError) as caught:
            parse_interventions(raw, few, 5)
        assert caught.value.code in {ErrorCode.TOO_MANY_OPERATIONS, ErrorCode.INVALID_VALUE}


def test_an_operation_is_for_prompts_that_there_are() -> None:
    (operation,) = parse_interventions([STEER | {"prompts": [0, 2]}], RequestLimits(), 3)
    assert operation.model_dump()["prompts"] == [0, 2]
    for prompts, code in (
        ([0, 3], ErrorCode.INVALID_VALUE),
        ([-1], ErrorCode.INVALID_VALUE),
        ([1, 1], ErrorCode.INVALID_VALUE),
        ([], ErrorCode.INVALID_VALUE),
        (["0"], ErrorCode.INVALID_SHAPE),
        (0, ErrorCode.INVALID_SHAPE),
    ):
        with pytest.raises(ApiError) as caught:
            parse_interventions([STEER | {"prompts": prompts}], RequestLimits(), 3)
        assert caught.value.code is code
        assert (caught.value.param or "").startswith("interventions.0.prompts")


@pytest.mark.parametrize(
    "vector",
    [
        [1.0] * 5,
        [[1.0] * 3] * 2,
        TENSOR | {"shape": [5], "data": base64.b64encode(b"\x00" * 20).decode()},
        TENSOR | {"shape": [1], "data": "?" * 1000},
    ],
)
def test_a_tensor_over_the_limit_is_refused(vector: object) -> None:
    assert (
        parse_error([STEER | {"vector": vector}], RequestLimits(max_tensor_bytes=16)).code
        is ErrorCode.TENSOR_TOO_LARGE
    )


def test_a_tensor_at_the_limit_is_read() -> None:
    data = base64.b64encode(b"\x00" * 16).decode()
    vector = TENSOR | {"shape": [4], "data": data}
    (op,) = parse_interventions([STEER | {"vector": vector}], RequestLimits(max_tensor_bytes=16))
    assert isinstance(op, Steer)


@pytest.mark.parametrize("vector", [[0.5] * 1_000_000, [[0.5] * 1000] * 1000])
def test_a_million_numbers_are_not_read_one_by_one(vector: list[Any]) -> None:
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        parse_interventions([STEER | {"vector": vector}])
    finally:
        sys.setprofile(before)
    assert num_calls < 20_000  # some for each row


@pytest.mark.parametrize(
    "vector", [["x"] * 1_000_000, [[1.0]] * 500_000 + [["x"]] * 500_000, [[[[1.0]] * 1_000_000]]]
)
def test_a_million_wrong_items_are_one_error(vector: list[Any]) -> None:
    error = parse_error([STEER | {"vector": vector}])
    assert error.code is ErrorCode.INVALID_SHAPE
    assert len(error.message) < 1000


def test_tensor_objects_survive_the_wire() -> None:
    sent = TensorObject.from_bytes("float16", [2, 1], b"abcd")
    read = TensorObject.model_validate_json(sent.model_dump_json())
    assert (read.raw, read.shape, read.dtype) == (b"abcd", [2, 1], "float16")


def test_a_client_can_write_requests_and_read_responses_with_the_models() -> None:
    request = CompletionRequest(
        prompt="x", interventions=[Steer(at="logits", vector=[1.0], scale=2.0), Capture(at=["logits"])]
    )
    body = json.loads(request.model_dump_json())
    assert [op.op for op in parse_interventions(body["interventions"])] == ["steer", "capture"]
    response = ChoiceInterventions.model_validate(
        {
            "results": {
                "a": {"type": "capture", "positions": [0, 1], "points": {"logits": TENSOR}},
                "b": {"type": "probe", "positions": [0], "points": {"logits": [None]}},
            },
            "applied": [{"op": "steer", "at": ["logits"], "positions": [0]}],
        }
    )
    assert set(response.results) == {"a", "b"}
