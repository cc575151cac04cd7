"""LoRA adapters at run time: what is kept for their names, and what becomes of them with their engine."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from app.engine.adapters import AdapterLocks, load_again


class Models:
    """Loads every adapter but those whose files are gone."""

    def __init__(self, *names: str) -> None:
        self.lora_requests = {name: LoRARequest(name, 1, f"/srv/{name}") for name in names}

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> Any:
        if "gone" in request.lora_path:
            return ErrorResponse(error=ErrorInfo(message="no files", type="NotFoundError", code=404))
        self.lora_requests[request.lora_name] = LoRARequest(request.lora_name, 2, request.lora_path)
        return "Success"


async def test_an_engine_that_is_started_again_has_the_adapters_of_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = Models("at_start")
    before = Models("at_start", "later", "gone").lora_requests.values()
    await load_again(cast(Any, models), before)
    assert models.lora_requests.keys() == {"at_start", "later"}
    assert models.lora_requests["at_start"].lora_int_id == 1, "it was loaded by the start"
    assert "'gone' is lost: no files" in caplog.text


async def test_a_lock_lives_as_long_as_it_is_held() -> None:
    locks = AdapterLocks()
    async with locks["a"]:
        gc.collect()
        assert locks["a"].locked()
        assert not locks["b"].locked()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(locks["a"].acquire(), 0.01)
    for number in range(1000):
        async with locks[f"hostile {number}"]:
            pass
    gc.collect()
    assert not locks["a"].locked()
    assert len(locks) == 0
