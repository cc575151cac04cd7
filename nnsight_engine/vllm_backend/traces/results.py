"""What a block leaves behind when it is closed: what its request returned, and what may stand for values."""

from __future__ import annotations

from typing import Any

from nnsight_engine.vllm_backend.json_values import NotPlainError, plain_saves
from nnsight_engine.vllm_backend.traces.points import place_of


class Result:
    """What ``tracer.result`` is in the worker; the client puts its own in the place of a saved one."""

    def __init__(self, plain: Any) -> None:
        """Have what it has as attributes."""
        for name, value in (plain or {}).items():
            setattr(self, name, value)


def home_reference(value: Any) -> tuple[str, ...] | None:
    """Name a result, which need not travel back, and places in the model, which the client has."""
    if isinstance(value, Result):
        return ("result", str(getattr(value, "request", "")))
    return place_of(value)


def checked(saves: dict[str, Any]) -> tuple[dict[str, Any], NotPlainError | None]:
    """Return what was saved if JSON has a place for it, nothing and why otherwise."""
    try:
        plain_saves(saves, lambda _tensor: None, frozenset({Result}))
    except NotPlainError as error:
        return {}, error
    return saves, None


__all__ = ["Result", "checked", "home_reference"]
