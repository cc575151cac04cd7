"""What a trace's requests carry, and what they return to blocks that wait for it.

``VLLM`` makes them on the user's side, the server out of a client's message.
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
    """Have a request's sampling parameters bring its part in a trace, and whose it is if several share."""
    params.extra_args = {**(params.extra_args or {}), TRACE_KEY: entry.to_plain()}
    if sender:
        params.extra_args[SENDER_KEY] = sender
    # A block may read any position, and write any: it shares no keys and values with anybody.
    params.skip_reading_prefix_cache = True


def apart(prompt: Mapping[str, Any], entry: TraceEntry) -> dict[str, Any]:
    """Return a prompt whose keys and values nobody else is served."""
    return {**prompt, "cache_salt": f"{entry.key}{entry.index:x}"}


def results_of(outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    """Return what requests returned as plain values, by ``"<block>/<choice>"``."""
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
    """A request's outputs so far as one, with all its choices."""

    output: RequestOutput

    def __init__(self, *, is_delta: bool) -> None:
        """Start without outputs.

        Args:
            is_delta: Whether each has only what is new since the one before.
        """
        self._is_delta = is_delta
        self._choices: dict[int, Any] = {}

    def add(self, output: RequestOutput) -> None:
        """Take the next one."""
        for choice in output.outputs:
            before = self._choices.get(choice.index)
            now = copy.copy(choice)
            if self._is_delta and before is not None:
                now.text = before.text + choice.text
                now.token_ids = [*before.token_ids, *choice.token_ids]
            self._choices[choice.index] = now
        self.output = copy.copy(output)
        self.output.outputs = [self._choices[index] for index in sorted(self._choices)]
