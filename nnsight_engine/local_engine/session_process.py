"""The process of a session on vLLM: ``python -m nnsight_engine.local_engine.session_process SOCKET OPTIONS``.

A session is plain code around traces. In the API server it could read secrets, in vLLM's workers it would
block all requests. Each trace is sent over the socket to the server, which runs it on vLLM.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

from transformers import AutoTokenizer

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.local_engine.block_runner import BlockRunner, ReadTrace, run_session
from nnsight_engine.local_engine.serving import ServerRequests, serve
from nnsight_engine.local_engine.trace_process import OUTLINE, TRACE, ProcessOptions
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.sending.outgoing_trace import refused
from nnsight_engine.serialization import DecodeError
from nnsight_engine.tracing.tracer import Session, refuse_statement
from nnsight_engine.vllm_backend.traces.points import place_named, place_of
from nnsight_engine.vllm_backend.vllm import VLLM

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
    from nnsight_engine.remote_backend.client.http import Progress
    from nnsight_engine.remote_backend.messages import TraceRequest
    from nnsight_engine.serialization.graph import Resolve
    from nnsight_engine.tracing.tracer import Tracer

_LAST: Final = frozenset({FrameKind.RESULT, FrameKind.ERROR})


class PipeTransport:
    """Has the session's server run traces, see ``trace_process``."""

    name = "the session's server"

    def __init__(self, server_requests: ServerRequests) -> None:
        self._server_requests = server_requests
        self._outline: dict[str, Any] | None = None

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Send a trace to the server, and yield the frames of its answer."""
        del progress
        self._server_requests.send({TRACE: True}, request.to_bytes())
        while True:
            frame = self._server_requests.answer()
            yield frame
            if frame.kind in _LAST:
                return

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        del request
        raise RemoteError('a session waits for its traces: leave mode="async" out, or trace outside of it')

    def outline(self) -> dict[str, Any]:
        """Return the server's outline of the model, which is requested once."""
        if self._outline is None:
            self._server_requests.send({OUTLINE: True}, b"")
            frame = self._server_requests.answer()
            if frame.kind is FrameKind.ERROR:
                raise refused(frame)
            self._outline = frame.json()
        return self._outline


class SessionModel(VLLM):
    """The object behind ``model`` in a session's block; its traces run on the session's server."""

    def __init__(self, transport: PipeTransport, folder: str, *, trust_remote_code: bool) -> None:
        """Create a model of the server's outline; ``folder`` has its tokenizer."""
        outline = transport.outline()
        super().__init__(str(outline["model"]), remote=True)
        self.__dict__["_transport"] = transport
        self.__dict__["_files"] = (folder, trust_remote_code)
        entries = [tuple(entry) for entry in outline["outline"]]
        self._set_description(entries, ModelSpec.from_plain(outline["spec"]))

    def trace(
        self, *args: Any, remote: Any = None, blocking: bool = True, **kwargs: Any
    ) -> InterleavingTracer:
        """Open a trace on the session's server, whatever ``remote`` and ``blocking`` its code gives."""
        del remote, blocking
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - the caller's frame is examined
        return super().trace(*args, backend=self._remote_backend(), **kwargs)

    def _remote_backend(self) -> RemoteBackend:
        return RemoteBackend(transport=self.__dict__["_transport"])

    @property
    def tokenizer(self) -> Any:
        folder, trusts = self.__dict__["_files"]
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)  # nosec B615 # a folder here


class SessionRunner(BlockRunner):
    def __init__(self, transport: PipeTransport, options: ProcessOptions) -> None:
        super().__init__(max_result_bytes=options.max_result_bytes, compresses=options.compresses)
        self._transport = transport
        self._options = options

    @contextlib.contextmanager
    def _prepared(self, request: TraceRequest) -> Iterator[tuple[Tracer, Resolve]]:
        """Yield a session, and the function that resolves a reference to it or to its model."""
        if request.head.kind != "session":
            raise DecodeError("this process runs sessions, and the message is a trace")
        options = self._options
        # A new model for each session, since it holds the session's edits and names.
        model = SessionModel(self._transport, options.model, trust_remote_code=options.trust_remote_code)
        session = Session(model)

        def resolve(reference: tuple[str, ...]) -> Any:
            kind, *rest = reference
            return session if kind == "tracer" else place_named(model, kind, *rest)

        yield session, resolve

    def _reference(self, value: Any) -> tuple[str, ...] | None:
        return place_of(value)

    def _execute(self, trace: ReadTrace, tracer: Tracer) -> None:
        assert isinstance(tracer, Session)  # noqa: S101 - created by _prepared
        run_session(trace, tracer)

    def _clean_up(self) -> None:
        """Do nothing: a session's model ends with it."""


def load(options: ProcessOptions, server_requests: ServerRequests) -> BlockRunner:
    return SessionRunner(PipeTransport(server_requests), options)


if __name__ == "__main__":
    serve(sys.argv[1:], load)
