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

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from api_schemas.jobs import JobStatus
from nnsight_engine.remote_backend.client.connection import is_local_server
from nnsight_engine.remote_backend.client.display import Display
from nnsight_engine.remote_backend.client.http import HttpTransport
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, tier_of
from nnsight_engine.remote_backend.saved_deltas import OutputReader, RemoteStreamedOutput
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
    from nnsight_engine.remote_backend.client.http import RunPart, Transport
    from nnsight_engine.remote_backend.codecs import Codec

Engine = Literal["auto", "vllm", "local"]
_FIRST_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0


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

    Attributes:
        job_id: The trace's id on the server, once it has one.
        job_status: The last known status of the trace.
        engine: The engine that ran it, once known: ``vllm`` or ``local``.
        tier: How vLLM ran it, once the result is here: ``tap``, or ``eager`` if some step ran uncompiled.
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
        self.job_id = job_id
        self.job_status: JobStatus | None = None
        self.engine: str | None = None
        self.tier: str | None = None
        self._requested_engine: Engine = engine
        self._codec: Codec = codec
        self._model_key = model_key
        self._sent: SentRemotely | None = None
        self._job: tuple[HttpTransport, str] | None = None if job_id is None else (self._http(), job_id)
        self._result: dict[str, Any] | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Run a trace; or, without a tracer, return the result of the trace that was sent.

        Returns:
            Without a tracer: for a job its result, ``{"id": job_id, name: value, ...}``, or None while it is
            not done; for a stream, an iterator over its outputs, which can be used once.

        Raises:
            RemoteError: The server does not run the trace, or its job ended without a result.
            BaseException: The error that a block raised.
        """
        if tracer is None:
            return self._stream() if self.streams else self._poll()
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
                self._run_as_job(sent)
            elif self.blocking:
                self._run(sent)
            else:
                self._submit(sent)
        return None

    # Blocking traces.

    def _run(self, sent: SentRemotely) -> None:
        """Send a blocking trace, show its events, and assign the values of its result."""
        with Display() as display:
            frames: list[Frame] = []
            for frame in self.transport.run(sent.request, display.progress):
                if frame.kind is FrameKind.EVENT:
                    self._on_event(frame.json(), display)
                elif frame.kind is not FrameKind.OUTPUT:
                    frames.append(frame)
            self.tier = tier_of(frames)
            outcomes = sent.read(frames)
        sent.assign_saved(outcomes)

    def _run_as_job(self, sent: SentRemotely) -> None:
        """Run a blocking trace that calls this client (``tracer.local()``), as only jobs can."""
        self._submit(sent)
        try:
            outcomes = self._wait()
        except BaseException:
            with contextlib.suppress(RemoteError):
                self.cancel()
            raise
        finally:
            self._sent = self._job = None
        sent.assign_saved(outcomes)

    def _on_event(self, event: dict[str, Any], display: Display) -> None:
        status = event.get("status")
        if status in set(JobStatus) and status != JobStatus.LOG:
            self.job_status = JobStatus(str(status))
        self.job_id = event.get("job") or self.job_id
        self.engine = event.get("engine") or self.engine
        display.event({"job": self.job_id, **event})

    # Jobs.

    def _submit(self, sent: SentRemotely) -> None:
        """Send a trace as a job, whose result ``_outcomes`` fetches later."""
        http = self._http()
        with Display() as display:
            job = http.submit(sent.request, display.progress)
        self._sent, self._result, self._job = sent, None, (http, str(job["id"]))
        # The status at which its events begin, though it may be further by now.
        self.job_id, self.job_status = str(job["id"]), JobStatus.RECEIVED
        self.engine = self.tier = None

    def _http(self) -> HttpTransport:
        if not isinstance(self.transport, HttpTransport):
            raise RemoteError(
                "jobs are for servers over HTTP: leave blocking=False out, or trace outside of the session"
            )
        return self.transport

    def _submitted(self) -> tuple[HttpTransport, str]:
        if self._job is None:
            raise ValueError("there is no job: trace with blocking=False, or give a job_id")
        return self._job

    def _poll(self) -> dict[str, Any] | None:
        """Return the job's result by name, None while it is not done; it is fetched once."""
        _, job_id = self._submitted()
        if self._result is None:
            outcomes = self._outcomes()
            if outcomes is not None:
                self._result = {"id": job_id, **named(outcomes)}
        return self._result

    def _outcomes(self) -> list[Outcome] | None:
        """Return the outcomes of the job's blocks, None while it is not done."""
        http, job_id = self._submitted()
        job = http.job(job_id)
        self.job_status, self.engine = JobStatus(job["status"]), job.get("engine")
        if not self.job_status.is_final:
            return None
        if not job.get("result_bytes"):
            error = job.get("error") or {}
            message = error.get("message") or f"job {job_id} ended as {job['status']} and left no result"
            raise RemoteError(str(message), code=error.get("code"))
        with Display() as display:
            frames = http.result(job_id, display.progress)
        self.tier = tier_of(frames)
        return read_frames(frames) if self._sent is None else self._sent.read(frames)

    def _wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Show the job's events until it ends, running parts that it asks for, and return the outcomes."""
        with Display() as display:
            for event in self.events(timeout_s=timeout_s):
                display.event(event)
        outcomes = self._outcomes()
        if outcomes is None:  # the server was stopped, which ended the event stream
            raise RemoteError(f"job {self.job_id} is {self.job_status} still, and its events have ended")
        return outcomes

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Block until the job ends, display its progress, and return its result; see ``__call__``.

        Raises:
            ValueError: The trace is not a job.
            TimeoutError: The job takes longer; it continues to run.
        """
        if self._result is None:
            self._result = {"id": self._submitted()[1], **named(self._wait(timeout_s))}
        return self._result

    def events(self, after: int = 0, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the job's events as they occur, up to its end.

        Args:
            after: Number of the last event to skip.
            timeout_s: How long to wait for the job's end.

        Raises:
            ValueError: The trace is not a job.
            TimeoutError: The job takes longer; it continues to run.
        """
        http, job_id = self._submitted()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return self._followed(http.events(job_id, after, end, self._part_runner()))

    def _part_runner(self) -> RunPart | None:
        return None if self._sent is None or self._sent.local is None else self._sent.local.run

    def _followed(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield events, and keep the job's status and engine as they say."""
        for event in events:
            if event["status"] != JobStatus.LOG:
                self.job_status = JobStatus(event["status"])
            self.engine = event.get("engine") or self.engine
            yield event

    def cancel(self) -> None:
        """Cancel the job."""
        http, job_id = self._submitted()
        self.job_status = JobStatus(http.cancel(job_id)["status"])

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for the job's end without blocking the event loop, and return its result."""
        return self._awaited().__await__()

    async def _awaited(self) -> dict[str, Any]:
        """Ask for the result in growing intervals; a job that calls this client is waited for on a thread."""
        if self._part_runner() is not None:
            return await asyncio.to_thread(self.wait)
        pause = _FIRST_POLL_S
        while True:
            result = await asyncio.to_thread(self._poll)
            if result is not None:
                return result
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL_S)

    # Streams.

    async def _stream(self) -> AsyncIterator[RemoteStreamedOutput]:
        """Yield a trace's outputs as they arrive; each request's last one has all its saved values."""
        sent, self._sent = self._sent, None
        if sent is None:
            raise ValueError(
                "there is nothing to stream: a trace's outputs can be iterated over once, after its `with` "
                "block"
            )
        frames: list[Frame] = []
        reader = OutputReader()
        final_outputs: list[RemoteStreamedOutput] = []
        with Display() as display:
            async for frame in self.transport.stream(sent.request):
                if frame.kind is FrameKind.EVENT:
                    self._on_event(frame.json(), display)
                elif frame.kind is FrameKind.OUTPUT:
                    output = reader.read(frame.data)
                    if not output.finished:
                        yield output
                    else:
                        # Held back until the result arrives, to include all saved values.
                        final_outputs.append(output)
                elif frame.kind is FrameKind.ERROR:
                    raise refused(frame)
                else:
                    frames.append(frame)
        self.tier = tier_of(frames)
        outcomes = sent.read(frames)
        raise_first(outcomes)
        warn_of(outcomes)
        for output in final_outputs:
            yield dataclasses.replace(output, saves=saves_of(outcomes, output.invoke))


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
        argument = "remote=" if isinstance(remote, str) else "blocking="
        raise ValueError(
            f"backend= says where a trace runs and whether it is waited for, so {argument} beside it has no "
            "effect: leave it out, or say it to the backend"
        )
    location = default if remote is None else remote
    if backend is None and location == "local":
        raise ValueError(
            'remote="local" is for LanguageModel, whose traces can run in this process; this one runs in an '
            "engine: leave remote= out, or give a server's address"
        )
    if backend is None and location:
        return RemoteBackend(
            location if isinstance(location, str) else None, blocking=blocking, streams=streams
        )
    if backend is None and not blocking:
        raise ValueError("blocking=False is for traces on a server: give `remote=`, its address")
    return backend
