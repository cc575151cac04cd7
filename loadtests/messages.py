"""Traces as sent by a client of the library, encoded once and sent many times."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from loadtests.run_spec import Model
from nnsight_engine import save
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.client.http import Progress
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.vllm_backend.vllm import VLLM

_MAX_TOKENS: Final = 16


class _SentError(RemoteError):
    """Raised in place of a response: the trace is only recorded."""


class _TraceRecorder:
    """A ``Transport`` that records traces instead of sending them."""

    def __init__(self, outline: dict[str, Any]) -> None:
        self.kept: list[TraceRequest] = []
        self._outline = outline

    @property
    def name(self) -> str:
        return "a load test"

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        del progress
        self.kept.append(request)
        raise _SentError("the trace was kept")

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        raise NotImplementedError

    def outline(self) -> dict[str, Any]:
        return self._outline


def messages_of(model: Model, outline: dict[str, Any], prompts: Sequence[list[int]], url: str) -> list[str]:
    """Return messages in base64 whose blocks save a norm for each token generated after each prompt.

    Args:
        model: The model.
        outline: The server's description of its modules.
        prompts: Token ids.
        url: The server, which is queried once more for its outline.
    """
    recorder = _TraceRecorder(outline)
    client = VLLM(model.name, remote=url)
    for prompt in prompts:
        try:
            _trace(client, recorder, prompt, model.layer)
        except _SentError:
            continue
    return [base64.b64encode(request.to_bytes()).decode() for request in recorder.kept]


def _trace(client: VLLM, recorder: _TraceRecorder, prompt: list[int], layer: int) -> None:
    options: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with client.trace(prompt, backend=RemoteBackend(transport=recorder), **options) as tracer:
        norms = save([])
        for _ in tracer.iter[:]:
            norms.append(client.layers[layer].output[-1].norm())


__all__ = ["messages_of"]
