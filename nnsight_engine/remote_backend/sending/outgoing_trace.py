"""Encoding of one trace for a server, and decoding of the server's response.

Dialect of transformers models: the client sends inputs unchanged, and only checks the trace.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

import nnsight_engine
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer, Invoker
from nnsight_engine.interleaving.shared_variables import Barrier
from nnsight_engine.remote_backend.codecs import Codec, encode_blocks
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import (
    SentInvoke,
    TraceHead,
    TraceRequest,
    fingerprint_of,
    name_of,
)
from nnsight_engine.remote_backend.sending.local_parts import local_parts
from nnsight_engine.remote_backend.values.object_references import (
    HOME_CLASSES,
    ObjectReferences,
    added_part,
    reference_of,
)
from nnsight_engine.remote_backend.values.outcomes import (
    Outcome,
    SentPart,
    assign_saved,
    groups_of,
    parts_of,
    read_outcomes,
    saved_containers,
    wanted_of,
)
from nnsight_engine.remote_backend.values.received_blocks import SAVED
from nnsight_engine.serialization import DATA_ONLY, DecodeError, EncodeError, Policy, Resolve
from nnsight_engine.tracing.tracer import Session, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.envoys.tracers.interleaving import Edit


class Inputs(NamedTuple):
    """Data that a dialect sends in addition to a trace's blocks.

    Attributes:
        edits: Blocks that run beside the trace's own, sent with them.
        parts: Edits that are sent as separate messages.
    """

    shared: Mapping[str, Any] = {}
    invokes: Sequence[SentInvoke] = ()
    method: str = ""
    edits: Sequence[SentPart] = ()
    parts: Sequence[bytes] = ()


class Dialect(ABC):
    """How one class of models sends its traces; ``policy`` is the one for decoding results.

    ``LanguageModel`` sends its invokes' inputs beside the blocks, ``VLLM`` turns each invoke into a request.
    """

    name: Literal["vllm", "transformers"]
    model: str
    revision: str = ""
    fingerprint: str = ""
    policy: Policy

    @abstractmethod
    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        """Return the inputs of a trace; raise an ``EncodeError`` if a server cannot have them."""

    def session(self, session: Session) -> Inputs:
        """Return the data that a session needs in addition to its block; raises like ``inputs``."""
        del session
        return Inputs()

    def parts(self, codec: Codec) -> list[bytes]:
        """Return messages that the engine must decode before the blocks, in addition to ``inputs``."""
        del codec
        return []

    @abstractmethod
    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        """Return the reference of an object that the server has itself; None if it must be sent."""

    @abstractmethod
    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        """Return a function that resolves the references in results; ``outputs`` are the requests' ones."""


class SentRemotely:
    """An encoded trace or session; ``local`` holds the parts of its blocks that run here, or None."""

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
        """Encode the blocks, their inputs and edits as a request; the saved containers are updated later."""
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
        local_names = frozenset[str]() if self.local is None else self.local.local_names
        self._saved = saved_containers([part.as_sent(local_names).cells for part in self._parts])
        sent = [*self._parts, *inputs.edits]
        blocks = encode_blocks(
            codec,
            [
                *(part.as_sent(local_names) for part in self._parts),
                *(edit.as_sent() for edit in inputs.edits),
            ],
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
        outcomes = read_frames(frames, self._saved, self._dialect)
        return outcomes if self.local is None else self.local.completed(outcomes)

    def assign_saved(self, outcomes: Sequence[Outcome]) -> None:
        assign_saved(self._parts, outcomes)


def read_frames(
    frames: Sequence[Frame], saved: Sequence[Any] = (), dialect: Dialect | None = None
) -> list[Outcome]:
    """Return the outcomes of blocks from a server's response, or raise a ``RemoteError`` or ``DecodeError``.

    ``saved`` containers, of before the blocks ran, are updated. Without a dialect, results may hold data
    only.
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
    """Return the error in an ``ERROR`` frame; raise a ``DecodeError`` if it holds none."""
    try:
        return RemoteError.from_body(frame.json())
    except (KeyError, TypeError) as problem:
        raise DecodeError(f"an ERROR frame holds no error: {problem!r}") from problem


@contextlib.contextmanager
def gathered(tracer: Tracer, function: Callable[[], Any]) -> Iterator[InterleavingTracer | Session]:
    """Collect the blocks and inputs of a trace for the duration of the context; a session is one block."""
    if isinstance(tracer, InterleavingTracer):
        with tracer.collected(function):
            yield tracer
    elif isinstance(tracer, Session):
        yield tracer
    else:
        raise EncodeError(
            f"a server runs traces and sessions, and this is a {type(tracer).__name__}: leave `remote=` out"
        )


class TransformersDialect(Dialect):
    """Dialect of a model loaded from ``name``; ``rename`` holds the user's own names for modules."""

    name = "transformers"
    policy = DATA_ONLY.allowing(HOME_CLASSES)

    def __init__(
        self, model: Envoy, name: str, revision: str | None, rename: Mapping[str, Any] | None
    ) -> None:
        self.model = name_of(name) if name else ""
        self.revision = revision or ""
        self._envoy = model
        self._rename = rename
        config = getattr(model._module, "config", None)  # noqa: SLF001 - an envoy of ours
        self.fingerprint = "" if config is None else fingerprint_of(config)

    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        """Return the inputs of all invokes or of the trace, what is called, and the modes around it."""
        invokers = [invoker for invoker in tracer.invokers if isinstance(invoker, Invoker)]
        # A trace without invokes has its own inputs.
        sources: list[Tracer] = [*invokers] or [tracer]
        method = self._method(tracer)
        shared = {
            "inputs": [(invoker.args, invoker.kwargs) for invoker in sources],
            "kwargs": tracer.kwargs if invokers else {},
            "validate": tracer.validate,
            "traced": tracer.model,
            "fn": tracer.function if method is None else None,
            **self._surroundings(),
        }
        return Inputs(shared=shared, method=method or "", edits=_sent(tracer.edits))

    def session(self, session: Session) -> Inputs:
        return Inputs(shared=self._surroundings(), edits=_sent(session.model._default_mediators))  # noqa: SLF001 - an envoy of ours

    def parts(self, codec: Codec) -> list[bytes]:
        return added_part(self._envoy, codec)

    def _surroundings(self) -> dict[str, Any]:
        """Return the user's names of modules and torch's modes, which hold around the trace."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise EncodeError(
                "torch.autocast around a trace does not reach a server, whose devices may be others: enter "
                "it in the block"
            )
        return {
            "rename": None if self._rename is None else dict(self._rename),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
        }

    def _method(self, tracer: InterleavingTracer) -> str | None:
        """Return the name of the traced method, "" for a call of the module, None for a function."""
        function, model = tracer.function, tracer.model
        if function == model._run_module:  # noqa: SLF001 - an envoy of ours
            return ""
        owner = getattr(function, "__self__", None)
        if owner is not model and owner is not model._module:  # noqa: SLF001 - the same
            return None
        return str(function.__name__).removeprefix("__nnsight_").removesuffix("__")

    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        return reference_of(value, self._envoy, barriers)

    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        del outputs
        return ObjectReferences(self._envoy)


def _sent(edits: Sequence[Edit]) -> list[SentPart]:
    return [SentPart.alone(edit.info) for edit in edits]
