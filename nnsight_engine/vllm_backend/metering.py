"""Metering of requests with a context.

vLLM's own state of a request counts its tokens, even after an abort, and is read once the request is over.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final

from nnsight_engine.core.metering import UsageMeter
from nnsight_engine.core.work_context import current_work

_STOP: Final = "stop"


def count_tokens(output_processor: Any) -> None:
    add, process = output_processor.add_request, output_processor.process_outputs
    states = output_processor.request_states
    generating: weakref.WeakValueDictionary[str, UsageMeter] = weakref.WeakValueDictionary()

    @functools.wraps(add)
    def add_request(
        request: Any, prompt: Any, parent: Any = None, index: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        add(request, prompt, parent, index, *args, **kwargs)
        work = current_work()
        if work is not None:
            state = states[request.request_id]
            if index == 0:  # a prompt with several choices is one prompt, as in OpenAI's usage
                work.meter.prompt_tokens += state.prompt_len
            if state.detokenizer is not None:  # the request does not pool
                work.meter.watch(state.detokenizer.num_output_tokens)
                generating[request.request_id] = work.meter

    @functools.wraps(process)
    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        processed = process(outputs, *args, **kwargs)
        for output in outputs:
            if output.request_id not in states:
                meter, reason = generating.pop(output.request_id, None), output.finish_reason
                if meter is not None:
                    # A stop string is found here, and the engine does not know of it yet.
                    meter.finish_reasons.append(_STOP if reason is None else str(reason))
        return processed

    output_processor.add_request = add_request
    output_processor.process_outputs = process_outputs


def note_spent(seconds: float | None) -> None:
    work = current_work()
    if work is not None and seconds:
        work.meter.intervention_s += seconds


__all__ = ["count_tokens", "note_spent"]
