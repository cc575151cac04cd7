"""Where the denoising steps of a pipeline end, which still decodes an image after the last.

Pipelines of diffusers tell a callback of each step. Loops over steps end with the last one, so that what
stands after them can read what comes then; with a pipeline that has no such callback they end with the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

_CALLBACK: Final = "callback_on_step_end"
_INPUTS: Final = "callback_on_step_end_tensor_inputs"


def with_last_step(pipeline: Any, kwargs: dict[str, Any], ended: Callable[[], None]) -> dict[str, Any]:
    """Return the arguments of a pipeline that will call ``ended`` once its last denoising step is over.

    Args:
        pipeline: The pipeline.
        kwargs: Its arguments, whose own callback is called too.
        ended: Takes note.
    """
    if _CALLBACK not in inspect.signature(type(pipeline).__call__).parameters:
        return kwargs
    given = kwargs.get(_CALLBACK)

    def step_ended(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        changed = given(pipe, step, time, values) if given is not None else values
        if step + 1 == getattr(pipe, "num_timesteps", None):
            ended()
        return changed if changed is not None else {}

    chained = {**kwargs, _CALLBACK: step_ended}
    inputs = getattr(given, "tensor_inputs", None)  # of diffusers' own callbacks
    if inputs is not None:
        chained[_INPUTS] = inputs
    return chained
