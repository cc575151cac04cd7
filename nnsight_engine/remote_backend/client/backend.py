"""``RemoteBackend``: runs a trace on a server, and returns its saved values to the caller.

``with model.trace(prompt, remote=True):`` creates one; a backend can also be created explicitly and passed as
``backend=``. A blocking trace is one request, and is complete when its response has arrived. A non-blocking
trace is a job, which runs independently of the client::

    with model.trace("Hello", remote=True, blocking=False) as tracer:
        output = model.lm_head.output.save()
    result = tracer.backend.wait()  # or tracer.backend(), None until it is done, or await tracer.backend
    result["output"]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from api_schemas.jobs import JobStatus
from nnsight_engine.remote_backend.client.connection import is_local_server
from nnsight_engine.remote_backend.client.display import Display
from nnsight_engine.remote_backend.client.http import HttpTransport
from nnsight_engine.remote_backend.client.jobs import Read, RemoteJob
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, tier_of
from nnsight_engine.remote_backend.saved_deltas import OutputReader, StreamedOutput
from nnsight_engine.remote_backend.sending.outgoing_trace import (
    Dialect,
    SentRemotely,
    gathered,
    read_frames,
    refused,
)
from nnsight_engine.remote_backend.values.outcomes import Outcome, named, raise_first, saves_of, warn_of
from nnsight_engine.tracing.tracer import Backend, Tracer

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.client.http import Transport
    from nnsight_engine.remote_backend.codecs import Codec

Engine = Literal["auto", "vllm", "local"]


class RemoteBackend(Backend):
    """Sends compiled blocks to a server.

    Args:
        host: The server's address; ``CONFIG.API.HOST`` by default.
        key: The API key; ``CONFIG.API.KEY`` by default.
        blocking: Whether the ``with`` statement waits for the trace's result.
        streams: Whether outputs are iterated over as they arrive, ``async for output in tracer.backend()``.
        engine: The engine to use, ``"vllm"`` or ``"local"``; the server chooses by default.
        codec: ``"cloudpickle"`` for values that the wire format refuses, on servers that allow it.
        model_key: The server's name for the model, if it differs from the name here.
        job_id: A job submitted earlier, whose result is wanted: ``RemoteBackend(job_id=...)()``.
        transport: The transport for traces; HTTP by default.
    """

    def __init__(  # noqa: PLR0913 - options, keyword-only but one
        self,
        host: str | None = None,
        *,
        key: str | None = None,
        blocking: bool = True,
        streams: bool = False,
        engine: Engine = "auto",
        codec: Codec = "wire",
        model_key: str | None = None,
        job_id: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.transport: Transport = transport if transport is not None else HttpTransport(host, key)
        self.blocking = blocking
        self.streams = streams
        self._id: str | None = None
        self._status: JobStatus | None = None
        self._engine: str | None = None
        self._tier: str | None = None
        self._requested_engine: Engine = engine
        self._codec: Codec = codec
        self._model_key = model_key
        self._sent: SentRemotely | None = None
        self._job: RemoteJob | None = None
        if job_id is not None:
            self._job = RemoteJob(self._http(), job_id, lambda frames: named(read_frames(frames)))

    @property
    def job_id(self) -> str | None:
        """The trace's id on the server, once it has one."""
        return self._id if self._job is None else self._job.id

    @property
    def job_status(self) -> JobStatus | None:
        """The last known status of the trace."""
        return self._status if self._job is None else self._job.status

    @property
    def engine(self) -> str | None:
        """The engine that ran it, once known: ``vllm`` or ``local``."""
        return self._engine if self._job is None else self._job.engine

    @property
    def tier(self) -> str | None:
        """How vLLM ran it, once the result is here: ``tap``, or ``eager`` if some step ran uncompiled."""
        return self._tier if self._job is None else self._job.tier

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Run a trace; or, without a tracer, return the result of the trace that was sent.

        Returns:
            Without a tracer: for a job its result, ``{"id": job_id, name: value, ...}``, or None while it is
            not done; for a stream, an iterator over its outputs, which can be used once.

        Raises:
            RemoteError: The server does not run the trace.
            BaseException: The error that a block raised.
        """
        if tracer is None:
            return self._stream() if self.streams else self.job.poll()
        function = super().__call__(tracer)
        dialect = _dialect_of(tracer)
        model = self._model_key or dialect.model
        if not model:
            raise ValueError(
                "a server finds a model by its name, and this one was made from a module that has none: load "
                "it by name, or say what the server calls it, backend=RemoteBackend(model_key=...)"
            )
        with gathered(tracer, function) as trace:
            sent = SentRemotely(
                trace,
                dialect,
                engine=self._requested_engine,
                codec=self._codec,
                model=model,
                streams=self.streams,
                accepts=() if is_local_server(self.transport.name) else ("zstd",),
            )
            if self.streams:
                self._sent = sent
            elif self.blocking and sent.local is not None:
                return self._run_as_job(sent)
            elif self.blocking:
                return self._run(sent)
            else:
                self._submit(sent)
        return None

    # Blocking traces.

    def _run(self, sent: SentRemotely) -> Any:
        with Display() as display:
            frames: list[Frame] = []
            for frame in self.transport.run(sent.request, display.progress):
                if frame.kind is FrameKind.EVENT:
                    self._on_event(frame.json(), display)
                elif frame.kind is not FrameKind.OUTPUT:
                    frames.append(frame)
            self._tier = tier_of(frames)
            outcomes = sent.read(frames)
        sent.assign_saved(outcomes)
        return None

    def _run_as_job(self, sent: SentRemotely) -> None:
        outcomes: list[Outcome] = []

        def read(frames: Sequence[Frame]) -> dict[str, Any]:
            outcomes.extend(sent.read(frames))
            return {}

        job = self._submit(sent, read)
        try:
            job.wait()
        except BaseException:
            with contextlib.suppress(RemoteError):
                job.cancel()
            raise
        finally:
            self._id, self._status, self._job = job.id, job.status, None
            self._engine, self._tier = job.engine, job.tier
        sent.assign_saved(outcomes)

    def _on_event(self, event: dict[str, Any], display: Display) -> None:
        status = event.get("status")
        if status in set(JobStatus) and status != JobStatus.LOG:
            self._status = JobStatus(str(status))
        self._id = event.get("job") or self._id
        self._engine = event.get("engine") or self._engine
        display.event({"job": self.job_id, **event})

    # Jobs.

    def _submit(self, sent: SentRemotely, read: Read | None = None) -> RemoteJob:
        http = self._http()
        with Display() as display:
            job = http.submit(sent.request, display.progress)
        self._job = RemoteJob(
            http,
            str(job["id"]),
            read or (lambda frames: named(sent.read(frames))),
            JobStatus.RECEIVED,  # the status at which its events begin, though it may be further by now
            run=None if sent.local is None else sent.local.run,
        )
        return self._job

    def _http(self) -> HttpTransport:
        if not isinstance(self.transport, HttpTransport):
            raise RemoteError(
                "jobs are for servers over HTTP: leave blocking=False out, or trace outside of the session"
            )
        return self.transport

    @property
    def job(self) -> RemoteJob:
        """The job of the trace.

        Raises:
            ValueError: The trace is not a job.
        """
        if self._job is None:
            raise ValueError("there is no job: trace with blocking=False, or give a job_id")
        return self._job

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the job's end, and return its result; see ``RemoteJob.wait``."""
        return self.job.wait(timeout_s)

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the job's events as they occur, up to its end."""
        return self.job.events(after)

    def cancel(self) -> None:
        """Cancel the job."""
        self.job.cancel()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for the job's end without blocking the event loop, and return its result."""
        return self.job.__await__()

    # Streams.

    async def _stream(self) -> AsyncIterator[Any]:
        sent, self._sent = self._sent, None
        if sent is None:
            raise ValueError(
                "there is nothing to stream: a trace's outputs can be iterated over once, after its `with` "
                "block"
            )
        frames: list[Frame] = []
        reader = OutputReader()
        last: list[StreamedOutput] = []
        with Display() as display:
            async for frame in self.transport.stream(sent.request):
                if frame.kind is FrameKind.EVENT:
                    self._on_event(frame.json(), display)
                elif frame.kind is FrameKind.OUTPUT:
                    output = reader.read(frame.data)
                    if not output.finished:
                        yield _shown(output)
                    else:
                        last.append(output)  # held back until the result arrives, to include all saved values
                elif frame.kind is FrameKind.ERROR:
                    raise refused(frame)
                else:
                    frames.append(frame)
        self._tier = tier_of(frames)
        outcomes = sent.read(frames)
        raise_first(outcomes)
        warn_of(outcomes)
        for output in last:
            yield dataclasses.replace(_shown(output), saves=saves_of(outcomes, output.invoke))


def _dialect_of(tracer: Tracer) -> Dialect:
    """Return the dialect of a tracer's model; raise a ``TypeError`` if its class cannot be served."""
    root = getattr(getattr(tracer, "model", None), "_root", None)
    speak = getattr(root, "remote_dialect", None)
    if speak is None:
        raise TypeError(
            f"{type(root).__name__} cannot be traced on a server: it runs LanguageModel and VLLM, which have "
            "a checkpoint's name"
        )
    dialect: Dialect = speak()
    return dialect


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteStreamedOutput:
    """One output of a request as it arrives: the fields of vLLM's outputs, and the saved values of its block.

    Attributes:
        invoke: Index of the block in its trace.
        outputs: The choices in this output, with ``index``, ``text``, ``token_ids``, ``finish_reason``.
        finished: Whether the request has ended.
        saves: The values that the block has saved so far, by name.
    """

    invoke: int
    outputs: list[SimpleNamespace]
    finished: bool
    saves: dict[str, Any]


def _shown(output: StreamedOutput) -> RemoteStreamedOutput:
    choices = [SimpleNamespace(**choice) for choice in output.choices]
    return RemoteStreamedOutput(output.invoke, choices, output.finished, output.saves)


Remote = bool | str | None
"""Location of a trace: a server's address, True for ``CONFIG.API.HOST``, False for here, None for the
default."""


def chosen_backend(
    backend: Backend | None,
    remote: Remote,
    default: Remote,
    *,
    blocking: bool = True,
    streams: bool = False,
) -> Backend | None:
    """Return the backend that runs a trace; None to run it immediately in this process.

    Raises:
        ValueError: A non-blocking trace would run locally, or one of the arguments would have no effect.
    """
    if backend is not None and (isinstance(remote, str) or not blocking):
        given = "remote=" if isinstance(remote, str) else "blocking="
        raise ValueError(
            f"backend= says where a trace runs and whether it is waited for, so {given} beside it has no "
            "effect: leave it out, or say it to the backend"
        )
    wanted = default if remote is None else remote
    if backend is None and wanted == "local":
        raise ValueError(
            'remote="local" is for LanguageModel, whose traces can run in this process; this one runs in an '
            "engine: leave remote= out, or give a server's address"
        )
    if backend is None and wanted:
        return RemoteBackend(wanted if isinstance(wanted, str) else None, blocking=blocking, streams=streams)
    if backend is None and not blocking:
        raise ValueError("blocking=False is for traces on a server: give `remote=`, its address")
    return backend
