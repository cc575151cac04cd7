"""How models of the transformers library send their traces: invokes' inputs beside the blocks, as they are.

The server's model reads them as one here would, so nothing is prepared on this side but the check that it
could be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.envoys.cache import Cache, CacheView, Entry
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.remote_backend.identity import fingerprint_of
from nnsight_engine.remote_backend.outcomes import SentPart
from nnsight_engine.remote_backend.places import Places, reference_of
from nnsight_engine.remote_backend.sent import Dialect, Inputs, Resolve
from nnsight_engine.wire import DATA_ONLY, EncodeError

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer

HOME_CLASSES: Final = (Cache, CacheView, Entry)
"""What comes home beside data: these hold data and nothing else."""


class TransformersDialect(Dialect):
    """Traces of one model.

    Args:
        model: The model, with its weights or without.
        name: What the server is to know it by.
        rename: The user's own names for modules.
    """

    name = "transformers"
    policy = DATA_ONLY.allowing(HOME_CLASSES)

    def __init__(self, model: Envoy, name: str, rename: Mapping[str, Any] | None) -> None:
        """Speak for a model."""
        self.model = name
        self._envoy = model
        self._rename = rename
        config = getattr(model._module, "config", None)  # noqa: SLF001 - an envoy of ours
        self.fingerprint = "" if config is None else fingerprint_of(config)

    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        """Return what a trace runs on; see ``Dialect``."""
        has_invokes = bool(tracer.invokers)
        sources = tracer.invokers if has_invokes else [tracer]
        edits = [
            SentPart(edit.info, edit.info.variables, edit.info.variables)
            for edit in tracer.model._default_mediators  # noqa: SLF001 - an envoy of ours
        ]
        return Inputs(
            shared={
                "inputs": [(one.args, one.kwargs) for one in sources],
                "kwargs": tracer.kwargs if has_invokes else {},
                "validate": tracer.validate,
                "rename": None if self._rename is None else dict(self._rename),
            },
            method=self._method(tracer),
            edits=edits,
        )

    def _method(self, tracer: InterleavingTracer) -> str:
        """Return what of the module is traced: the name of a method, nothing for a call of it."""
        function = tracer.function
        if function == self._envoy._run_module:  # noqa: SLF001 - an envoy of ours
            return ""
        name = str(getattr(function, "__name__", ""))
        name = name.removeprefix("__nnsight_").removesuffix("__")
        owner = getattr(function, "__self__", None)
        if owner not in (self._envoy, tracer.model, self._envoy._module):  # noqa: SLF001 - the same
            raise EncodeError(
                "the trace runs a function of its own, `fn=`, and a server runs the model or one of its "
                "methods: leave `fn=` out, or put what it does into a session's block"
            )
        return name

    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        """Return the name of something that the server has itself; see ``places``."""
        return reference_of(value, self._envoy, barriers)

    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        """Return what finds the things that results name; see ``Dialect``."""
        del outputs
        return Places(self._envoy)
