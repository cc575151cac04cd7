"""Payloads that the worker sends along with a request's outputs, removed before vLLM reads the outputs.

The scheduler puts payloads into the output field meant for KV cache connectors, one of each kind, under the
kind's key (see ``scheduler``). In the API process they are removed just before vLLM's output processor
converts engine outputs to request outputs, and passed to the handler of their kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Deliver = Callable[[Any, int], None]
"""Receives a payload and the number of the choice it belongs to."""


def deliver_payloads(output_processor: Any, handlers: Mapping[str, Deliver]) -> None:
    """Deliver every payload from now on.

    Args:
        output_processor: vLLM's output processor.
        handlers: By the payloads' keys.
    """
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
