"""Sampling parameters from a client: vLLM's words for what is wrong, and nothing odd gets to the engine."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from api_schemas.errors import ApiError
from app.engine.vllm_errors import translated
from app.engine.vllm_sampling import sampling_params
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_parameters_are_vllms() -> None:
    given = {"temperature": 1, "n": 2, "stop": "x", "logit_bias": {"5": 1}, "extra_args": {"mine": [1, "a"]}}
    params = sampling_params(given, "invokes.0")
    assert (params.temperature, params.n, params.stop, params.logit_bias) == (1.0, 2, ["x"], {5: 1.0})
    assert params.extra_args == {"mine": [1, "a"]}


def test_what_is_derived_from_others_is_made_anew() -> None:
    given = {"skip_clone": True, "_eos_token_id": 3, "output_text_buffer_length": 10**9}
    params = sampling_params({**given, "structured_outputs": {"regex": "a", "_backend": "x"}}, "invokes.0")
    assert (params.skip_clone, params.output_text_buffer_length) == (False, 0)
    assert params.structured_outputs._backend is None  # noqa: SLF001 - vLLM has no public name for it


def test_what_vllm_refuses_has_a_value_and_a_step() -> None:
    with pytest.raises(ApiError, match=r"got -1\.0; change `temperature`") as caught:
        sampling_params({"temperature": -1}, "invokes.3")
    assert "parameter=" not in caught.value.message
    error = VLLMValidationError("This model's maximum context length is 8 tokens.", parameter="input_tokens")
    told = translated(error, "invokes.1", {"temperature": 1})
    assert told is not None
    assert (told.code, told.param) == ("invalid_value", "invokes.1.prompt")
    assert translated(RuntimeError("a defect"), "invokes.1", {}) is None


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"stop": [1]}, "invalid_value", "stop[0]"),
        ({"seed": 2**70}, "invalid_value", ""),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
        ({"surprise": 1}, "invalid_value", "surprise"),
        ({"extra_args": {"deep": {"er": 1}}}, "invalid_value", ""),
        ({"extra_args": 3}, "invalid_value", ""),
        ({"extra_args": {TRACE_KEY: "x"}}, "bad_request", "extra_args"),
        ({"structured_outputs": {"json": nested(500)}}, "invalid_value", ""),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "unsupported_combination",
            "structured_outputs",
        ),
        ({"output_kind": 7}, "invalid_value", "output_kind"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(given, "invokes.3")
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert str(caught.value.param).startswith(f"invokes.3.sampling.{field}" if field else "invokes.3")
