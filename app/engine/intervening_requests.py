"""vLLM's request models, extended to carry a call's ticket to the engine.

Only the sampling parameters reach ``generate``, so the ticket travels in them.
"""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

from nnsight_engine.vllm_backend.call import TICKET_KEY


class InterveningCompletionRequest(CompletionRequest):
    """A completion request of a call with interventions."""

    _ticket: str = PrivateAttr(default="")

    def set_ticket(self, ticket: str) -> None:
        """Set the call's ticket."""
        self._ticket = ticket

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        """Return vLLM's sampling parameters with the ticket in them."""
        return _with_ticket(super().to_sampling_params(*args, **kwargs), self._ticket)


class InterveningChatRequest(ChatCompletionRequest):
    """A chat completion request of a call with interventions."""

    _ticket: str = PrivateAttr(default="")

    def set_ticket(self, ticket: str) -> None:
        """Set the call's ticket."""
        self._ticket = ticket

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        """Return vLLM's sampling parameters with the ticket in them."""
        return _with_ticket(super().to_sampling_params(*args, **kwargs), self._ticket)


def _with_ticket(params: SamplingParams, ticket: str) -> SamplingParams:
    params.extra_args = {**(params.extra_args or {}), TICKET_KEY: ticket}
    return params
