"""vLLM's asynchronous engine, extended so that an operator can pause it, and have it sleep.

While an engine is paused, requests wait in it: it answers probes and its counters can be read, but no step
runs. What vLLM would do wrong is refused: a level of sleep that would discard the weights, or do nothing, and
the mode ``abort`` for requests that are pooled, which ends vLLM's engine. Nothing wakes an engine up while
it is to free memory: vLLM frees it once the engine's requests have ended, also if it works again by then.
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
    """An ``AsyncLLM`` that can be paused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as vLLM does."""
        super().__init__(*args, **kwargs)
        self._pausing = asyncio.Lock()
        self._num_wakes = 0

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop the engine's work; from level 1 on, free memory.

        Raises:
            PauseRefusedError: The engine does not support the level, or the mode; nothing was done.
        """
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
        """Stop the engine's work.

        Raises:
            PauseRefusedError: The engine does not support the mode; nothing was done.
        """
        self._check_mode(mode)
        await self._unless_dead(super().pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        """Go on; waits for a sleep under way that frees memory."""
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
    """Check the choices of a request with operations, of which the engine sends no results if it is aborted.

    Raises:
        ApiError: ``engine_paused``: it was aborted.
    """
    if any(one.finish_reason == _ABORTED for one in choices):
        raise ApiError(
            ErrorCode.ENGINE_PAUSED,
            "The server's operator has paused the engine with mode=abort, which ended this request without "
            "its results; send it again.",
        )


def _refused(message: str, param: str) -> PauseRefusedError:
    return PauseRefusedError(ErrorCode.UNSUPPORTED_COMBINATION, message, param)


__all__ = ["PauseRefusedError", "PausingAsyncLLM", "check_not_aborted"]
