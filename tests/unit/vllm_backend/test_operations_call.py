"""A call's prompts: how many bytes of tensors all of them and their choices send to the engine."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import parse_interventions
from nnsight_engine.plans.request_plan import NO_MEDIA
from nnsight_engine.vllm_backend import operations_call
from nnsight_engine.vllm_backend.operations_call import InterventionCall
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import token_of


@pytest.mark.parametrize(("num_prompts", "num_choices"), [(1, 4), (4, 1), (2, 2)])
def test_bytes_count_once_for_each_choice_of_each_prompt(
    num_prompts: int, num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec()
    steer = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * spec.hidden_size}
    params = SamplingParams(n=num_choices, temperature=1.0)
    allowed = 4 * num_prompts * num_choices * spec.hidden_size

    def send() -> None:
        asked = InterventionCall(parse_interventions([steer]), spec, token_of, stream=False)
        for _ in range(num_prompts):
            asked.compile([1, 2, 3], NO_MEDIA, params)

    monkeypatch.setattr(operations_call, "MAX_SENT_BYTES", allowed)
    send()
    monkeypatch.setattr(operations_call, "MAX_SENT_BYTES", allowed - 1)
    with pytest.raises(ApiError, match=f"at least {allowed}") as refused:
        send()
    assert refused.value.code is ErrorCode.TENSOR_TOO_LARGE
