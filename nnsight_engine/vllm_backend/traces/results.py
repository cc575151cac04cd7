"""References for values of a closed block: the request's result, and places in the model."""

from __future__ import annotations

from typing import Any

from nnsight_engine.vllm_backend.json_values import NotPlainError, plain_saves
from nnsight_engine.vllm_backend.traces.points import place_of


class Result:
    """The value of ``tracer.result`` in the worker; the client replaces a saved one with its own result."""

    def __init__(self, plain: Any) -> None:
        """Set the plain result's items as attributes."""
        for name, value in (plain or {}).items():
            setattr(self, name, value)


def client_reference(value: Any) -> tuple[str, ...] | None:
    """Return the reference for a result, or for a place in the model; the client has both. Else None."""
    if isinstance(value, Result):
        return ("result", str(getattr(value, "request", "")))
    return place_of(value)


def checked(saves: dict[str, Any]) -> tuple[dict[str, Any], NotPlainError | None]:
    """Return the saved values if JSON can represent them; otherwise an empty dict and the error."""
    try:
        plain_saves(saves, lambda _tensor: None, frozenset({Result}))
    except NotPlainError as error:
        return {}, error
    return saves, None


__all__ = ["Result", "checked", "client_reference"]
