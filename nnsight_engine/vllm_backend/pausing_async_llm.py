"""vLLM's asynchronous engine, extended so that an operator can pause it, and have it sleep.

Refused is what vLLM would do wrong: a level of sleep that discards the weights or does nothing, and mode
``abort`` for pooling, which ends vLLM's engine. Nothing wakes an engine while it is to free memory: vLLM
frees it once requests have ended, even if it works again by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, Protocol

from vllm.v1.engine import PauseMode

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.vllm_backend.tracing_async_llm import TracingAsyncLLM

_FREES_MEMORY: Final = 1
_DISCARDS_WEIGHTS: Final = 2
_ABORTED: Final = "abort"


class PauseRefusedError(ApiError, ValueError):
    """A pause that the engine does not support; vLLM's route ``/pause`` answers a ``ValueError`` with 400."""


class _Choice(Protocol):
    finish_reason: str | None


class PausingAsyncLLM(TracingAsyncLLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pausing = asyncio.Lock()
        self._num_wakes = 0

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop the engine's work; from level 1 on, free memory. Raise PauseRefusedError, nothing done."""
        self._check_level(level, mode)
        self._check_mode(mode)
        if level < _FREES_MEMORY:
            num_wakes = self._num_wakes
            await self._unless_dead(super().sleep(level, mode))
            if self._num_wakes > num_wakes and self.logger_manager is not None:
                self.logger_manager.record_sleep_state(0, 0)  # vLLM records the sleep once it has waited
            return
        async with self._pausing:
            await self._unless_dead(super().sleep(level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Go on; waits for a sleep under way that frees memory. Returns whether all memory is back."""
        async with self._pausing:
            is_awake: bool = await self._unless_dead(super().wake_up(tags))
            self._num_wakes += is_awake
            return is_awake

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop the engine's work; raise PauseRefusedError, with nothing done."""
        self._check_mode(mode)
        await self._unless_dead(super().pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        async with self._pausing:
            await self._unless_dead(super().resume_generation())
            self._num_wakes += 1

    def _check_level(self, level: int, mode: PauseMode) -> None:
        if level >= _DISCARDS_WEIGHTS:
            raise _refused(
                "Level 2 discards the weights, and needs an exchange of weights, which is not served: send "
                "level=1 or level=0.",
                "level",
            )
        if level < _FREES_MEMORY:
            return
        if not self.model_config.enable_sleep_mode:
            raise _refused(
                "Level 1 frees memory of a GPU, and needs a server that is started with --enable-sleep-mode: "
                "send level=0, which only pauses.",
                "level",
            )
        if mode == "keep":
            raise _refused(
                "Level 1 discards the KV cache and moves the weights, which code of kept requests may hold: "
                "send mode=wait or mode=abort.",
                "mode",
            )

    def _check_mode(self, mode: PauseMode) -> None:
        if mode == _ABORTED and self.model_config.runner_type == "pooling":
            raise _refused(
                "The model embeds or classifies, and vLLM cannot abort such requests, which are short: send "
                "mode=wait or mode=keep.",
                "mode",
            )


def check_not_aborted(choices: Iterable[_Choice]) -> None:
    """Raise ApiError (``engine_paused``) if a request with operations was aborted: it has no results."""
    if any(one.finish_reason == _ABORTED for one in choices):
        raise ApiError(
            ErrorCode.ENGINE_PAUSED,
            "The server's operator has paused the engine with mode=abort, which ended this request without "
            "its results; send it again.",
        )


def _refused(message: str, param: str) -> PauseRefusedError:
    return PauseRefusedError(ErrorCode.UNSUPPORTED_COMBINATION, message, param)


__all__ = ["PauseRefusedError", "PausingAsyncLLM", "check_not_aborted"]
