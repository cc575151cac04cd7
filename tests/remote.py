"""A client for tests: traces a model here and has the blocks run by whatever takes a request's bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.remote_backend.outcomes import (
    SentPart,
    bring_home,
    groups_of,
    parts_of,
    read_outcomes,
    saved_containers,
)
from nnsight_engine.remote_backend.places import HOME_CLASSES, Places, reference_of
from nnsight_engine.remote_backend.received import SAVED
from nnsight_engine.tracing.tracer import Backend, Tracer
from nnsight_engine.wire import DATA_ONLY, SentBlock, encode_trace

Send = Callable[[TraceRequest], bytes]
HOME = DATA_ONLY.allowing(HOME_CLASSES)


class Elsewhere(Backend):
    """Sends a trace or a session, and brings home what it saved.

    Args:
        model: The client's model.
        send: Runs the request; returns the result's bytes.
        rename: The names that the client's model was given.
        wanted: Names to bring home although nobody saved them.
        **overrides: Shared values to send in place of the right ones.
    """

    def __init__(
        self,
        model: LanguageModel,
        send: Send,
        *,
        rename: Any = None,
        wanted: tuple[str, ...] = (),
        **overrides: Any,
    ) -> None:
        self._model = model
        self._send = send
        self._rename = rename
        self._wanted = list(wanted)
        self._overrides = overrides

    def __call__(self, tracer: Tracer | None = None) -> Any:
        function = super().__call__(tracer)
        if isinstance(tracer, InterleavingTracer):
            return self._trace(tracer, function)
        assert tracer is not None
        part = SentPart(tracer.info, tracer.info.variables, tracer.info.variables)
        return self._run([part], "session", {})

    def _trace(self, tracer: InterleavingTracer, function: Callable[[], Any]) -> Any:
        tracer._collect(function)
        invokers: Any = tracer.invokers
        inputs = [(one.args, one.kwargs) for one in invokers] or [(tracer.args, tracer.kwargs)]
        name = getattr(tracer.function, "__name__", "")
        shared = {
            "inputs": inputs,
            "kwargs": tracer.kwargs if invokers else {},
            "validate": tracer.validate,
            "traced": tracer.model,
        }
        method = name.removeprefix("__nnsight_").removesuffix("__") if name.startswith("__nnsight") else ""
        try:
            self._run(parts_of(tracer), "trace", shared, method)
        finally:
            for invoker in tracer.invokers:
                invoker.finish()
            tracer._let_go()

    def _run(self, parts: list[SentPart], kind: Any, shared: dict[str, Any], method: str = "") -> None:
        saved = saved_containers([part.own for part in parts])
        edits = [edit.info for edit in self._model._default_mediators]
        barriers: list[Barrier] = []
        data = encode_trace(
            [*(part.as_sent() for part in parts), *(SentBlock(info, info.variables) for info in edits)],
            {SAVED: saved, "rename": self._rename, **shared, **self._overrides},
            reference=lambda value: reference_of(value, self._model, barriers),
            saved=SAVES.marked,
        )
        head = TraceHead(
            model="tiny",
            dialect="transformers",
            kind=kind,
            method=method,
            groups=groups_of([part.outer for part in parts]),
            num_edits=len(edits),
            wanted=self._wanted,
        )
        request = TraceRequest.from_bytes(TraceRequest(head, [data]).to_bytes())
        result = self._send(request)
        bring_home(parts, read_outcomes(result, saved, resolve=Places(self._model), policy=HOME))
