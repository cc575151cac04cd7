"""``RemoteBackend``: runs a trace on a server, and brings home what it saved.

``with model.trace(prompt, remote=True):`` makes one; it can be made by hand as well, ``backend=``. Blocking,
the trace is one request, and over when its answer is here. Otherwise it is a job, which goes on without us::

    with model.trace("Hello", remote=True, blocking=False) as tracer:
        output = model.lm_head.output.save()
    result = tracer.backend.wait()  # or tracer.backend(), None until it is done, or await tracer.backend
    result["output"]
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import httpx

from api_schemas.jobs import JobStatus
from nnsight_engine.remote_backend.display import Display
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, tier_of
from nnsight_engine.remote_backend.http import HttpTransport
from nnsight_engine.remote_backend.jobs import Read, RemoteJob
from nnsight_engine.remote_backend.outcomes import Outcome, named, raise_first, saves_of, warn_of
from nnsight_engine.remote_backend.outgoing_trace import Dialect, SentRemotely, gathered, read_frames, refused
from nnsight_engine.remote_backend.saved_deltas import OutputReader, StreamedOutput
from nnsight_engine.tracing.tracer import Backend, Tracer

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.codecs import Codec
    from nnsight_engine.remote_backend.transport import Transport

Engine = Literal["auto", "vllm", "local"]
Remote = bool | str | None
"""Where a trace runs: on the server of this address, on that of ``CONFIG.API.HOST``, or here."""


class RemoteBackend(Backend):
    """Sends compiled blocks to a server.

    Args:
        host: The server's address; ``CONFIG.API.HOST`` by default.
        key: What it knows us by; ``CONFIG.API.KEY`` by default.
        blocking: Whether the trace is over when its ``with`` statement is.
        streams: Whether outputs are iterated over as they come, ``async for output in tracer.backend()``.
        engine: What is to run it, ``"vllm"`` or ``"local"``; the server chooses by default.
        codec: ``"cloudpickle"`` for what the wire format refuses, on servers that allow it.
        model_key: What the server calls the model, if not by its name here.
        job_id: A job submitted earlier, whose result is wanted: ``RemoteBackend(job_id=...)()``.
        transport: What carries traces; HTTP by default.
    """

    def __init__(  # noqa: PLR0913 - options, all by name but one
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
        """Connect when there is a trace."""
        self.transport: Transport = transport if transport is not None else HttpTransport(host, key)
        self.blocking = blocking
        self.streams = streams
        self._id: str | None = None
        self._status: JobStatus | None = None
        self._engine: str | None = None
        self._tier: str | None = None
        self._asked: Engine = engine
        self._codec: Codec = codec
        self._model_key = model_key
        self._sent: SentRemotely | None = None
        self._job: RemoteJob | None = None
        if job_id is not None:
            self._job = RemoteJob(self._http(), job_id, lambda frames: named(read_frames(frames)))

    @property
    def job_id(self) -> str | None:
        """The trace's name on the server, once it has one."""
        return self._id if self._job is None else self._job.id

    @property
    def job_status(self) -> JobStatus | None:
        """Where the trace was when last heard of."""
        return self._status if self._job is None else self._job.status

    @property
    def engine(self) -> str | None:
        """What ran it, once that is known: ``vllm`` or ``local``."""
        return self._engine if self._job is None else self._job.engine

    @property
    def tier(self) -> str | None:
        """How vLLM ran it, once the result is here: ``tap``, or ``eager`` if some step ran uncompiled."""
        return self._tier if self._job is None else self._job.tier

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Run a trace; or, after one, give what it left.

        Returns:
            Without a tracer: of a job its result, ``{"id": job_id, name: value, ...}``, or None while it is
            not done; of a stream, an iterator over its outputs, once.

        Raises:
            RemoteError: The server does not run it.
            BaseException: What a block raised.
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
                engine=self._asked,
                codec=self._codec,
                model=model,
                streams=self.streams,
                accepts=() if is_near(self.transport.name) else ("zstd",),
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

    # A trace that is waited for.

    def _run(self, sent: SentRemotely) -> Any:
        with Display() as display:
            frames: list[Frame] = []
            for frame in self.transport.run(sent.request, display.progress):
                if frame.kind is FrameKind.EVENT:
                    self._heard(frame.json(), display)
                elif frame.kind is not FrameKind.OUTPUT:
                    frames.append(frame)
            self._tier = tier_of(frames)
            outcomes = sent.read(frames)
        sent.bring_home(outcomes)
        return None

    def _run_as_job(self, sent: SentRemotely) -> None:
        """Run a trace, parts of which run here: its server asks for those over its job's WebSocket."""
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
        sent.bring_home(outcomes)

    def _heard(self, event: dict[str, Any], display: Display) -> None:
        status = event.get("status")
        if status in set(JobStatus) and status != JobStatus.LOG:
            self._status = JobStatus(str(status))
        self._id = event.get("job") or self._id
        self._engine = event.get("engine") or self._engine
        display.event({"job": self.job_id, **event})

    # A job.

    def _submit(self, sent: SentRemotely, read: Read | None = None) -> RemoteJob:
        http = self._http()
        with Display() as display:
            job = http.submit(sent.request, display.progress)
        self._job = RemoteJob(
            http,
            str(job["id"]),
            read or (lambda frames: named(sent.read(frames))),
            JobStatus.RECEIVED,  # as its events begin, wherever it is by now
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
        """The job that the trace became.

        Raises:
            ValueError: It became none.
        """
        if self._job is None:
            raise ValueError("there is no job: trace with blocking=False, or give a job_id")
        return self._job

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the job's end, and return its result; see ``RemoteJob.wait``."""
        return self.job.wait(timeout_s)

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield what happens to the job, as it happens, up to its end."""
        return self.job.events(after)

    def cancel(self) -> None:
        """End the job."""
        self.job.cancel()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for the job's end without holding up the event loop; returns its result."""
        return self.job.__await__()

    # A stream.

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
                    self._heard(frame.json(), display)
                elif frame.kind is FrameKind.OUTPUT:
                    output = reader.read(frame.data)
                    if not output.finished:
                        yield _shown(output)
                    else:
                        last.append(output)  # it is to have everything, which comes with the result
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


def chosen_backend(
    backend: Backend | None,
    remote: Remote,
    default: Remote,
    *,
    blocking: bool = True,
    streams: bool = False,
) -> Backend | None:
    """Return what runs a trace; None for here and now.

    Args:
        backend: What the user gave.
        remote: Where the trace is to run.
        default: Where the model's traces run that do not say so.
        blocking: Whether it is waited for.
        streams: Whether its outputs are.

    Raises:
        ValueError: It is not to be waited for, and runs here; or something given would have no effect.
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


def _dialect_of(tracer: Tracer) -> Dialect:
    """Return how the traces of a tracer's model are said to a server.

    Raises:
        TypeError: The model is not one that a server could have.
    """
    root = getattr(getattr(tracer, "model", None), "_root", None)
    speak = getattr(root, "remote_dialect", None)
    if speak is None:
        raise TypeError(
            f"{type(root).__name__} cannot be traced on a server: it runs LanguageModel and VLLM, which have "
            "a checkpoint's name"
        )
    dialect: Dialect = speak()
    return dialect


def is_near(address: str) -> bool:
    """Tell whether a server is on this machine, to which nothing need be compressed."""
    host = httpx.URL(address).host if "://" in address else ""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteStreamedOutput:
    """One output of a request as it comes; what vLLM's have, and what its block has saved.

    Attributes:
        invoke: The block's number in its trace.
        outputs: The choices that it tells of, with ``index``, ``text``, ``token_ids``, ``finish_reason``.
        finished: Whether the request has ended.
        saves: What the block has saved up to here, by name.
    """

    invoke: int
    outputs: list[SimpleNamespace]
    finished: bool
    saves: dict[str, Any]


def _shown(output: StreamedOutput) -> RemoteStreamedOutput:
    choices = [SimpleNamespace(**choice) for choice in output.choices]
    return RemoteStreamedOutput(output.invoke, choices, output.finished, output.saves)
