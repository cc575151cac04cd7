"""Properties that wait: reading one requests a value from the running model, assigning one replaces it.

All module calls of a trace are observed (see ``values``), so decorators that declare the source of a value
cost nothing. An engine's own decorator runs before each request, and must ensure that the value will be
provided.

While gradients are recorded, torch rejects in-place edits of the results of ``unbind``, ``split`` and similar
functions, because such a call returns several views at once. A view of the same memory that was created alone
may be edited.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from nnsight_engine.core.read_listener import ReadListener
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.mediator import running
from nnsight_engine.tracing.frames import for_user, users_line

if TYPE_CHECKING:
    from nnsight_engine.interleaving.interleaver import Interleaver

T = TypeVar("T")

_creation = torch._C._autograd._get_creation_meta
_ONE_OF_SEVERAL = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE


def editable(value: T) -> T:
    """Return ``value`` with each view that torch would not let edit replaced by an editable one.

    Torch rejects edits in place of the results of ``unbind``, ``split`` and others, which a call returns
    several of at once.
    """
    return map_tensors(value, _as_single_view)


def _as_single_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that was created together with others as one created alone, of the same memory."""
    base = tensor._base
    if base is None or not tensor.requires_grad or _creation(tensor) != _ONE_OF_SEVERAL:
        return tensor
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})
_BETWEEN = frozenset({"PRECALL", "CACHE", "KW_NAMES"})


def is_for_help(frame: FrameType) -> bool:
    """Return whether the value that ``frame`` is reading is the only argument of a call of ``help``."""
    instructions = list(dis.get_instructions(frame.f_code))
    current = next(
        (index for index, instruction in enumerate(instructions) if instruction.offset >= frame.f_lasti), None
    )
    if current is None:
        return False
    call_index = current + 1
    while call_index < len(instructions) and instructions[call_index].opname in _BETWEEN:
        call_index += 1
    if (
        call_index == len(instructions)
        or instructions[call_index].opname != "CALL"
        or instructions[call_index].arg != 1
    ):
        return False
    call_position = instructions[call_index].positions
    return any(
        instruction.opname in _LOADS
        and instruction.argval == "help"
        and instruction.positions is not None
        and call_position is not None
        and (instruction.positions.lineno, instruction.positions.col_offset)
        == (call_position.lineno, call_position.col_offset)
        for instruction in instructions[:current]
    )


class IEnvoy(Protocol):
    """Interface of objects with such properties: an interleaver, and a path unless the values need none."""

    interleaver: Interleaver
    path: str | None


class eproperty:  # noqa: N801 - it is used like property
    """A property whose value comes from the model while it runs.

    Decorate a stub with it: the stub's name and docstring become the property's, its body does nothing.
    Decorators of the stub declare how the model provides the value, for example
    ``@requires_output``::

        class BlockEnvoy(Envoy):
            @eproperty(key="output")
            @requires_output
            def hidden(self):
                '''The residual stream after this block.'''

            @hidden.preprocess
            def hidden(self, value):
                return value[0] if isinstance(value, tuple) else value

    Args:
        key: Name of the provider after the path, ``<path>.<key>``; the stub's name by default. Several
            properties may share a key and give different views of one value.
        description: A short label; the printed tree shows properties that have one.
        iterate: Whether the value is provided again at every call, so that requests carry a call number.
    """

    def __init__(self, key: str | None = None, description: str | None = None, iterate: bool = True) -> None:  # noqa: FBT001, FBT002 - the documented signature
        """Create the decorator; it becomes the property when it is called with the stub."""
        self.key = key
        self.description = description
        self.iterate = iterate
        self.name = ""
        self._providers: dict[str | None, str] = {}
        self._stub: Callable[[Any], Any] | None = None
        self._preprocess: Callable[[Any, Any], Any] | None = None
        self._postprocess: Callable[[Any, Any], Any] | None = None
        self._transform: Callable[[Any], Any] | None = None

    def __call__(self, stub: Callable[..., Any]) -> eproperty:
        """Receive the stub with its decorators."""
        self.name = stub.__name__
        self.key = self.key or stub.__name__
        self.__doc__ = stub.__doc__
        self._stub = None if getattr(stub, "needs_no_call", False) else stub
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name
        self.key = self.key or name

    def preprocess(self, function: Callable[[Any, Any], Any]) -> eproperty:
        """Register ``function(self, value)``, whose result is the value that is read."""
        self._preprocess = function
        return self

    def postprocess(self, function: Callable[[Any, Any], Any]) -> eproperty:
        """Register ``function(self, value)``, whose result is written when the property is assigned."""
        self._postprocess = function
        return self

    def transform(self, function: Callable[[Any], Any]) -> eproperty:
        """Register ``function(value)``, which converts the result of ``preprocess`` to the model's form.

        Needed if ``preprocess`` makes a copy: when the block has edited it and makes its next request, the
        converted value replaces the model's. Views need no conversion.
        """
        self._transform = function
        return self

    def provider(self, holder: Any) -> str:
        """Return the name under which the model provides the value."""
        path = getattr(holder, "path", None)
        provider = self._providers.get(path)
        if provider is None:
            provider = self._providers[path] = f"{path}.{self.key}" if path else str(self.key)
        return provider

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        """Wait for the value and return it.

        Raises:
            ValueError: No block is running.
            MissedProviderError: The value was provided already, or never arrived.
        """
        if holder is None:
            return self
        interleaver: Interleaver = holder.interleaver
        mediator = interleaver.current
        if mediator is None:
            return self if is_for_help(sys._getframe(1)) else outside(holder, self)
        if self._stub is not None:
            self._stub(holder)
        provider = self._providers.get(getattr(holder, "path", None)) or self.provider(holder)
        number = mediator.iteration if self.iterate else None
        if number is None and self.iterate:
            number = (mediator.interleaver or interleaver).call_number(provider)
        value = mediator.send_event(Events.VALUE, provider, number)
        if self._preprocess is not None:
            value = editable(self._preprocess(holder, value))
        if self._transform is not None:
            mediator.transform = functools.partial(self._transform, value)
        if ReadListener.listener is not None:
            ReadListener.listener(sys._getframe(1), holder, self.name, value)
        return value

    def __set__(self, holder: Any, value: Any) -> None:
        """Wait for the value and replace it.

        Raises:
            ValueError: No block is running, or the new value does not fit.
            MissedProviderError: The value was provided already, or never arrived.
        """
        interleaver: Interleaver = holder.interleaver
        mediator = interleaver.current
        if mediator is None:
            raise for_user(
                another_models(holder)
                or ValueError(
                    f"Cannot set {self.name} of {type(holder).__name__} that is not interleaving: assign it "
                    "inside `with model.trace(...):`."
                )
            )
        if self._stub is not None:
            self._stub(holder)
        if self._postprocess is not None:
            value = self._postprocess(holder, value)
        provider = self.provider(holder)
        number = (mediator.interleaver or interleaver).call_number(provider) if self.iterate else None
        changed = mediator.send_event(Events.SWAP, provider, number, value)
        if changed and mediator.interleaver is not None:
            mediator.interleaver.suspect(f"{provider} was assigned {users_line()}: {changed}")

    def provide(self, holder: Any, value: Any) -> Any:
        """Provide the value from the model's side; return it as the blocks have left it."""
        return holder.interleaver.handle(self.provider(holder), value, iterate=self.iterate)


def outside(holder: Any, prop: eproperty) -> Any:
    """Return a scanned value, without a running block; ValueError if the holder has none."""
    fake = getattr(holder, "fake_value", None)
    if fake is not None:
        is_scanned, value = fake(prop)
        if is_scanned:
            return value
    raise for_user(
        another_models(holder)
        or ValueError(
            f"Cannot return {prop.name} of {type(holder).__name__} that is not interleaving nor has a fake "
            f"{prop.name} set. The model did not execute: read `.{prop.name}` inside `with "
            "model.trace(input):`, or inside `with tracer.invoke(input):` if the trace itself has no input."
        )
    )


def another_models(holder: Any) -> ValueError | None:
    """Return the error for a request in the block of another model's trace; None outside of blocks."""
    mediator = running()
    if mediator is None:
        return None
    tracer = getattr(mediator.interleaver, "tracer", None)
    models = (getattr(holder, "_root", None), getattr(tracer, "model", None))
    other, traced = (type(getattr(model, "_module", model)).__name__ for model in models)
    return ValueError(
        f"{holder.path} belongs to another model, {other}, than the one whose trace this is, {traced}: the "
        "block waits beside a run of that one only. Trace the other model before or after this trace, or in "
        "a `with` statement of its own inside this block, and use the values here."
    )


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
