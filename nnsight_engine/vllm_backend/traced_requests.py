"""Conversions between traces and vLLM's requests: a request's trace entry, and its results for blocks.

``VLLM`` uses them on the client, the server for a client's message.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnsight_engine.vllm_backend.sender_usage import SENDER_KEY
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY, TraceEntry

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def carry(params: SamplingParams, entry: TraceEntry, sender: str = "") -> None:
    """Add a request's trace entry to its sampling parameters, and its tenant if there are several."""
    params.extra_args = {**(params.extra_args or {}), TRACE_KEY: entry.to_plain()}
    if sender:
        params.extra_args[SENDER_KEY] = sender
    # A block may read and write at any position, so the request must not share the KV cache.
    params.skip_reading_prefix_cache = True


def with_own_salt(prompt: Mapping[str, Any], entry: TraceEntry) -> dict[str, Any]:
    """Return the prompt with a cache salt of its own, so that its KV cache is not shared."""
    return {**prompt, "cache_salt": f"{entry.key}{entry.index:x}"}


def results_of(outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    """Return the results of requests as plain values, by ``"<block>/<choice>"``."""
    return {
        f"{index}/{choice.index}": {
            "request": f"{index}",
            "prompt": output.prompt,
            "prompt_token_ids": list(output.prompt_token_ids or ()),
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
        }
        for index, output in outputs.items()
        for choice in output.outputs
    }


class GatheredOutput:
    """All outputs of a request so far, merged into one with all its choices."""

    output: RequestOutput

    def __init__(self, *, is_delta: bool) -> None:
        """Create an empty output.

        Args:
            is_delta: Whether each output contains only what is new since the previous one.
        """
        self._is_delta = is_delta
        self._choices: dict[int, Any] = {}

    def add(self, output: RequestOutput) -> None:
        """Merge the next output."""
        for choice in output.outputs:
            before = self._choices.get(choice.index)
            now = copy.copy(choice)
            if self._is_delta and before is not None:
                now.text = before.text + choice.text
                now.token_ids = [*before.token_ids, *choice.token_ids]
            self._choices[choice.index] = now
        self.output = copy.copy(output)
        self.output.outputs = [self._choices[index] for index in sorted(self._choices)]
