"""The string form of points."""

from __future__ import annotations

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.points import PointPattern


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logits", ["logits"]),
        ("embed.output", ["embed.output"]),
        ("layers.0.input", ["layers.0.input"]),
        ("layers.3.attn.q", ["layers.3.attn.q"]),
        ("layers.-1.output", ["layers.4.output"]),
        ("layers.*.mlp.act", [f"layers.{i}.mlp.act" for i in range(5)]),
        ("layers.1:3.output", ["layers.1.output", "layers.2.output"]),
        ("layers.3:.output", ["layers.3.output", "layers.4.output"]),
        ("layers.:2.output", ["layers.0.output", "layers.1.output"]),
        ("layers.-2:.output", ["layers.3.output", "layers.4.output"]),
        ("layers.0:5.output", [f"layers.{i}.output" for i in range(5)]),
        ("vision.output", ["vision.output"]),
        ("vision.layers.-1.output", ["vision.layers.4.output"]),
        ("vision.layers.*.output", [f"vision.layers.{i}.output" for i in range(5)]),
    ],
)
def test_patterns_expand_in_order_of_layers(text: str, expected: list[str]) -> None:
    assert [str(point) for point in PointPattern.parse(text).resolve(5)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "layer.3.output",
        "layers",
        "layers.3",
        "layers.3:9",
        "layers.*",
        "layers.3.",
        "layers.3.Output",
        "vision.layers",
        "vision.layers.3",
        "vision.3.output",
        "layers.3.attn..q",
        "logits.output",
        "embed",
        "samples ",
        "layers.3.output\n",
        "layers.3." + "a" * 500,
    ],
)
def test_what_is_no_point_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        PointPattern.parse(text, "interventions.0.at")
    assert caught.value.code is ErrorCode.UNKNOWN_POINT
    assert caught.value.param == "interventions.0.at"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "text",
    [
        "layers.5.output",
        "layers.-6.output",
        "layers.03.output",
        "layers.٣.output",
        "layers.3-4.output",
        "layers.1:9.output",
        "layers.3:3.output",
        "layers.4:2.output",
        "layers.-9:.output",
        "layers.::2.output",
        "layers.99999999999999999999.output",
        "layers.1,2.output",
    ],
)
def test_layers_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        PointPattern.parse(text).resolve(5)
    assert caught.value.code is ErrorCode.UNKNOWN_LAYER
    assert caught.value.status == 400
