"""What fields of a body hold is counted, and long lists of numbers become tensors of the same numbers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import ApiError
from app.body_fields import FieldLimits, checked

LIMITS = FieldLimits(max_depth=64, max_objects=10, max_values=3000, max_prompt_ids=5000)


def numbers_of(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    assert tensor["dtype"] == "float32"
    assert tensor["encoding"] == "base64"
    return np.frombuffer(base64.b64decode(tensor["data"]), "<f4").reshape(tensor["shape"])


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"tools": [{}] * 10}, "invalid_value", "tools"),
        ({"a": {"b": [[[] for _ in range(9)]]}}, "invalid_value", "a"),
        ({"stop": ["a"] * 3001}, "invalid_value", "stop"),
        ({"logit_bias": {str(i): 0 for i in range(3001)}}, "invalid_value", "logit_bias"),
        ({"prompt": [1] * 5001}, "invalid_value", "prompt"),
        ({"prompt": [[1] * 1001] * 5}, "invalid_value", "prompt"),
        ({"interventions": [{"vector": [1.0] * 2000 + ["a"]}]}, "invalid_value", "interventions.0.vector"),
        ({"interventions": [{"vector": [1.0] * 2000 + [True]}]}, "invalid_value", "interventions.0.vector"),
        ({"interventions": [{"vector": [1e39] * 2000}]}, "not_finite", "interventions.0.vector"),
        ({"interventions": [{"vector": [10**400] * 2000}]}, "not_finite", "interventions.0.vector"),
        ({"interventions": [{"where": {"positions": [1] * 3001}}]}, "invalid_value", "interventions"),
        ({"values": [[1.0] * 20] * 200 + [[1.0]]}, "invalid_value", "values"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_with_its_field(
    body: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(ApiError) as raised:
        checked(body, LIMITS)
    assert (raised.value.code, raised.value.param) == (code, field)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 100_000, "n": 1},
        {"prompt": [1] * 5000},
        {"stop": ["a"] * 3000},
        {"tools": [{}] * 9},
        {"interventions": [{"vector": [1.0] * 1023, "where": {"positions": [1] * 1500}}]},
        {"vector": [1.0] * 3000},
        {"interventions": "a", "values": 5, "vectors": None},
        {"values": [[], [1], []]},
    ],
)
def test_what_is_within_them_stays_as_it_is(body: dict[str, Any]) -> None:
    assert checked(dict(body), LIMITS) == body


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8), st.data()
)
def test_tensors_keep_their_numbers_and_their_shape(some: list[float], data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2048,), (2, 1024), (256, 8), (2, 4, 256), (1, 1, 1024)]))
    right = np.resize(np.array(some, np.float64), shape)
    where = data.draw(st.sampled_from(["vector", "values", "weights"]))
    given_ = {"interventions": [{"op": "steer", where: right.tolist()}], "values": right.tolist()}
    body = checked({**given_, "vectors": {"layers.0.output": right.tolist()}}, LIMITS)
    for tensor in (body["interventions"][0][where], body["values"], body["vectors"]["layers.0.output"]):
        found = numbers_of(tensor)
        assert found.shape == right.shape
        assert (found == right.astype(np.float32)).all()
