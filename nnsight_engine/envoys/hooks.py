"""Decorators of an ``eproperty``'s stub that declare the source of its value.

All module calls of a trace are observed (see ``probes``), so these cost nothing. An engine's own decorator
runs before each request, and must ensure that the value will be provided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Stub = TypeVar("Stub", bound=Callable[..., Any])


def requires_output(stub: Stub) -> Stub:
    """Declare that the value is the output of the envoy's module."""
    return _declared(stub)


def requires_input(stub: Stub) -> Stub:
    """Declare that the value is the input of the envoy's module."""
    return _declared(stub)


def requires_operation_output(stub: Stub) -> Stub:
    """Declare that the value is the return value of an operation inside a forward."""
    return _declared(stub)


def requires_operation_input(stub: Stub) -> Stub:
    """Declare that the value is the arguments of an operation inside a forward."""
    return _declared(stub)


def _declared(stub: Stub) -> Stub:
    stub.needs_no_call = True  # type: ignore[attr-defined] # functions take attributes
    return stub
