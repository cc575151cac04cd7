"""Dialect of transformers models: the client sends inputs unchanged, and only checks the trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.envoys.tracers.invoker import Invoker
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.remote_backend.codecs import Codec
from nnsight_engine.remote_backend.identity import fingerprint_of, name_of
from nnsight_engine.remote_backend.sending.outgoing_trace import Dialect, Inputs, Resolve
from nnsight_engine.remote_backend.values.added_modules import added_part
from nnsight_engine.remote_backend.values.object_references import (
    HOME_CLASSES,
    ObjectReferences,
    reference_of,
)
from nnsight_engine.remote_backend.values.outcomes import SentPart
from nnsight_engine.serialization import DATA_ONLY, EncodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.envoys.tracers.editing import Edit
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
    from nnsight_engine.envoys.tracers.session import Session
    from nnsight_engine.tracing.tracer import Tracer


class TransformersDialect(Dialect):
    """Dialect of a model loaded from ``name``; ``rename`` holds the user's own names for modules."""

    name = "transformers"
    policy = DATA_ONLY.allowing(HOME_CLASSES)

    def __init__(
        self, model: Envoy, name: str, revision: str | None, rename: Mapping[str, Any] | None
    ) -> None:
        self.model = name_of(name) if name else ""
        self.revision = revision or ""
        self._envoy = model
        self._rename = rename
        config = getattr(model._module, "config", None)  # noqa: SLF001 - an envoy of ours
        self.fingerprint = "" if config is None else fingerprint_of(config)

    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        invokers = [one for one in tracer.invokers if isinstance(one, Invoker)]
        sources: list[Tracer] = [*invokers] or [tracer]
        method = self._method(tracer)
        shared = {
            "inputs": [(one.args, one.kwargs) for one in sources],
            "kwargs": tracer.kwargs if invokers else {},
            "validate": tracer.validate,
            "traced": tracer.model,
            "fn": tracer.function if method is None else None,
            **self._surroundings(),
        }
        return Inputs(shared=shared, method=method or "", edits=_sent(tracer.edits))

    def session(self, session: Session) -> Inputs:
        return Inputs(shared=self._surroundings(), edits=_sent(session.model._default_mediators))  # noqa: SLF001 - an envoy of ours

    def parts(self, codec: Codec) -> list[bytes]:
        return added_part(self._envoy, codec)

    def _surroundings(self) -> dict[str, Any]:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise EncodeError(
                "torch.autocast around a trace does not reach a server, whose devices may be others: enter "
                "it in the block"
            )
        return {
            "rename": None if self._rename is None else dict(self._rename),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
        }

    def _method(self, tracer: InterleavingTracer) -> str | None:
        """Return the name of the traced method, "" for a call of the module, None for a function."""
        function, model = tracer.function, tracer.model
        if function == model._run_module:  # noqa: SLF001 - an envoy of ours
            return ""
        owner = getattr(function, "__self__", None)
        if owner is not model and owner is not model._module:  # noqa: SLF001 - the same
            return None
        return str(function.__name__).removeprefix("__nnsight_").removesuffix("__")

    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        return reference_of(value, self._envoy, barriers)

    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        del outputs
        return ObjectReferences(self._envoy)


def _sent(edits: Sequence[Edit]) -> list[SentPart]:
    return [SentPart.alone(edit.info) for edit in edits]
