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
    """The requests of one trace, one for each block; ``held`` blocks go to the workers ahead of them.

    ``ids`` must be unique: aborting a shared id aborts all of its requests.
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
        """Add the next block's request; ``params`` receive the entry, ``request_id`` is its id's prefix."""
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
        """Create an empty output; with ``is_delta``, each output has only news since the one before."""
        self._is_delta = is_delta
        self._choices: dict[int, Any] = {}

    def add(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            before = self._choices.get(choice.index)
            now = copy.copy(choice)
            if self._is_delta and before is not None:
                now.text = before.text + choice.text
                now.token_ids = [*before.token_ids, *choice.token_ids]
            self._choices[choice.index] = now
        self.output = copy.copy(output)
        self.output.outputs = [self._choices[index] for index in sorted(self._choices)]
