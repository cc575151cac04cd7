"""LoRA adapters at run time: what is kept for their names, and what becomes of them with their engine."""

from __future__ import annotations

import argparse
import asyncio
import gc
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from app.engine import vllm_app
from app.engine.adapters import AdapterLocks


class Models:
    """Loads every adapter but those whose files are gone."""

    def __init__(self, *names: str) -> None:
        self.model_config = None
        self.lora_requests = {name: LoRARequest(name, 1, f"/srv/{name}") for name in names}

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ()

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> Any:
        if "gone" in request.lora_path:
            return ErrorResponse(error=ErrorInfo(message="no files", type="NotFoundError", code=404))
        self.lora_requests[request.lora_name] = LoRARequest(request.lora_name, 2, request.lora_path)
        return "Success"


async def test_an_engine_that_is_started_again_has_the_adapters_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the start that was unloaded stays so, and one that was replaced keeps its folder."""
    args = argparse.Namespace(lora_modules=["of the start"])
    asked: list[Any] = []

    async def init_app_state(engine: Models, state: Any, given: Any, _tasks: Any) -> None:
        asked.append(given.lora_modules)
        state.openai_serving_models = engine

    monkeypatch.setattr(vllm_app, "init_app_state", init_app_state)
    app = vllm_app.VLLMApp(args)
    first, second, third = Models("at_start", "unloaded"), Models(), Models()
    await app.use(first)
    del first.lora_requests["unloaded"]
    first.lora_requests |= {
        name: LoRARequest(name, 2, f"/new/{name}") for name in ("at_start", "later", "gone")
    }
    await app.use(second)
    await app.use(third)
    assert asked == [["of the start"], None, None]
    for models in (second, third):
        folders = {name: one.lora_path for name, one in models.lora_requests.items()}
        assert folders == {"at_start": "/new/at_start", "later": "/new/later"}
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
