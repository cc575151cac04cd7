"""Payloads by kind that come in the field for KV cache connectors of a request's outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Deliver = Callable[[Any, int], None]
"""Receives a payload and the number of the choice it belongs to."""


def deliver_payloads(output_processor: Any, handlers: Mapping[str, Deliver]) -> None:
    """Pass every payload from now on to the handler of its key, before vLLM's output processor runs."""
    process = output_processor.process_outputs

    @functools.wraps(process)
    def process_outputs(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if not params:
                continue
            state = output_processor.request_states.get(output.request_id)
            for kind in handlers.keys() & params.keys():
                payload = params.pop(kind)
                if state is not None:
                    handlers[kind](payload, state.request_index)
            output.kv_transfer_params = params or None
        return process(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_outputs
