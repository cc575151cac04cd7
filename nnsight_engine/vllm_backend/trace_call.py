"""An API call whose ``interventions`` are a trace: its block runs together with each of the prompts.

Like other calls, it passes through vLLM's serving classes as a ticket (``call``). The engine starts each
prompt here, and ends it here once the worker has returned the results of its block; the answer's choices take
their results from here.

Hazard: the bytes decoded here may come from a sandbox process that runs untrusted code. They are decoded as
data only, with limits on their size. Bytes that cannot be decoded fail only the request they belong to.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import torch

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.tensor_bytes import DTYPES, tensor_to_bytes
from nnsight_engine.plans.collect.results import CollectedResults, CollectedTrace, TensorResult
from nnsight_engine.remote_backend.values.outcomes import warnings_of
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.serialization import DecodeError, MessageLimits, Policy, decode
from nnsight_engine.tracing.text_blocks import NUM_LINES_BEFORE
from nnsight_engine.vllm_backend.json_values import NotPlainError, SaveBudget, plain_saves
from nnsight_engine.vllm_backend.traced_requests import results_of
from nnsight_engine.vllm_backend.traces.entry import TraceEntry

if TYPE_CHECKING:
    from vllm import RequestOutput

    from nnsight_engine.remote_backend.backpressure import SlowReaderError, UnreadShare
    from nnsight_engine.vllm_backend.trace_router import TraceEvent

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_AS_INT64: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})
_NO_SANDBOX: Final = (SandboxUnavailableError.__module__, SandboxUnavailableError.__qualname__)
MAX_PENDING_BYTES: Final = 256 * 2**20
# For a call neither is compressed: its values are converted to JSON here.
_DELTA_LIMITS: Final = MessageLimits(max_bytes=MAX_PENDING_BYTES, max_nodes=1_000_000, compressed=False)
_RESULTS: Final = MessageLimits(compressed=False)
_UNREADABLE: Final = (
    DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError,
    msgspec.ValidationError,
)  # fmt: skip
"""Exceptions that decoding a malformed message may raise."""
_PLAIN: Final = Policy(lambda _module, _name: False)
"""Values are plain, so no class is needed, and importing one would cost this process time and memory."""
_SLOW_BYTES: Final = 2**20
_MAX_BYTES: Final = 4 * 2**30
_MAX_ENTRIES: Final = 64
_MAX_NOTES: Final = 16
_MAX_TEXT: Final = 10_000
"""Characters of one part of an error's message."""


class _Entry(msgspec.Struct):
    """A line of a block's traceback."""

    file: str
    line: int
    source: str


class _BlockError(msgspec.Struct):
    """The parts of an error, as ``encode_error`` encodes it, that are reported.

    They are converted to fixed types, because the text of a deep list may take for ever to make.
    """

    name: str
    message: str
    module: str = ""
    notes: list[str] = []
    entries: list[_Entry] = []

    @classmethod
    def of(cls, error: Any) -> _BlockError:
        """Return a decoded error; raises msgspec.ValidationError if it is none."""
        if type(error) is not dict:
            raise DecodeError("its error has no parts")
        parts = {name: error[name] for name in ("name", "message", "module") if name in error}
        for name, most in (("notes", _MAX_NOTES), ("entries", _MAX_ENTRIES)):
            if type(error.get(name)) is list:
                parts[name] = error[name][-most:]
        return msgspec.convert(parts, cls)


@dataclasses.dataclass(slots=True)
class _Choice:
    """The events of one choice of a prompt and, once it has ended, its saved values.

    Attributes:
        deltas: Encoded values received since the last chunk; None in place of values that were dropped.
        num_pending: Size of ``deltas`` in bytes.
        printed: Text printed since the last chunk.
        sent: Names whose values were sent and of which nothing was dropped since, so that new items of a list
            may be sent alone.
        saves: All saved values, once the choice has ended.
        warnings: Warnings for the client, once the choice has ended.
    """

    deltas: list[bytes | None] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    printed: list[str] = dataclasses.field(default_factory=list)
    sent: set[str] = dataclasses.field(default_factory=set)
    saves: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def add_event(self, event: TraceEvent) -> int:
        """Store an event for the next chunk; return the number of bytes added to ``deltas``."""
        if event.printed:
            self.printed.append(event.printed)
        if event.delta is None:
            return 0
        self.deltas.append(event.delta)
        self.num_pending += len(event.delta)
        return len(event.delta)

    def drop(self) -> None:
        """Drop the pending values; each is sent again when it arrives whole, or with the last chunk."""
        self.deltas[:] = [None]
        self.num_pending = 0

    def take_unread(self) -> list[bytes | None]:
        """Return the pending values; later events go to the next chunk."""
        unread, self.deltas, self.num_pending = self.deltas, [], 0
        return unread

    def read(self, unread: Sequence[bytes | None], max_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the new data as JSON values: whole values, and items by which lists grew."""
        saves: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for data in unread:
            if data is None:
                self.sent.clear()
                continue
            message = decode(data, policy=_PLAIN, limits=_DELTA_LIMITS)
            for name, value in _named(message["whole"]).items():
                saves[name] = value
                grown.pop(name, None)
                self.sent.add(name)
            for name, items in _named(message["grown"]).items():
                if name not in self.sent:
                    continue  # the items before them were dropped
                if name in saves:
                    saves[name] = [*_listed(saves[name]), *_listed(items)]
                else:
                    grown.setdefault(name, []).extend(_listed(items))
        budget = SaveBudget(max_bytes)
        return self._plain(saves, budget), self._plain(grown, budget)

    def _plain(self, values: Mapping[str, Any], budget: SaveBudget) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name, value in values.items():
            try:
                plain.update(plain_saves({name: value}, _tensor, budget))
            except NotPlainError:  # the last chunk reports the error
                self.sent.discard(name)
        return plain

    def take_printed(self) -> str:
        printed = "".join(self.printed)
        self.printed.clear()
        return printed


class HeldSlot(Protocol):
    """A slot for one of the prompts that may run at the same time."""

    async def wait_granted(self) -> None:
        """Wait for the slot."""

    def release(self) -> None:
        """Release the slot, or stop waiting for it; idempotent."""


class _NoSlot:
    """The slot of a prompt when the number of prompts is not limited."""

    async def wait_granted(self) -> None:
        pass

    def release(self) -> None:
        pass


class TracedPrompt:
    """One prompt of the call while it runs.

    Attributes:
        key: The trace's key in the worker.
        request_id: vLLM's id of the request. It is unique, because clients may send the same id several
            times, and aborting by a shared id would abort all of its requests.
        choices: One ``_Choice`` for each of the prompt's choices.
        slot: The prompt's slot, released when the worker has dropped the trace.
        has_begun: Whether the worker may know the trace.
        is_over: Whether the worker has dropped the trace.
        tier: How its steps ran, once it is over.
        share: Its share of the backpressure limit, which counts the pending bytes of all traces.
    """

    share: UnreadShare

    def __init__(self, call: TraceCall, request_id: str, num_choices: int) -> None:
        self.key = uuid.uuid4().hex
        self.request_id = f"{request_id}-{self.key}"
        self.choices = [_Choice() for _ in range(num_choices)]
        self.slot = call.slot()
        self.has_begun = self.is_over = False
        self.tier = ""
        self._call = call

    def entry(self) -> TraceEntry:
        """Return the trace entry of the prompt's request.

        With several choices the entry has no data: the block is sent to the worker before the requests.
        """
        data = self._call.data if len(self.choices) == 1 else b""
        return TraceEntry(
            self.key, 0, len(self.choices), data, [{}], self._call.streams,
            prints=True, plain=True, sandbox_of=self._call.sandbox_of,
        )  # fmt: skip

    def add_event(self, event: TraceEvent) -> None:
        """Store an event that a block sent after a step."""
        self.share.add(self.choices[event.choice].add_event(event))

    def drop(self, _error: SlowReaderError) -> None:
        """Drop the pending values of all choices; the last chunk contains everything."""
        for choice in self.choices:
            choice.drop()

    async def take_deltas(self, choice: _Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the data of a choice that is new since the last call.

        Raises:
            ApiError: ``trace_failed``: the data cannot be decoded.
        """
        num_bytes = choice.num_pending
        self.share.take(num_bytes)
        unread = choice.take_unread()
        with self._read("told"):
            if num_bytes < _SLOW_BYTES:
                return choice.read(unread, self._call.max_bytes)
            return await asyncio.to_thread(choice.read, unread, self._call.max_bytes)

    @contextlib.contextmanager
    def _read(self, what: str) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise ApiError(
                ErrorCode.TRACE_FAILED,
                f"What the trace {what} cannot be read: {error}. This request only is concerned.",
                self._call.param,
            ) from error

    def finish(self, data: bytes | memoryview, printed: str, output: RequestOutput) -> None:
        """Decode the results of the block into the choices; may be slow, so it is called on a thread.

        Raises:
            ApiError: The block failed, or the worker returned no results.
        """
        results = results_of({0: output})
        with self._read("left behind"):
            message = decode(
                data,
                resolve=lambda reference: results.get("/".join(reference[1:])),
                policy=_PLAIN,
                limits=_RESULTS,
            )
            blocks = _listed(message["blocks"])
            if len(blocks) > len(self.choices):
                raise DecodeError("it has more blocks than choices")
            for block in blocks:
                if block["error"] is not None:
                    raise self._call.failed(block["error"])
                choice = self.choices[block["choice"]]
                choice.warnings = warnings_of(block)
                self._keep(choice, _named(block["saves"]))
        if any(choice.saves is None for choice in self.choices):
            raise ApiError(
                ErrorCode.INTERVENTION_FAILED,
                "The engine returned nothing of the trace: too many waited to be collected. Send it again.",
                self._call.param,
            )
        self.choices[0].printed.append(printed)

    def _keep(self, choice: _Choice, saves: dict[str, Any]) -> None:
        try:
            choice.saves = plain_saves(saves, _tensor, SaveBudget(self._call.max_bytes))
        except NotPlainError as error:
            raise ApiError(ErrorCode.TRACE_FAILED, str(error), self._call.param) from error


class TraceCall:
    """A call with a trace.

    Args:
        data: The encoded block, see ``request_code``.
        name: Key of the result.
        param: Location of the operation in the request, for errors.
        filename: File name of the code in tracebacks.
        streams: Whether the answer is streamed.
        max_requests: Limit on the number of requests (choices of all prompts).
        max_bytes: Limit on the saved values of one choice.
        sandbox_of: The tenant in whose sandbox the block runs; empty to run it in the worker as trusted code.

    Attributes:
        slot: Requests a slot for one prompt; raises ApiError if too many are waiting. The default does not
            limit the number of prompts.
    """

    slot: Callable[[], HeldSlot] = _NoSlot

    def __init__(
        self,
        data: bytes,
        *,
        name: str,
        param: str,
        filename: str,
        streams: bool,
        max_requests: int,
        max_bytes: int = _MAX_BYTES,
        sandbox_of: str = "",
    ) -> None:
        self.ticket = uuid.uuid4().hex
        self.max_bytes = max_bytes
        self.data = data
        self.param = param
        self.streams = streams
        self.sandbox_of = sandbox_of
        self.failure: ApiError | None = None
        self.prompts: list[TracedPrompt] = []
        self._name = name
        self._filename = filename
        self._max_requests = max_requests
        self._num_requests = 0

    def begin(self, request_id: str, num_choices: int) -> TracedPrompt:
        """Start a prompt.

        Raises:
            ApiError: The call makes too many requests or streams several choices; ``queue_full`` if no slot
                can be waited for.
        """
        self._num_requests += num_choices
        if self._num_requests > self._max_requests:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request with a trace may have {self._max_requests} choices, those of all its prompts "
                "together; send fewer prompts, or a smaller `n`.",
                self.param,
            )
        if self.streams and num_choices > 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"A stream with a trace has one choice for each prompt, got `n` {num_choices}: what a choice "
                "saved is collected when all choices of its prompt have ended.",
                "n",
            )
        prompt = TracedPrompt(self, request_id, num_choices)
        self.prompts.append(prompt)
        return prompt

    async def take_part(self, choice: int, num_choices: int) -> CollectedResults | None:
        """Return the results of a choice that are new since the last call, or None.

        Raises:
            ApiError: ``trace_failed``: the data cannot be decoded.
        """
        prompt, found = self._choice(choice, num_choices)
        saves, grown = await prompt.take_deltas(found)
        printed = found.take_printed()
        if not (saves or grown or printed):
            return None
        return CollectedResults([CollectedTrace(self._name, saves, grown, printed)], final=False)

    def take_final(self, choice: int, num_choices: int) -> CollectedResults:
        """Return all that a choice has saved."""
        prompt, found = self._choice(choice, num_choices)
        result = CollectedTrace(self._name, found.saves or {}, {}, found.take_printed(), found.warnings)
        return CollectedResults([result], is_code=True, tier=prompt.tier)

    def failed(self, encoded: Any) -> ApiError:
        """Return the API error for a block's error, given as ``encode_error`` encodes it.

        Raises:
            DecodeError: It is no error.
            msgspec.ValidationError: The same.
        """
        error = _BlockError.of(encoded)
        message = error.message[:_MAX_TEXT]
        if (error.module, error.name) == _NO_SANDBOX:  # not an error of the block
            return ApiError(ErrorCode.QUEUE_FULL, f"The trace did not begin: {message}", self.param)
        notes = "".join(f" {note[:_MAX_TEXT]}" for note in error.notes)
        return ApiError(
            ErrorCode.TRACE_FAILED,
            f"The trace failed{self._line(error.entries)}: {error.name[:_MAX_TEXT]}: {message}{notes}",
            self.param,
        )

    def _line(self, entries: Sequence[_Entry]) -> str:
        """Return the line of the client's code that failed, else the last line."""
        for entry in reversed(entries):
            if entry.file == self._filename:
                return f" in line {entry.line - NUM_LINES_BEFORE}, `{entry.source[:_MAX_TEXT].strip()}`"
        if entries:
            last = entries[-1]
            source = last.source[:_MAX_TEXT].strip()
            return f" in {last.file[:_MAX_TEXT]}, line {last.line}, `{source}`"
        return ""

    def _choice(self, choice: int, num_choices: int) -> tuple[TracedPrompt, _Choice]:
        # vLLM numbers choices prompt by prompt.
        number, index = divmod(choice, num_choices)
        prompt = self.prompts[number]
        return prompt, prompt.choices[index]


def _named(values: Any) -> dict[str, Any]:
    """Return ``values`` if it is a dict with string keys, as values by variable must be."""
    if type(values) is not dict or not all(type(name) is str for name in values):
        raise DecodeError("its values have no names")
    return values


def _listed(values: Any) -> list[Any]:
    """Return ``values`` if it is a list; a range would take any memory."""
    if type(values) is not list:
        raise DecodeError("its values are no list")
    return values


def _tensor(value: torch.Tensor) -> TensorResult:
    if value.dtype in _AS_INT64:
        value = value.to(torch.int64)
    name = _NAMES.get(value.dtype)
    if name is None or value.is_meta:
        where = " without numbers" if value.is_meta else ""
        raise ValueError(
            f"it holds a tensor of {str(value.dtype).removeprefix('torch.')}{where}; `.float()` makes one "
            "that can be"
        )
    return TensorResult(name, tuple(value.shape), tensor_to_bytes(value))


__all__ = ["TraceCall", "TracedPrompt"]
