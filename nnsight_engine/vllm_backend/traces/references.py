"""References by which a trace on vLLM names objects that exist in the worker."""

from __future__ import annotations

from typing import Any

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.serialization import EncodeError
from nnsight_engine.tracing.tracer import Tracer
from nnsight_engine.vllm_backend.traces.points import place_of


def reference_of(value: Any, model: Envoy, barriers: list[Barrier]) -> tuple[str, ...] | None:
    """Return the reference of an object that is looked up in the worker; None for objects that are sent.

    EncodeError if the object is a module of another model, which the worker does not have.
    """
    if isinstance(value, Envoy) and value._root is not model._root:  # noqa: SLF001 - envoys of ours
        raise EncodeError(
            f"the block uses {value.path} of another model than the one it traces; the engine has that one "
            "alone. Save the other model's values in a trace of its own, and use them here"
        )
    place = place_of(value)
    if place is not None:
        return place
    if isinstance(value, Tracer):
        return ("tracer",)
    if isinstance(value, Barrier):
        return ("barrier", str(barriers.index(value)), str(value.participants))
    return None
