"""Levels of sleep and modes that an engine takes, with and without the option that frees memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from nnsight_engine.vllm_backend.pausing_async_llm import PauseRefusedError, PausingAsyncLLM


class Engine(PausingAsyncLLM):
    """An engine without processes."""

    output_handler: asyncio.Task[None] | None = None

    def __init__(self, *, frees_memory: bool) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=frees_memory, runner_type="generate")
        self._pausing = asyncio.Lock()
        self._num_wakes = 0
        self.logger_manager = None

    def __del__(self) -> None:
        """End nothing."""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what vLLM was asked to do; it takes a while."""
    found: list[Any] = []

    async def sleep(_: Any, level: int, mode: str) -> None:
        found.append(("begin", level, mode))
        await asyncio.sleep(0.01)
        found.append(("asleep", level, mode))

    async def wake_up(_: Any, tags: Any) -> bool:
        found.append(("awake", tags))
        return True

    monkeypatch.setattr(AsyncLLM, "sleep", sleep)
    monkeypatch.setattr(AsyncLLM, "wake_up", wake_up)
    return found


@pytest.mark.parametrize(
    ("frees_memory", "level", "mode", "reason"),
    [
        (False, 1, "wait", "--enable-sleep-mode"),
        (True, 1, "keep", "mode=wait"),
        (True, 2, "wait", "discards the weights"),
    ],
)
async def test_what_would_go_wrong_is_refused(
    done: list[Any], *, frees_memory: bool, level: int, mode: Any, reason: str
) -> None:
    with pytest.raises(PauseRefusedError, match=reason):
        await Engine(frees_memory=frees_memory).sleep(level, mode)
    assert not done


async def test_an_engine_is_woken_up_only_once_it_sleeps(done: list[Any]) -> None:
    engine = Engine(frees_memory=True)
    sleeping = asyncio.create_task(engine.sleep(1, "wait"))
    await asyncio.sleep(0)
    assert await engine.wake_up()
    await sleeping
    assert done == [("begin", 1, "wait"), ("asleep", 1, "wait"), ("awake", None)]


async def test_a_pause_does_not_keep_an_engine_from_being_woken_up(done: list[Any]) -> None:
    engine = Engine(frees_memory=True)
    sleeping = asyncio.create_task(engine.sleep(0, "wait"))
    await asyncio.sleep(0.001)
    assert await engine.wake_up()
    assert done == [("begin", 0, "wait"), ("awake", None)]
    await sleeping


async def test_a_pause_ends_with_its_engine(done: list[Any]) -> None:
    engine = Engine(frees_memory=True)
    engine.output_handler = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(EngineDeadError):
        await engine.sleep(1, "wait")
    assert ("asleep", 1, "wait") not in done
