"""References for values of a closed block: the request's result, and places in the model."""

from __future__ import annotations

from typing import Any

from nnsight_engine.vllm_backend.json_values import NotPlainError, SaveBudget, plain_saves
from nnsight_engine.vllm_backend.traces.points import place_of


class Result:
    """The value of ``tracer.result`` in the worker; the client replaces a saved one with its own result.

    ``reference`` is the client's name for it: the request's, or ``"<request>/<choice>"`` where choices have
    their own.
    """

    def __init__(self, plain: Any, reference: str) -> None:
        self._reference = reference
        for name, value in (plain or {}).items():
            setattr(self, name, value)

    @property
    def reference(self) -> tuple[str, str]:
        return "result", self._reference


def client_reference(value: Any) -> tuple[str, ...] | None:
    """Return the reference for a result, or for a place in the model; the client has both. Else None."""
    if isinstance(value, Result):
        return value.reference
    return place_of(value)


def checked(saves: dict[str, Any], max_bytes: int) -> tuple[dict[str, Any], NotPlainError | None]:
    """Return the saved values if JSON can represent them; otherwise an empty dict and the error."""
    try:
        plain_saves(saves, lambda _tensor: None, SaveBudget(max_bytes), frozenset({Result}))
    except NotPlainError as error:
        return {}, error
    return saves, None


__all__ = ["Result", "checked", "client_reference"]
