"""Execution of a client's trace or session on a ``LanguageModel``, as on the client's machine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.tracers.interleaving import Edit, InterleavingTracer
from nnsight_engine.local_engine.block_runner import BlockRunner, ReadTrace, run_session
from nnsight_engine.local_engine.local_part import ClientCall, LocalPart
from nnsight_engine.local_engine.model_snapshot import ModelSnapshot
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.values.object_references import ObjectReferences, attached, place_of
from nnsight_engine.tracing.tracer import Session, compiled, refuse_statement

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.messages import TraceRequest
    from nnsight_engine.remote_backend.values.received_blocks import ReceivedInvoke
    from nnsight_engine.serialization.graph import Resolve
    from nnsight_engine.tracing.tracer import Info, Tracer


class ReceivedTracer(InterleavingTracer):
    """The object behind ``tracer`` in a received block; created before the blocks are decoded."""

    def __init__(self, model: Envoy, call_client: ClientCall | None = None) -> None:
        """Create the tracer; ``call_client`` runs parts at the client, None if there are none."""
        super().__init__(model._run_module, model)  # noqa: SLF001 - an envoy of ours
        self._call_client = call_client
        self._attempt = secrets.token_hex(16)
        self._turns = itertools.count()
        self._received: Sequence[ReceivedInvoke] = ()
        self._kept_edits: Sequence[Edit] = ()
        self.warnings: list[str] = []

    def receive(
        self, invokes: Sequence[ReceivedInvoke], kwargs: dict[str, Any], edits: Sequence[Info]
    ) -> None:
        """Set what was decoded; called before ``trace``."""
        self._received, self.kwargs = invokes, kwargs
        self._kept_edits = [Edit(self, info) for info in edits]

    def invoke(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002 - rejected whatever they are
        """Refuse: all invokes were received with the trace."""
        raise ValueError(
            "Cannot invoke during an active model execution / interleaving. Invokes stand side by side in a "
            "trace without an input of its own: `with model.trace() as tracer:`."
        )

    def local(self) -> Tracer:
        """Open a part that the client runs; LocalBlockError where it cannot be reached from."""
        current = self.interleaver.current
        if self._call_client is None:
            raise LocalBlockError.unreachable()
        if self.validate or current not in self.mediators:
            raise LocalBlockError.misplaced()
        number, root = self.mediators.index(current), self.model._root  # noqa: SLF001 - an envoy of ours
        assigned = {name for invoke in self._received for name in invoke.stored}
        kept = self._received[number].cells.keys() - assigned
        turn = next(self._turns)
        return LocalPart(root, self._call_client, attempt=self._attempt, turn=turn, number=number, kept=kept)

    def trace(self, function: Callable[..., Any], model: Envoy, *, validate: bool) -> Any:
        """Run ``function`` of the model with the received blocks."""
        self.function, self.model, self.validate = function, model, validate
        self.batcher = model._new_batcher()  # noqa: SLF001 - an envoy of ours
        return self.execute(_nothing)

    def _collect(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - the invokes are defined already
        """Add the received invokes; there is no block that would define them."""
        self.batcher.shared_kwargs = self.kwargs
        for invoke in self._received:
            self.invokers.append(invoke)
            block = compiled(invoke.info, invoke.cells, assignments=invoke.assignments)
            self.add(block, invoke.info, invoke.args, invoke.kwargs)
        self._check_input()

    @property
    def edits(self) -> Sequence[Edit]:
        return self._kept_edits

    def _warn(self, message: str) -> None:
        self.warnings.append(message)

    def _shares_variables(self) -> bool:
        return True  # the client has decided this: it states which variables are the same


def _nothing() -> None: ...


logger = logging.getLogger(__name__)


class TraceableModel(LanguageModel):
    """The model of a server. It ignores ``remote=``: a session's traces run in the session's process."""

    def trace(
        self, *args: Any, remote: Any = None, blocking: bool = True, **kwargs: Any
    ) -> InterleavingTracer:
        """Open a trace in this process, whatever ``remote`` and ``blocking`` a session's code gives."""
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

    @contextlib.contextmanager
    def _prepared(self, request: TraceRequest) -> Iterator[tuple[Tracer, Resolve]]:
        """Attach the request's modules, and yield the tracer and what resolves references."""
        if self.needs_replacement:
            raise RuntimeError("a trace has changed the model, and no other may run on it")
        head, model = request.head, self._model
        tracer: Tracer = (
            Session(model)
            if head.kind == "session"
            else ReceivedTracer(model, self._call_client if head.local_parts else None)
        )
        resolve = ObjectReferences(model, tracer)
        with attached(model, request.parts[1:], head.codec, resolve):
            yield tracer, resolve

    def _warnings(self, tracer: Tracer) -> Sequence[str]:
        return tracer.warnings if isinstance(tracer, ReceivedTracer) else ()

    def _reference(self, value: Any) -> tuple[str, ...] | None:
        return place_of(value, self._model)

    def _execute(self, trace: ReadTrace, tracer: Tracer) -> None:
        """Run the blocks with the modes, aliases and edits of the client."""
        model, shared = self._model, trace.shared
        with (
            torch.inference_mode(bool(shared.get("inference"))),
            torch.set_grad_enabled(bool(shared.get("grad", True))),
        ):
            model._rename(shared.get("rename"))  # noqa: SLF001 - an envoy of ours
            if isinstance(tracer, Session):
                model._default_mediators.extend(Edit(tracer, info) for info in trace.edits)  # noqa: SLF001 - likewise
                run_session(trace, tracer)
            elif isinstance(tracer, ReceivedTracer):
                traced, function = shared.get("traced", model), shared.get("fn")
                tracer.receive(trace.invokes, shared.get("kwargs") or {}, trace.edits)
                if function is None:
                    function = _function_of(traced, trace.head.method)
                tracer.trace(function, traced, validate=bool(shared.get("validate")))


class TraceRunner(ModelRunner):
    """Runs traces on one model, for exclusive use; each finds the model as it was loaded."""

    def __init__(self, model: LanguageModel, call_client: ClientCall | None = None, **options: Any) -> None:
        super().__init__(model, call_client, **options)
        self._snapshot = ModelSnapshot(model)

    def recover(self) -> None:
        super().recover()
        self.needs_replacement |= self._model.interleaving

    def _clean_up(self) -> None:
        if self._snapshot.is_suspect:  # so that its client can be notified
            self.settle()

    def settle(self) -> bool:
        """Restore the model; return False, from then on, if that is not possible."""
        if not self.needs_replacement:
            try:
                self._model._rename(None)  # noqa: SLF001 - an envoy of ours
                self.needs_replacement = not self._snapshot.restore()
            except Exception:
                logger.exception("a trace left changes that cannot be undone")
                self.needs_replacement = True
        return not self.needs_replacement


def _function_of(model: Envoy, method: str) -> Callable[..., Any]:
    if not method:
        return model._run_module  # noqa: SLF001 - an envoy of ours
    return model._traced(method, getattr(model._module, method))  # noqa: SLF001 - likewise
