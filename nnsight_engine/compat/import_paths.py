"""The documented import paths of nnsight's ``intervention`` package, as one table.

Each path is a module that defines nothing: a name is loaded from the module where it is defined here.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_INTERLEAVING: Final = "nnsight_engine.interleaving"
_TRACERS: Final = "nnsight_engine.envoys.tracers"
_COMPAT: Final = "nnsight_engine.compat"

PATHS: Final = {
    "backends.base": {"nnsight_engine.tracing.tracer": "Backend"},
    "backends.execution": {"nnsight_engine.tracing.tracer": "ExecutionBackend"},
    "backends.remote": {"nnsight_engine.remote_backend.client.backend": "RemoteBackend"},
    "batching": {f"{_INTERLEAVING}.batching": "Batchable Batcher"},
    "envoy": {
        "nnsight_engine.envoys.envoy": "Envoy",
        "nnsight_engine.envoys.eproperty": "eproperty",
        "nnsight_engine.envoys.operations": "OperationEnvoy SourceEnvoy",
    },
    "hooks": {
        "nnsight_engine.envoys.eproperty": "requires_input requires_operation_input"
        " requires_operation_output requires_output",
    },
    "interleaver": {
        "nnsight_engine.envoys.eproperty": "IEnvoy eproperty",
        f"{_INTERLEAVING}.events": "Cancelation EarlyStopException Events MissedProviderError"
        " OutOfOrderError SkipException",
        f"{_INTERLEAVING}.interleaver": "Interleaver",
        f"{_INTERLEAVING}.mediator": "Mediator",
    },
    "serialization": {f"{_COMPAT}.dumps": "dumps loads"},
    "tracing.backwards": {f"{_TRACERS}.interleaving": "BackwardsTracer"},
    "tracing.base": {
        "nnsight_engine.tracing.source_text": "WithBlockNotFoundError",
        "nnsight_engine.tracing.tracer": "Info Tracer",
    },
    "tracing.editing": {f"{_TRACERS}.interleaving": "EditingTracer"},
    "tracing.globals": {f"{_COMPAT}.custom_backends": "Globals", "nnsight_engine.core.saves": "save"},
    "tracing.invoker": {f"{_TRACERS}.interleaving": "Invoker"},
    "tracing.iterator": {f"{_TRACERS}.steps": "IteratorTracer"},
    "tracing.tracer": {
        "nnsight_engine.envoys.cache": "Cache",
        f"{_TRACERS}.interleaving": "InterleavingTracer ScanningTracer",
        f"{_INTERLEAVING}.shared_variables": "Barrier",
        "nnsight_engine.tracing.tracer": "Tracer",
    },
    "tracing.util": {f"{_COMPAT}.custom_backends": "ExceptionWrapper wrap_exception"},
}
"""Names by the module that defines them, for each path below ``intervention``."""


class _Path(ModuleType):
    def __init__(self, name: str, sources: dict[str, str]) -> None:
        """Make a module whose names are loaded when they are used; ``sources`` has each one's module."""
        super().__init__(name, f"Names of nnsight's ``{name.partition('.')[2]}``, defined elsewhere.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__all__ = sorted(sources)
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        """Load a name from the module that defines it, and store it here."""
        if name not in self._sources:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}; it offers {', '.join(self.__all__)}"
            )
        value = getattr(importlib.import_module(self._sources[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return self.__all__


def add_paths(root: str) -> None:
    for path, names in PATHS.items():
        sources = {name: source for source, listed in names.items() for name in listed.split()}
        _add(f"{root}.{path}", sources)


def _add(name: str, sources: dict[str, str]) -> None:
    """Add a module of names to ``sys.modules`` and to its parent, which is made if it is missing."""
    parent, _, child = name.rpartition(".")
    if parent not in sys.modules:
        _add(parent, {})
    module = sys.modules.setdefault(name, _Path(name, sources))
    package = sys.modules[parent]
    setattr(package, child, module)
    package.__all__ = sorted({*getattr(package, "__all__", ()), child})  # type: ignore[attr-defined] # a module's
