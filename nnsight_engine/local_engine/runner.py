"""Execution of a client's trace or session on a ``LanguageModel``, as on the client's machine."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.tracers.editing import Edit
from nnsight_engine.envoys.tracers.session import Session
from nnsight_engine.local_engine.block_runner import BlockRunner, ReadTrace, run_session
from nnsight_engine.local_engine.local_part import ClientCall
from nnsight_engine.local_engine.model_snapshot import ModelSnapshot
from nnsight_engine.local_engine.received_tracer import ReceivedTracer
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.values.added_modules import attached
from nnsight_engine.remote_backend.values.object_references import ObjectReferences, place_of
from nnsight_engine.tracing.tracer import refuse_statement

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
    from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
    from nnsight_engine.serialization.decoding.decoder import Resolve
    from nnsight_engine.tracing.tracer import Tracer


logger = logging.getLogger(__name__)


class TraceableModel(LanguageModel):
    """The model of a server. It ignores ``remote=``: a session's traces run in the session's process."""

    def trace(
        self, *args: Any, remote: Any = None, blocking: bool = True, **kwargs: Any
    ) -> InterleavingTracer:
        del remote, blocking
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - the caller's frame is examined
        return super().trace(*args, remote=False, **kwargs)

    def _new_local_part(self) -> NoReturn:
        raise LocalBlockError.in_session()


class ModelRunner(BlockRunner):
    """Runs traces on a model without undoing their changes."""

    def __init__(self, model: LanguageModel, call_client: ClientCall | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._model = model
        self._call_client = call_client

    def _clean_up(self) -> None:
        self._model._rename(None)  # noqa: SLF001 - an envoy of ours

    def _tracer(self, head: TraceHead) -> Tracer:
        if head.kind == "session":
            return Session(self._model)
        return ReceivedTracer(self._model, self._call_client if head.local_parts else None)

    def _resolver(self, tracer: Tracer) -> ObjectReferences:
        return ObjectReferences(self._model, tracer)

    def _warnings(self, tracer: Tracer) -> Sequence[str]:
        return tracer.warnings if isinstance(tracer, ReceivedTracer) else ()

    def _prepared(self, request: TraceRequest, resolve: Resolve) -> AbstractContextManager[None]:
        return attached(self._model, request.parts[1:], request.head.codec, resolve)

    def _reference(self, value: Any) -> tuple[str, ...] | None:
        return place_of(value, self._model)

    def _execute(self, trace: ReadTrace, tracer: Tracer) -> None:
        shared = trace.shared
        with (
            torch.inference_mode(bool(shared.get("inference"))),
            torch.set_grad_enabled(bool(shared.get("grad", True))),
        ):
            self._execute_here(trace, tracer)

    def _execute_here(self, trace: ReadTrace, tracer: Tracer) -> None:
        model, shared = self._model, trace.shared
        model._rename(shared.get("rename"))  # noqa: SLF001 - an envoy of ours
        if isinstance(tracer, Session):
            model._default_mediators.extend(Edit(tracer, info) for info in trace.edits)  # noqa: SLF001 - likewise
            run_session(trace, tracer)
        elif isinstance(tracer, ReceivedTracer):
            traced, given = shared.get("traced", model), shared.get("fn")
            tracer.receive(trace.invokes, shared.get("kwargs") or {}, trace.edits)
            function = _function_of(traced, trace.head.method) if given is None else given
            tracer.trace(function, traced, validate=bool(shared.get("validate")))


class TraceRunner(ModelRunner):
    """Runs traces on one model, for exclusive use; each finds the model as it was loaded."""

    def __init__(self, model: LanguageModel, call_client: ClientCall | None = None, **options: Any) -> None:
        super().__init__(model, call_client, **options)
        self._pristine = ModelSnapshot(model)
        self._needs_replacement = False
        self._is_settled = True

    @property
    def needs_replacement(self) -> bool:
        return self._needs_replacement

    def recover(self) -> None:
        super().recover()
        self._needs_replacement |= self._model.interleaving

    def _clean_up(self) -> None:
        self._is_settled = False
        if self._pristine.is_suspect:  # so that its client can be notified
            self.settle()

    def settle(self) -> bool:
        if not self._is_settled:
            self._is_settled = True
            try:
                self._model._rename(None)  # noqa: SLF001 - an envoy of ours
                self._needs_replacement |= not self._pristine.restore()
            except Exception:
                logger.exception("a trace left changes that cannot be undone")
                self._needs_replacement = True
            gc.collect()  # errors and blocks form reference cycles, which hold activations
        return not self._needs_replacement

    def _tracer(self, head: TraceHead) -> Tracer:
        if not self.settle():
            raise RuntimeError("a trace has changed the model, so no other trace may run on it")
        self._pristine.begin()
        return super()._tracer(head)


def _function_of(model: Envoy, method: str) -> Callable[..., Any]:
    if not method:
        return model._run_module  # noqa: SLF001 - an envoy of ours
    return model._traced(method, getattr(model._module, method))  # noqa: SLF001 - likewise


__all__ = ["ModelRunner", "TraceRunner", "TraceableModel"]
