"""Detects the last denoising step of a pipeline, after which the pipeline still decodes an image.

Loops over steps end with the last one, so that the code after them can read later values; with a pipeline
without such a callback they end with the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

_CALLBACK: Final = "callback_on_step_end"
_INPUTS: Final = "callback_on_step_end_tensor_inputs"


def with_last_step(pipeline: Any, kwargs: dict[str, Any], ended: Callable[[], None]) -> dict[str, Any]:
    if _CALLBACK not in inspect.signature(type(pipeline).__call__).parameters:
        return kwargs
    given = kwargs.get(_CALLBACK)

    def step_ended(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        changed = given(pipe, step, time, values) if given is not None else values
        if step + 1 == getattr(pipe, "num_timesteps", None):
            ended()
        return changed if changed is not None else {}

    chained = {**kwargs, _CALLBACK: step_ended}
    inputs = getattr(given, "tensor_inputs", None)  # set on diffusers' own callbacks
    if inputs is not None:
        chained[_INPUTS] = inputs
    return chained
