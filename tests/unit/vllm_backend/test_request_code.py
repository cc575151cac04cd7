"""The code of an operation ``trace`` reaches the worker as a block, or is refused with its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.request_traces import Trace
from nnsight_engine.core.closure_cells import content
from nnsight_engine.serialization import decode_trace
from nnsight_engine.tracing.tracer import Tracer
from nnsight_engine.vllm_backend.request_code import encoded_code, filename_of

VECTOR = {"dtype": "bfloat16", "shape": [2], "data": "gD8AQA==", "encoding": "base64"}


def run(code: str, **variables: Any) -> dict[str, Any]:
    trace = Trace(code=code, variables=variables)
    received = decode_trace(encoded_code(trace, "interventions.0"), resolve=lambda name: name)
    (info,) = received.blocks
    assert received.shared == {"saved": []}
    assert "nnsight_engine" not in info.globals_, "what is not used is not sent"
    Tracer().compile_on(info)()
    return {name: content(info.variables[name]) for name in info.block.stored}


def test_code_sees_the_model_torch_save_and_its_variables() -> None:
    found = run("a = (model, tracer)\nb = save(torch.ones(2) * scale + vector)", scale=2, vector=VECTOR)
    assert found["a"] == (("envoy", "model"), ("tracer",))
    assert found["b"].tolist() == [3.0, 4.0]
    assert found["b"].dtype is torch.float32


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1\nfor", "invalid syntax, in line 2: `for`"),
        ("x = 1\n\nreturn x", "`return` is not allowed in a traced block"),
        ("", "statements"),
    ],
)
def test_what_does_not_compile_is_refused_with_its_line(code: str, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        encoded_code(Trace.model_construct(code=code, variables={}), "interventions.0")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, "interventions.0.code")
    assert told in caught.value.message


def test_other_code_has_another_file() -> None:
    one, same, other = (filename_of(Trace(code=code)) for code in ("x = 1", "x = 1", "x = 2"))
    assert one == same != other
