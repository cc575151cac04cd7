"""The same checkpoint on both sides of a trace, and one to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnsight_engine.local_engine.process_state import renew_globals
from nnsight_engine.local_engine.runner import TraceRunner
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.messages import TraceRequest
from tests.transports import InProcess

TEXT, OTHER = " the tower of Paris", " I love"


class Bench:
    """The same checkpoint three times: the client's without weights, the engine's, and one to compare."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.client = LanguageModel(path)
        self.local = LanguageModel(path, dispatch=True)
        self.engine = LanguageModel(path, dispatch=True)
        self.runner = TraceRunner(self.engine)

    @property
    def ways(self) -> list[tuple[LanguageModel, dict[str, Any]]]:
        """Return the two ways to run a block: here, and elsewhere."""
        return [(self.local, {}), (self.client, {"backend": self.elsewhere()})]

    def elsewhere(self) -> RemoteBackend:
        return RemoteBackend(transport=InProcess(served_by(self.runner)))


def served_by(runner: TraceRunner) -> Callable[[TraceRequest], bytes]:
    """Return what runs traces as the process does: it undoes what one has done behind its answer."""

    def run(request: TraceRequest) -> bytes:
        try:
            return runner.run(request)
        finally:
            renew_globals()
            runner.settle()

    return run
