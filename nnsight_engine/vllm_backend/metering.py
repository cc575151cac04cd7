"""What requests use of vLLM, noted with the meter of whoever asks: their tokens, and seconds of its workers.

Nothing is done for each token: vLLM's own state of a request knows how many there are, also after an abort,
and is asked once, when the request is over. Requests on whose behalf nobody counts are left alone.
"""

from __future__ import annotations

import functools
from typing import Any

from nnsight_engine.core.metering import METER


def count_tokens(output_processor: Any) -> None:
    """Have the tokens of every request counted from now on that comes with a meter.

    Args:
        output_processor: vLLM's.
    """
    add = output_processor.add_request

    @functools.wraps(add)
    def add_request(
        request: Any, prompt: Any, parent: Any = None, index: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        add(request, prompt, parent, index, *args, **kwargs)
        meter = METER.get()
        if meter is not None:
            state = output_processor.request_states[request.request_id]
            # A prompt with several choices is one prompt, as in OpenAI's usage.
            meter.watch(functools.partial(_num_tokens, state, counts_prompt=index == 0))

    output_processor.add_request = add_request


def note_spent(seconds: float | None) -> None:
    """Note seconds for which the engine waited for the request on whose behalf this runs."""
    meter = METER.get()
    if meter is not None and seconds:
        meter.intervention_s += seconds


def _num_tokens(state: Any, *, counts_prompt: bool) -> int:
    generated: int = state.detokenizer.num_output_tokens()
    return generated + (state.prompt_len if counts_prompt else 0)


__all__ = ["count_tokens", "note_spent"]
