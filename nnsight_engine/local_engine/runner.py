"""Runs a client's trace or session on a ``LanguageModel`` here, and says what came of it.

The client has captured its blocks and nothing more; here they run as on its own machine: beside a pass of the
model, in a batch with each other, with gradients if they ask for them. ``process`` calls this, one trace at
a time, in a process that exists for that: reading a trace runs its sender's code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.tracers.editing import Edit
from nnsight_engine.envoys.tracers.session import Session
from nnsight_engine.local_engine.errors import TraceCancelledError
from nnsight_engine.local_engine.pristine import Pristine
from nnsight_engine.local_engine.received_tracer import ReceivedTracer
from nnsight_engine.remote_backend.added_modules import attached
from nnsight_engine.remote_backend.codecs import decode_blocks
from nnsight_engine.remote_backend.places import Places, place_of
from nnsight_engine.remote_backend.received import (
    SAVED,
    ReceivedInvoke,
    encoded_outcomes,
    invokes_of,
    outcome_of,
)
from nnsight_engine.tracing.tracebacks import clean
from nnsight_engine.wire import DecodeError, Limits, ReceivedTrace, encode_error

if TYPE_CHECKING:
    from nnsight_engine.modeling.language import LanguageModel
    from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest


class TraceRunner:
    """Runs traces on one model, one after the other.

    Args:
        model: The model, with its weights.
        max_result_bytes: What a trace may save.
        compresses: Whether results are compressed for clients that can read it.
    """

    def __init__(
        self, model: LanguageModel, *, max_result_bytes: int = Limits().max_bytes, compresses: bool = False
    ) -> None:
        """Take the model; nobody else is to use it from now on."""
        self._model = model
        self._limits = Limits(max_bytes=max_result_bytes)
        self._compresses = compresses
        self._pristine = Pristine(model)
        self._is_worn = False

    @property
    def is_worn(self) -> bool:
        """Whether a trace has changed the weights, so that others must not see them."""
        return self._is_worn

    def run(self, request: TraceRequest) -> bytes:
        """Return what came of a trace's blocks, see ``outcomes``.

        Raises:
            DecodeError: The trace cannot be read.
            TraceCancelledError: It was cancelled while it ran.
        """
        self._pristine.begin()
        SAVES.enter()
        try:
            return self._run(request)
        finally:
            SAVES.exit()
            self._tidy()

    def recover(self) -> None:
        """Make ready again after a trace that was cut off, wherever that was."""
        while SAVES.depth:
            SAVES.exit()
        self._tidy()
        self._is_worn |= self._model.interleaving

    def _tidy(self) -> None:
        self._model._rename(None)  # noqa: SLF001 - an envoy of ours
        self._is_worn |= not self._pristine.restore()
        gc.collect()  # errors and blocks refer to each other, and hold activations

    def _run(self, request: TraceRequest) -> bytes:
        head, model = request.head, self._model
        tracer = Session(model) if head.kind == "session" else ReceivedTracer(model)
        places = Places(model, tracer)
        # The server has checked whose codec it is, see ``app.auth.codecs``.
        with attached(model, request.parts[1:], head.codec, places):
            return self._run_on(request, tracer, places)

    def _run_on(self, request: TraceRequest, tracer: Session | ReceivedTracer, places: Places) -> bytes:
        head, model = request.head, self._model
        received = decode_blocks(head.codec, request.blocks, resolve=places, trusted=True)
        trace = _Trace(head, received)
        SAVES.marked.update({id(value): value for value in (*trace.saved, *received.saved)})
        error = self._outcome(trace, tracer)
        told = None if error is None else encode_error(error)
        del error  # whose traceback holds the block's frames, and what they hold
        blocks = [
            outcome_of(
                index,
                invoke.saves(SAVES.marked),
                told if index == 0 else None,
                flows=invoke.flows(SAVES.marked, head.wanted),
            )
            for index, invoke in enumerate(trace.invokes)
        ]
        message = {"blocks": blocks, "before": list(trace.saved)}
        return encoded_outcomes(
            message,
            lambda value: place_of(value, model),
            compress=self._compresses and "zstd" in head.accepts,
            limits=self._limits,
        )

    def _outcome(self, trace: _Trace, tracer: Session | ReceivedTracer) -> BaseException | None:
        """Run the blocks; returns what they raised."""
        shared = trace.shared
        try:
            with (
                torch.inference_mode(bool(shared.get("inference"))),
                torch.set_grad_enabled(bool(shared.get("grad", True))),
            ):
                if isinstance(tracer, Session):
                    self._session(trace, tracer)
                else:
                    self._trace(trace, tracer)
        except TraceCancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it goes to whoever wrote the block
            return clean(error, debug=False)
        return None

    def _trace(self, trace: _Trace, tracer: ReceivedTracer) -> None:
        model, shared = self._model, trace.shared
        model._rename(shared.get("rename"))  # noqa: SLF001 - an envoy of ours
        traced = shared.get("traced", model)
        tracer.receive(trace.invokes, shared.get("kwargs") or {}, trace.edits)
        if not isinstance(traced, Envoy):
            raise DecodeError("the trace is broken: what it traces is no module")
        given = shared.get("fn")
        function = _function_of(traced, trace.head.method) if given is None else given
        tracer.trace(function, traced, validate=bool(shared.get("validate")))

    def _session(self, trace: _Trace, session: Session) -> None:
        model = self._model
        model._rename(trace.shared.get("rename"))  # noqa: SLF001 - an envoy of ours
        model._default_mediators.extend(Edit(session, info) for info in trace.edits)  # noqa: SLF001 - the same
        (block,) = trace.invokes
        session.compile_on(block.info)()


class _Trace:
    """A trace as it was read, its parts checked.

    Raises:
        DecodeError: A part is not what it should be.
    """

    def __init__(self, head: TraceHead, received: ReceivedTrace) -> None:
        self.head = head
        self.shared: Mapping[str, Any] = received.shared
        num_own = len(received.blocks) - head.num_edits
        if num_own < 1 or (head.kind == "session" and num_own != 1):
            raise DecodeError(
                f"the trace is broken: it has {len(received.blocks)} blocks, and says that "
                f"{head.num_edits} of them are edits of a {head.kind}"
            )
        self.invokes: Sequence[ReceivedInvoke] = invokes_of(received.blocks[:num_own], head.groups[:num_own])
        self.edits = received.blocks[num_own:]
        self.saved: Collection[Any] = self.shared.get(SAVED) or []
        if head.kind == "trace":
            for invoke, (args, kwargs) in zip(self.invokes, _inputs(self.shared, num_own), strict=True):
                invoke.args, invoke.kwargs = args, kwargs


def _inputs(shared: Mapping[str, Any], num_invokes: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    given = shared.get("inputs")
    if (
        not isinstance(given, list)
        or len(given) != num_invokes
        or not all(isinstance(one, tuple) and len(one) == 2 for one in given)
        or not all(isinstance(args, tuple) and isinstance(kwargs, dict) for args, kwargs in given)
    ):
        raise DecodeError(f"the trace is broken: it needs inputs for its {num_invokes} invokes")
    return given


def _function_of(model: Envoy, method: str) -> Callable[..., Any]:
    """Return what runs the model: a call of the module, or a method of it."""
    if not method:
        return model._run_module  # noqa: SLF001 - an envoy of ours
    return model._traced(method, getattr(model._module, method))  # noqa: SLF001 - the same


__all__ = ["TraceRunner"]
