"""``remote="local"``: the complete path of a remote trace, in this process and without a server.

Shows the author of a trace whether it can be sent. Unlike on a server, its changes to the model are not
undone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from api_schemas.jobs import JobStatus
from nnsight_engine.local_engine.local_part import ClientCall
from nnsight_engine.local_engine.runner import ModelRunner, TraceableModel
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.client.http import Progress
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.sending.outgoing_trace import SentRemotely
from nnsight_engine.serialization import DecodeError


class InProcessTransport:
    """Runs traces as if they had been received; ``call_client`` runs the parts in ``tracer.local()``."""

    name = "this process"

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.call_client: ClientCall | None = None

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Run a trace on this process's model, and yield the frames that a server would send."""
        del progress
        yield _event(JobStatus.RECEIVED)
        # A tree of its own: the user's envoys are in use by the trace that sends this one.
        served = TraceableModel(self._model._module, tokenizer=self._model.tokenizer)  # noqa: SLF001 - an envoy of ours
        runner = ModelRunner(served, self.call_client)
        received = TraceRequest.from_bytes(request.to_bytes())
        yield _event(JobStatus.RUNNING)
        try:
            result = runner.run(received)
        except DecodeError as error:
            raise RemoteError(f"the trace cannot be read: {error}") from error
        yield Frame(FrameKind.RESULT, result)
        yield _event(JobStatus.ERROR if runner.failure else JobStatus.COMPLETED)

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        del request
        raise _needs_server("streams")

    def outline(self) -> dict[str, Any]:
        raise _needs_server("outlines")


class InProcessBackend(RemoteBackend):
    """Runs traces in this process as a server would.

    TypeError: a server would not run the model on its local engine. ValueError: ``blocking`` is False.
    """

    def __init__(self, model: LanguageModel, *, blocking: bool = True) -> None:
        if type(model) is not LanguageModel:
            name = type(model).__name__
            raise TypeError(
                f'remote="local" runs LanguageModel, as a server\'s local engine does, got {name}'
            )
        if not blocking:
            raise ValueError('remote="local" runs at once: leave blocking=False out, or name a server')
        model.dispatch()
        self._in_process = InProcessTransport(model)
        super().__init__(transport=self._in_process, engine="local", model_key="this model")

    def _run_as_job(self, sent: SentRemotely) -> None:
        assert sent.local is not None  # noqa: S101 - otherwise it would not be a job
        self._in_process.call_client = sent.local.run
        self._run(sent)


def _event(status: JobStatus) -> Frame:
    return json_frame(FrameKind.EVENT, {"status": status, "engine": "local"})


def _needs_server(what: str) -> NoReturn:
    raise RemoteError(f"{what} need a server: give its address, remote=")
