"""Metering of requests: tokens, and seconds of the workers' time, recorded in the caller's meter.

There is no cost per token: vLLM's own state of a request counts its tokens, even after an abort, and is read
once the request is over. Requests without a context are not counted.
"""

from __future__ import annotations

import functools
from typing import Any

from nnsight_engine.core.work_context import current_work


def count_tokens(output_processor: Any) -> None:
    """Count the tokens of all requests that are added from now on and have a context.

    Args:
        output_processor: vLLM's output processor.
    """
    add = output_processor.add_request

    @functools.wraps(add)
    def add_request(
        request: Any, prompt: Any, parent: Any = None, index: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        add(request, prompt, parent, index, *args, **kwargs)
        work = current_work()
        if work is not None:
            state = output_processor.request_states[request.request_id]
            # A prompt with several choices is one prompt, as in OpenAI's usage.
            work.meter.watch(functools.partial(_num_tokens, state, counts_prompt=index == 0))

    output_processor.add_request = add_request


def note_spent(seconds: float | None) -> None:
    """Record seconds for which the engine waited for the current request."""
    work = current_work()
    if work is not None and seconds:
        work.meter.intervention_s += seconds


def _num_tokens(state: Any, *, counts_prompt: bool) -> int:
    # A request that pools has no detokenizer.
    generated = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
    return int(generated) + (state.prompt_len if counts_prompt else 0)


__all__ = ["count_tokens", "note_spent"]
