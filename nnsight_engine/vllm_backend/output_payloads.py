"""What the worker sends along with a request's outputs, taken out again before vLLM reads them.

The scheduler puts parcels into the field of an output that connectors of keys and values would use, one for
each kind, under the kind's key (see ``scheduler``). In the API process they are taken out just before vLLM's
output processor turns engine outputs into request outputs, and handed to whoever knows the kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def on_parcels(output_processor: Any, kind: str, deliver: Callable[[Any, int], None]) -> None:
    """Hand over every parcel of a kind from now on.

    Args:
        output_processor: vLLM's.
        kind: The parcels' key.
        deliver: Is given a parcel and which of its request's choices it belongs to.
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
