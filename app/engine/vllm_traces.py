"""Traces on vLLM: one request for each invoke, whose blocks run in the engine's workers.

The payload reaches the workers unread, and so do the results on the way back: no client code ever runs in
this process, and large values are not decoded.

Sampling parameters are validated before vLLM receives them. vLLM validates their values but, outside its own
HTTP models, not their types; and values that cannot be serialized for the engine's process fail only on the
way there.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.jobs import JobStatus
from app.engine.client import event_frame
from app.engine.vllm_errors import trace_refusal, translating_engine_death
from app.http.errors import internal_error
from app.limits.slots import Slots
from app.settings import Settings
from nnsight_engine.core.work_context import current_work
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.remote_backend.frames import TIER, Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import SentEdit, SentInvoke, TraceHead, TraceRequest
from nnsight_engine.remote_backend.saved_deltas import output_data
from nnsight_engine.remote_backend.unread_output import SlowReaderError
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.fair_scheduler import SENDER_KEY
from nnsight_engine.vllm_backend.running_trace import (
    FinishedTrace,
    MergedRun,
    Output,
    TraceEvent,
    TraceRequests,
    TraceStarted,
)
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY, EditEntry, TraceEntry

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

_DERIVED: Final = frozenset({"skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"})
"""Fields set by vLLM or by us; a client's SamplingParams object includes them."""

_RESERVED: Final = frozenset({PLAN_KEY, SENDER_KEY, TRACE_KEY})
_PLACE: Final = re.compile(r"`\$([^`]*)`")
"""The path in msgspec's messages."""

_Scalar = str | int | float | bool
_EXTRA: Final = dict[str, _Scalar | list[_Scalar] | None]


def sampling_params(sent: Mapping[str, Any], field: str) -> SamplingParams:
    """Return a client's parameters as vLLM's; ApiError if one is unknown, or has a wrong type or value."""
    named = {name: value for name, value in sent.items() if not (name in _DERIVED or name.startswith("_"))}
    unknown = named.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        name = min(unknown)
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"vLLM has no sampling parameter {clip(name)!r}; its class SamplingParams has them.",
            f"{field}.sampling.{clip(name)}",
        )
    structured = named.get("structured_outputs")
    if isinstance(structured, dict):
        public_fields = {name: value for name, value in structured.items() if not name.startswith("_")}
        named["structured_outputs"] = public_fields
    try:
        _check_extra(named.get("extra_args"), field)
        msgspec.msgpack.encode(named)  # values that this refuses would fail on the way to the engine
        params: SamplingParams = msgspec.convert(named, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        path_match = _PLACE.search(str(error))
        named_there = "" if path_match is None else path_match[1]
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), f"{field}.sampling{named_there}") from error
    except VLLMClientError as error:
        raise trace_refusal(error, field, named) or error from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), f"{field}.sampling") from error
    return params


def _check_extra(extra: Any, field: str) -> None:
    """Raise for ``extra_args`` that are no plain values, or have a key of the server's own."""
    if extra is None:
        return
    reserved = msgspec.convert(extra, _EXTRA).keys() & _RESERVED
    if reserved:
        raise ApiError(
            ErrorCode.BAD_REQUEST,
            f"extra_args may not name {min(reserved)!r}, which is the server's own",
            f"{field}.sampling.extra_args",
        )


logger = logging.getLogger(__name__)

_NO_SANDBOX: Final = "all sandboxes are at work, or all that one tenant may have"
MAX_TRACE_REQUESTS: Final = 256
"""Most vLLM requests of one trace, counting each invoke's ``n``."""
_MAX_EDITS: Final = 64
"""Maximum number of edits beside one block; each has a thread."""


class VLLMTraceEngine:
    """Runs traces in vLLM's workers; ``sandboxes`` are slots for traces in a process of their own."""

    name = "vllm"

    def __init__(
        self,
        engine: Callable[[], InterventionAsyncLLM],
        adapter_of: Callable[[TraceHead], LoRARequest | None],
        settings: Settings,
        sandboxes: Slots,
    ) -> None:
        self._engine = engine
        self._adapter_of = adapter_of
        self._settings = settings
        self._sandboxes = sandboxes

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a trace's blocks in vLLM's workers, see ``TraceEngine``; a sandboxed one waits for a slot."""
        check_head(request.head)
        if request.sandbox_of is not None:
            with translating_engine_death():
                await self._engine().prepare_sandbox()
        requests = requests_of(request, job_id, self._settings, self._adapter_of(request.head))
        async with contextlib.AsyncExitStack() as stack:
            if request.sandbox_of is not None:
                slot = self._sandboxes.request(
                    request.sandbox_of, job_id, may_exceed_queue=request.may_exceed_queue
                )
                if not slot.is_granted:
                    yield event_frame(JobStatus.QUEUED, message=_NO_SANDBOX, engine=self.name)
                await stack.enter_async_context(slot)
            run = MergedRun(self._engine(), requests)
            with _translating_errors(run):
                async with run:
                    frames = _Frames(run, streams=request.head.streams)
                    async for event in run:
                        for frame in frames.of(event):
                            yield frame
                    for frame in frames.of_end(await run.finish()):
                        yield frame


@contextlib.contextmanager
def _translating_errors(run: MergedRun) -> Iterator[None]:
    """Raise the run's errors as ApiErrors about the invoke that failed; unexpected ones are logged."""
    try:
        yield
    except SlowReaderError as error:
        raise ApiError(ErrorCode.CAPTURE_TOO_LARGE, str(error)) from error
    except Exception as error:
        field, params = "invokes", dict[str, Any]()
        if run.failed is not None:
            field = f"invokes.{run.failed}"
            params = msgspec.structs.asdict(run.requests.params[run.failed])
        refusal = trace_refusal(error, field, params)
        if refusal is None:
            logger.exception("a trace failed")
            raise internal_error() from error
        raise refusal from error


def check_head(head: TraceHead) -> None:
    """Raise ApiError for a head that does not describe a trace for vLLM, before anything is built from it."""
    if head.kind != "trace":
        message = f"A {head.kind} does not run in vLLM's workers; the traces in it do."
        raise ApiError(ErrorCode.UNSUPPORTED_COMBINATION, message, "kind")
    if not head.invokes or len(head.groups) != len(head.invokes) or head.num_edits:
        raise ApiError(
            ErrorCode.INVALID_TRACE,
            "A trace on vLLM has a request and a group of variables for each block and no edits among its "
            f"blocks, got {len(head.invokes)} requests, {len(head.groups)} groups, {head.num_edits} edits.",
            "invokes",
        )
    for index, invoke in enumerate(head.invokes):
        if len(invoke.edits) > _MAX_EDITS:
            message = f"A request may choose {_MAX_EDITS} edits, got {len(invoke.edits)}."
            raise ApiError(ErrorCode.INVALID_VALUE, message, f"invokes.{index}.edits")
    try:
        msgspec.msgpack.encode([head.groups, head.wanted, [invoke.prompt for invoke in head.invokes]])
    except (ValueError, OverflowError) as error:  # would otherwise fail on the way to the engine
        raise ApiError(ErrorCode.INVALID_TRACE, f"The trace's head is broken: {error}.") from error


def requests_of(
    request: TraceRequest, job_id: str, settings: Settings, adapter: LoRARequest | None = None
) -> TraceRequests:
    """Return a trace's requests, one for each invoke; ApiError if vLLM cannot use one, or for a limit."""
    head = request.head
    all_params = [
        sampling_params(invoke.sampling, f"invokes.{index}") for index, invoke in enumerate(head.invokes)
    ]
    num_requests = sum(params.n for params in all_params)
    if num_requests > MAX_TRACE_REQUESTS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"The trace's invokes make {num_requests} requests, each as many as its `n`; one trace may "
            f"have {MAX_TRACE_REQUESTS}.",
            "invokes",
        )
    edits = [[_edit_entry(edit, request) for edit in invoke.edits] for invoke in head.invokes]
    num_bytes = sum(
        params.n * len(edit.data or b"")
        for params, invoke_edits in zip(all_params, edits, strict=True)
        for edit in invoke_edits
    )
    if num_bytes > settings.max_trace_request_bytes:
        raise ApiError(
            ErrorCode.BODY_TOO_LARGE,
            f"The edits of all requests together have {num_bytes:,} bytes; they may have "
            f"{settings.max_trace_request_bytes:,}.",
            "invokes",
        )
    # The blocks go to the workers with the only request, or once, ahead of several.
    data = bytes(request.blocks)
    requests = TraceRequests(job_id, data if num_requests > 1 else None)
    for index, (invoke, params) in enumerate(zip(head.invokes, all_params, strict=True)):
        if not head.streams:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        entry = TraceEntry(
            job_id, index, params.n, data if requests.held is None else b"", head.groups, head.streams,
            edits[index], wanted=head.wanted, prints=True, codec=head.codec,
            compresses="zstd" in head.accepts,
            sandbox_of=request.sandbox_of,
        )  # fmt: skip
        requests.add(_prompt(invoke), params, entry, sender=request.tenant, adapter=adapter)
    return requests


class _Frames:
    def __init__(self, run: MergedRun, *, streams: bool) -> None:
        self._run = run
        self._streams = streams
        self._deltas: dict[int, list[tuple[int, bytes]]] = {}

    def of(self, event: TraceStarted | TraceEvent | Output) -> Iterator[Frame]:
        """Yield the frames for an event of the run; deltas of saved values wait for a block's next output."""
        if isinstance(event, TraceStarted):
            yield event_frame(JobStatus.RUNNING, engine=VLLMTraceEngine.name)
        elif isinstance(event, TraceEvent):
            if event.delta is not None:
                self._deltas.setdefault(event.block, []).append((event.choice, event.delta))
            yield from _log_frames(event.printed)
        elif self._streams:
            yield Frame(FrameKind.OUTPUT, self._output_data(event.block, event.output))

    def of_end(self, finished: FinishedTrace) -> Iterator[Frame]:
        """Yield the frames that end a trace: last prints, its block's error, the outputs and the result."""
        work = current_work()
        if work is not None:
            work.note_tier(finished.tier)
        yield from _log_frames(finished.printed)
        if finished.failure:
            yield event_frame(JobStatus.ERROR, message=finished.failure)
        yield json_frame(FrameKind.OUTPUTS, {**finished.results, TIER: finished.tier})
        yield Frame(FrameKind.RESULT, finished.data)

    def _output_data(self, block: int, output: RequestOutput) -> bytes:
        """Return the message of a block's output, with the deltas of saved values since the last one."""
        choices = [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
            }
            for choice in output.outputs
        ]
        deltas = self._deltas.pop(block, [])
        num_choices = self._run.requests.params[block].n
        return output_data(block, num_choices, choices, deltas, finished=output.finished)


def _log_frames(printed: str) -> Iterator[Frame]:
    if printed:
        yield event_frame(JobStatus.LOG, message=printed.removesuffix("\n"))


def _prompt(invoke: SentInvoke) -> dict[str, Any]:
    prompt = invoke.prompt
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _edit_entry(edit: SentEdit, request: TraceRequest) -> EditEntry:
    return EditEntry(edit.name, edit.digest, bytes(request.parts[edit.part]))
