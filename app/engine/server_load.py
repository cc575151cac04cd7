"""Counts completions and chats in vLLM's ``/load``: vLLM counts in its own routes, which these do not use."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable

from starlette.datastructures import State

from app.engine.client import EngineReply


async def counted(answering: Awaitable[EngineReply], state: State) -> EngineReply:
    """Return the reply; the request counts until it is complete or its stream is closed."""
    if not state.enable_server_load_tracking:
        return await answering
    load = _Load(state)
    try:
        reply = await answering
    except BaseException:
        load.end()
        raise
    if reply.stream is None:
        load.end()
        return reply
    return dataclasses.replace(reply, stream=_CountedStream(reply.stream, load))


class _Load:
    def __init__(self, state: State) -> None:
        self._state = state
        self._counts = True
        state.server_load_metrics += 1

    def end(self) -> None:
        if self._counts:
            self._counts = False
            self._state.server_load_metrics = max(0, self._state.server_load_metrics - 1)


class _CountedStream:
    def __init__(self, stream: AsyncIterator[str], load: _Load) -> None:
        self._stream = stream
        self._load = load

    def __aiter__(self) -> _CountedStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self._stream)

    async def aclose(self) -> None:
        self._load.end()
        aclose = getattr(self._stream, "aclose", None)
        if aclose is not None:
            await aclose()


__all__ = ["counted"]
