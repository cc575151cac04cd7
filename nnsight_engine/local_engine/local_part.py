"""The engine's side of ``with tracer.local():``, a part of a block that runs at the client.

The block waits. The client receives the variables that the body reads, and returns its assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content
from nnsight_engine.core.saves import SAVES
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.local_engine.trace_process import LOCAL
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.frames import FrameKind
from nnsight_engine.remote_backend.sending.local_parts import (
    GIVEN,
    PartRequest,
    PartResult,
    names_read,
    place_of,
    plain,
    read_part,
)
from nnsight_engine.remote_backend.sending.outgoing_trace import refused
from nnsight_engine.remote_backend.values.object_references import ObjectReferences
from nnsight_engine.remote_backend.values.object_references import place_of as place_in
from nnsight_engine.serialization import TRUSTED, DecodeError, decode, encode, restore_error
from nnsight_engine.tracing.tracer import Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.local_engine.serving import ServerRequests
    from nnsight_engine.serialization.graph import Resolve

ClientCall = Callable[[bytes], bytes | bytearray | memoryview]
"""Sends a request to the client and returns the answer; raises LocalBlockError if there is none."""

_KNOWN_TO_CLIENT: Final = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, Tracer)
"""Kinds of values that the client has itself, and no block changes."""
_IMMUTABLE: Final = (str, int, float, complex, bytes, type(None))


def call_client_through_server(
    server_requests: ServerRequests, data: bytes
) -> bytes | bytearray | memoryview:
    """Ask a trace's client through its server; LocalBlockError if none answers or can be asked."""
    server_requests.send({LOCAL: True}, data)
    frame = server_requests.answer()
    if frame.kind is FrameKind.RESULT:
        return frame.data
    raise LocalBlockError(str(refused(frame)))


class LocalPart(Tracer):
    """``with tracer.local():`` in a received block."""

    def __init__(
        self,
        model: Envoy,
        call_client: ClientCall,
        *,
        attempt: str,
        turn: int,
        number: int,
        kept: Collection[str],
    ) -> None:
        """Create part ``turn``, counted from 0, of run ``attempt``, in block ``number`` of the trace.

        ``kept`` variables are assigned by no block, so that the client has their values.
        """
        super().__init__()
        self._model = model
        self._attempt = attempt
        self._turn = turn
        self._number = number
        self._client_values = kept
        self._call_client = call_client

    def execute(self, function: Callable[[], Any]) -> None:
        """Have the client run the body, and assign its variables; the body's errors are raised here.

        LocalBlockError: no client answers, or it cannot locate the body. EncodeError, DecodeError: a value
        cannot pass.
        """
        del function  # the client runs it
        info = self.info
        if info.frame is not None:
            raise LocalBlockError.misplaced()
        cells, values = info.variables, self._values()
        outer_assignments = info.assignments
        assignments = Assignments(cells) if outer_assignments is None else outer_assignments.inside(cells)
        part_request = PartRequest(
            attempt=self._attempt,
            turn=self._turn,
            block=self._number,
            place=place_of(info.block.origin),
            names=sorted(cells),
            values=values,
        )
        data = self._call_client(encode(plain(part_request), reference=self._reference))
        decoded = decode(
            data, resolve=self._resolver(values), policy=TRUSTED, device=self._model.device or "cpu"
        )
        done = read_part(decoded, PartResult)
        if done.error is not None:
            raise restore_error(done.error)
        has_gradients = any(map(_has_gradients, values.values()))
        for name, value in done.values.items():
            if name not in info.block.stored or name not in cells:
                raise DecodeError(f"the answer of tracer.local() assigns {name!r}, which its body does not")
            if has_gradients and name in done.computed:
                value = map_tensors(value, _without_gradients)  # noqa: PLW2901 - without gradients
            assignments[name] = value
            if name in done.saved:
                SAVES.mark(value)
        for name in done.deleted:
            if name in info.block.stored and name in cells and content(cells[name]) is not UNBOUND:
                del assignments[name]

    def _values(self) -> dict[str, Any]:
        """Return the variables to send: those that the body reads and that the client may not have."""
        block = self.info.block
        names = names_read(block.origin.body, block.context.class_name)
        values = {name: content(cell) for name, cell in self.info.variables.items() if name in names}
        return {
            name: value
            for name, value in values.items()
            if value is not UNBOUND and self._may_differ(name, value)
        }

    def _may_differ(self, name: str, value: Any) -> bool:
        """Return whether the client's value of a variable may be another one than this."""
        return name not in self._client_values or not (
            isinstance(value, (*_KNOWN_TO_CLIENT, *_IMMUTABLE)) or self._reference(value) is not None
        )

    def _reference(self, value: Any) -> tuple[str, ...] | None:
        return place_in(value, self._model)

    def _resolver(self, values: dict[str, Any]) -> Resolve:
        """Return the function that finds what a reference in the answer means: a sent value, or a place."""
        places = ObjectReferences(self._model)

        def resolve(reference: tuple[str, ...]) -> Any:
            if len(reference) == 2 and reference[0] == GIVEN and reference[1] in values:
                return values[reference[1]]
            return places(reference)

        return resolve


def _has_gradients(value: Any) -> bool:
    flags: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        flags.append(tensor.requires_grad)
        return tensor

    map_tensors(value, look)
    return any(flags)


class _NoGradient(torch.autograd.Function):
    """Raises an error in the backward pass for gradients that would have to pass through the client."""

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise LocalBlockError.without_gradients()


def _without_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose backward pass raises an error: it was computed at the client."""
    if not tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        result: torch.Tensor = _NoGradient.apply(tensor)  # type: ignore[no-untyped-call] # untyped in torch
    return result
