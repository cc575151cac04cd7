"""Conversions between traces and vLLM's requests: requests with trace entries, and results for blocks.

``VLLM`` uses them on the client; the server for a client's message, and for the operation ``trace``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from nnsight_engine.vllm_backend.sender_usage import SENDER_KEY
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY, TraceEntry

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest


class TraceRequests:
    """The requests of one trace, one for each of its blocks.

    Args:
        key: The trace's id in the workers.
        held: The encoded blocks, if they are sent to the workers ahead of the requests; None if each request
            carries them.

    Attributes:
        prompts: vLLM's prompts.
        params: The sampling parameters.
        ids: The requests' ids, which must be unique: aborting a shared id aborts all of its requests.
        adapters: Their LoRA adapters.
    """

    def __init__(self, key: str, held: bytes | None = None) -> None:
        self.key = key
        self.held = held
        self.prompts: list[dict[str, Any]] = []
        self.params: list[SamplingParams] = []
        self.ids: list[str] = []
        self.adapters: list[LoRARequest | None] = []

    @property
    def num_requests(self) -> int:
        """The number of requests in the engine, each choice counted."""
        return sum(params.n for params in self.params)

    def add(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams,
        entry: TraceEntry,
        *,
        sender: str = "",
        request_id: str = "",
        adapter: LoRARequest | None = None,
    ) -> None:
        """Add the request of the next block.

        Args:
            prompt: vLLM's prompt.
            params: The sampling parameters, which receive the entry.
            entry: The request's part in the trace.
            sender: Its tenant, if the engine has several.
            request_id: Prefix of its id.
            adapter: Its LoRA adapter, if any.
        """
        if adapter is not None:
            entry = msgspec.structs.replace(entry, adapter=adapter.lora_int_id)
        params.extra_args = {**(params.extra_args or {}), TRACE_KEY: entry.to_plain()}
        if sender:
            params.extra_args[SENDER_KEY] = sender
        # A block may read and write at any position, so the request must not share the KV cache.
        params.skip_reading_prefix_cache = True
        self.params.append(params)
        self.adapters.append(adapter)
        self.prompts.append({**prompt, "cache_salt": f"{self.key}{entry.index:x}"})
        self.ids.append("-".join(filter(None, (request_id, self.key, str(entry.index)))))


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
