"""The start of ``VLLM``'s engine, with an engine that is played: nothing is left of one that failed."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_engine.vllm_backend import engine_start
from nnsight_engine.vllm_backend.vllm import VLLM


class PlayedHost:
    """An engine whose workers answer, except to one method."""

    def __init__(self, failing: str) -> None:
        self.inner = object()
        self.failing = failing
        self.is_closed = False

    def call(self, method: str, *_: Any) -> list[Any]:
        if method == self.failing:
            raise KeyboardInterrupt
        return [[("", "LlamaForCausalLM", "", "")] if method == "outline_model" else {}]

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("failing", ["outline_model", "describe_traces", "spec"])
def test_an_engine_whose_model_cannot_be_described_is_shut_down(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = PlayedHost(failing)
    monkeypatch.setattr(engine_start, "start", lambda *_, **__: host)
    model = VLLM("some-model")
    with pytest.raises((KeyboardInterrupt, Exception)):
        model.dispatch()
    assert host.is_closed
    assert not model.dispatched
    assert "host" not in model.__dict__
