"""Payloads that the worker sends along with a request's outputs, removed before vLLM reads the outputs.

The scheduler puts payloads into the output field meant for KV cache connectors, one of each kind, under the
kind's key (see ``scheduler``). In the API process they are removed just before vLLM's output processor
converts engine outputs to request outputs, and passed to the handler of their kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def on_parcels(output_processor: Any, kind: str, deliver: Callable[[Any, int], None]) -> None:
    """Deliver every payload of a kind from now on.

    Args:
        output_processor: vLLM's output processor.
        kind: The payloads' key.
        deliver: Called with a payload and the number of the choice it belongs to.
    """
    process = output_processor.process_outputs

    @functools.wraps(process)
    def process_outputs(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.kv_transfer_params and kind in output.kv_transfer_params:
                parcel = output.kv_transfer_params.pop(kind)
                output.kv_transfer_params = output.kv_transfer_params or None
                state = output_processor.request_states.get(output.request_id)
                if state is not None:
                    deliver(parcel, state.request_index)
        return process(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_outputs
