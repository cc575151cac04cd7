"""One trace as it is sent to a server, and what the server's answer is read with.

What classes of models do differently is said by a ``Dialect``: ``LanguageModel`` sends its invokes' inputs
beside the blocks, ``VLLM`` turns each into a request.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import nnsight_engine
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.envoys.tracers.session import Session
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.remote_backend.codecs import Codec, encode_blocks
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.incoming_blocks import SAVED
from nnsight_engine.remote_backend.local_parts import local_parts
from nnsight_engine.remote_backend.messages import SentInvoke, TraceHead, TraceRequest
from nnsight_engine.remote_backend.outcomes import (
    Outcome,
    SentPart,
    bring_home,
    groups_of,
    parts_of,
    read_outcomes,
    saved_containers,
    wanted_of,
)
from nnsight_engine.serialization import DATA_ONLY, DecodeError, EncodeError, Policy
from nnsight_engine.tracing.tracer import Tracer

Resolve = Callable[[tuple[str, ...]], Any]


class Inputs(NamedTuple):
    """What a dialect adds to a trace's blocks.

    Attributes:
        shared: Values beside the blocks, by name.
        invokes: Requests, for an engine that takes its inputs so.
        method: What of the module is traced.
        edits: Blocks that run beside the trace's own, sent with them.
        parts: Edits as messages of their own.
    """

    shared: Mapping[str, Any] = {}
    invokes: Sequence[SentInvoke] = ()
    method: str = ""
    edits: Sequence[SentPart] = ()
    parts: Sequence[bytes] = ()


class Dialect(ABC):
    """How one class of models sends its traces.

    Attributes:
        name: Whose modules the blocks name.
        model: What the server is to know the model by.
        revision: Of its repository, if the client asked for one.
        fingerprint: Of its shape, see ``identity``; empty where nobody knows.
        policy: What results may be made of.
    """

    name: Literal["vllm", "transformers"]
    model: str
    revision: str = ""
    fingerprint: str = ""
    policy: Policy

    @abstractmethod
    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        """Return what a trace runs on.

        Raises:
            EncodeError: The server cannot be given it.
        """

    def session(self, session: Session) -> Inputs:
        """Return what a session needs beside its block.

        Raises:
            EncodeError: The server cannot be given it.
        """
        del session
        return Inputs()

    def parts(self, codec: Codec) -> list[bytes]:
        """Return what the engine has to read before the blocks, beyond ``inputs``.

        Raises:
            EncodeError: Something in it cannot travel.
        """
        del codec
        return []

    @abstractmethod
    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        """Return the name of something that the server has itself."""

    @abstractmethod
    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        """Return what finds the things that results name.

        Args:
            outputs: What the trace's requests returned, as the server says it.
        """


class SentRemotely:
    """A trace or a session, encoded.

    Attributes:
        request: What goes to the server.
        local: Parts of the blocks that run here, if there are any.
    """

    def __init__(
        self,
        tracer: InterleavingTracer | Session,
        dialect: Dialect,
        *,
        engine: Literal["auto", "vllm", "local"],
        codec: Codec,
        model: str,
        streams: bool,
        accepts: Sequence[str],
    ) -> None:
        """Encode it.

        Raises:
            EncodeError: A block uses something that cannot travel, or the server cannot be given.
        """
        self._dialect = dialect
        is_session = isinstance(tracer, Session)
        if isinstance(tracer, Session):
            self._parts = [SentPart.alone(tracer.info)]
            inputs, barriers = dialect.session(tracer), list[Barrier]()
        else:
            self._parts = parts_of(tracer)
            inputs, barriers = dialect.inputs(tracer), tracer.barriers
        self.local = (
            None if is_session or dialect.name == "vllm" else local_parts(self._parts, tracer, dialect)
        )
        own = frozenset[str]() if self.local is None else self.local.own
        self._saved = saved_containers([part.as_sent(own).cells for part in self._parts])
        sent = [*self._parts, *inputs.edits]
        blocks = encode_blocks(
            codec,
            [*(part.as_sent(own) for part in self._parts), *(edit.as_sent() for edit in inputs.edits)],
            shared={SAVED: self._saved, **inputs.shared},
            reference=lambda value: dialect.reference(value, barriers),
        )
        head = TraceHead(
            model=model,
            revision=dialect.revision,
            fingerprint=dialect.fingerprint,
            dialect=dialect.name,
            engine=engine,
            kind="session" if is_session else "trace",
            codec=codec,
            groups=groups_of(sent),
            invokes=list(inputs.invokes),
            method=inputs.method,
            num_edits=len(inputs.edits),
            wanted=wanted_of(self._parts),
            streams=streams,
            local_parts=self.local is not None,
            accepts=list(accepts),
            client=nnsight_engine.__version__,
        )
        self.request = TraceRequest(head, [blocks, *inputs.parts, *dialect.parts(codec)])

    def read(self, frames: Sequence[Frame]) -> list[Outcome]:
        """Return what came of the blocks; see ``read_frames``."""
        outcomes = read_frames(frames, self._saved, self._dialect)
        return outcomes if self.local is None else self.local.completed(outcomes)

    def bring_home(self, outcomes: Sequence[Outcome]) -> None:
        """Put what the blocks saved where they were written; raises what they raised."""
        bring_home(self._parts, outcomes)


def read_frames(
    frames: Sequence[Frame], saved: Sequence[Any] = (), dialect: Dialect | None = None
) -> list[Outcome]:
    """Return what came of blocks, from a server's answer.

    Args:
        frames: The answer; events and outputs may be missing.
        saved: Containers that were saved before the blocks ran, to be filled.
        dialect: What the results are read with; without one they are data alone.

    Raises:
        RemoteError: The server did not run them.
        DecodeError: The answer is broken.
    """
    outputs: Mapping[str, Any] = {}
    for frame in frames:
        if frame.kind is FrameKind.OUTPUTS:
            outputs = frame.json()
        elif frame.kind is FrameKind.ERROR:
            raise refused(frame)
        elif frame.kind is FrameKind.RESULT:
            resolve = None if dialect is None else dialect.resolver(outputs)
            policy = DATA_ONLY if dialect is None else dialect.policy
            return read_outcomes(frame.data, saved, resolve=resolve, policy=policy, fills=dialect is not None)
    raise RemoteError("the server's answer ended without a result; its log says why")


def refused(frame: Frame) -> RemoteError:
    """Return the error that an ``ERROR`` frame holds.

    Raises:
        DecodeError: It holds none.
    """
    try:
        return RemoteError.said(frame.json())
    except (KeyError, TypeError) as problem:
        raise DecodeError(f"an ERROR frame holds no error: {problem!r}") from problem


@contextlib.contextmanager
def gathered(tracer: Tracer, function: Callable[[], Any]) -> Iterator[InterleavingTracer | Session]:
    """Have what a trace consists of: its blocks and inputs; a session is one block.

    Raises:
        EncodeError: This kind of trace is not for servers.
    """
    if isinstance(tracer, InterleavingTracer):
        with tracer.collected(function):
            yield tracer
    elif isinstance(tracer, Session):
        yield tracer
    else:
        raise EncodeError(
            f"a server runs traces and sessions, and this is a {type(tracer).__name__}: leave `remote=` out"
        )


__all__ = ["Dialect", "Inputs", "SentRemotely", "gathered", "read_frames", "refused"]
