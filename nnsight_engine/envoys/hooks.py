"""What stands on an ``eproperty``'s stub, to say where its value comes from.

While a trace runs, every module's calls are counted and looked at (see ``probes``), so a module's input and
output need no further preparation: the decorators declare the need, and cost nothing when the property is
read. An engine that provides values in its own way writes its own decorator; it runs before each request,
and must see to it that the value will be provided.
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
    """Declare that the value is what an operation inside a forward returns."""
    return _declared(stub)


def requires_operation_input(stub: Stub) -> Stub:
    """Declare that the value is what an operation inside a forward is called with."""
    return _declared(stub)


def _declared(stub: Stub) -> Stub:
    stub.needs_no_call = True  # type: ignore[attr-defined] # functions take attributes
    return stub
