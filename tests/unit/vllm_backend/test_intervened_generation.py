"""``generate`` of the server's engine, without an engine: what a failure in it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from api_schemas.interventions import parse_interventions
from nnsight_engine.vllm_backend import async_engine
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM, carrying
from nnsight_engine.vllm_backend.call import InterventionCall
from nnsight_engine.vllm_backend.result_router import ResultRouter
from nnsight_engine.vllm_backend.tensor_interning import TensorTable
from tests.unit.vllm_backend.decoding import HIDDEN, SPEC

STEER = {"op": "steer", "at": "layers.0.output", "vector": [1.0] * HIDDEN}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ResultRouter, "open"),
        (async_engine, "PromptEntry"),
        (async_engine, "prepare_params"),
        (async_engine, "salted"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_prompt_that_fails_on_its_way_into_the_engine_leaves_no_tensors(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = InterventionAsyncLLM.__new__(InterventionAsyncLLM)
    engine.router, engine._contents = ResultRouter(SPEC), TensorTable()
    engine._salt_secret = ""
    call = InterventionCall(parse_interventions([STEER]), SPEC, len, stream=False)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(owner, name, fail)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(MemoryError), carrying(call):
        engine.generate({"prompt_token_ids": [1, 2]}, params, "request")
    engine.close_call(call)
    assert (len(engine._contents), len(engine.router)) == (0, 0)
