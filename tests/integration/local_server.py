"""A server over sockets whose local engine runs traces of ``LanguageModel`` in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from app.components import Components
from app.engine.process_engines import LocalTraceEngine
from app.main import create_app, new_store
from app.process_environment import environment_for_traces
from app.settings import Settings
from nnsight_engine import LanguageModel
from nnsight_engine.local_engine.trace_process import ProcessOptions
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from tests.fakes.engine import FakeEngineClient
from tests.fakes.results import MODEL
from tests.families.checkpoints import write_checkpoint
from tests.integration.live import listening
from tests.waiting import wait_for

TEXT = " the tower of Paris"


class LocalServer:
    """A server with a local engine, a client's model without weights, and one to compare with."""

    def __init__(self, url: str, engine: LocalTraceEngine, context: Components, path: Path) -> None:
        self.url = url
        self.engine = engine
        self.path = path
        self.calls = context.jobs.calls
        self.model = LanguageModel(path)
        self.here = LanguageModel(path, dispatch=True)

    @property
    def pid(self) -> int:
        """Return the process that has the model, once there is one."""
        wait_for(lambda: bool(self.engine.pids))
        return self.engine.pids[0]

    def remote(self, **options: Any) -> RemoteBackend:
        return RemoteBackend(self.url, model_key=MODEL, **options)

    @property
    def ways(self) -> list[tuple[LanguageModel, dict[str, Any]]]:
        """Return the two ways to run a block: here, and elsewhere."""
        return [(self.here, {}), (self.model, {"backend": self.remote()})]

    def check(self) -> None:
        """See that the next trace runs, on the model as it was loaded."""
        found = []
        for model, how in self.ways:
            with model.trace(TEXT, **how):
                logits = model.lm_head.output.save()
            found.append(logits)
        assert torch.equal(*found)
        assert not self.calls.pending


@contextlib.contextmanager
def serving_locally(folder: Path) -> Iterator[LocalServer]:
    """Serve a tiny Llama; the server's data lie in ``folder``."""
    path = write_checkpoint("llama", folder / "llama")
    settings = Settings.model_validate(
        {"result_dir": folder / "results", "data_dir": folder / "data", "drain_timeout_s": 1}
    )
    store = new_store(settings)
    local = LocalTraceEngine(ProcessOptions(model=str(path)), settings, environment_for_traces())
    app = create_app(settings, FakeEngineClient(settings, store), store, local=local)
    with listening(app) as url:
        yield LocalServer(url, local, app.state.components, path)
