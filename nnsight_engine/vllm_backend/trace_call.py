"""One API call whose ``interventions`` are a trace: its block runs beside each of the prompts.

To vLLM's serving classes it is a ticket like other calls (``call``). The engine begins each prompt here and
ends it here, when the worker has said what came of its block; the answers' choices take their results here.
What is read here may be a stranger's bytes: of a process whose code is nobody's but theirs. They are read as
data of a size that is known before, and what cannot be read is the failure of its own request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.tensor_bytes import DTYPES, tensor_to_bytes
from nnsight_engine.plans.collected import CollectedResults, TensorResult, TraceResult
from nnsight_engine.remote_backend.outcomes import warnings_of
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.serialization import DecodeError, MessageLimits, decode
from nnsight_engine.tracing.given_text import NUM_LINES_BEFORE
from nnsight_engine.vllm_backend.json_values import NotPlainError, plain_saves
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
# Neither is ever compressed for a call: its values are made JSON here.
_NEWS: Final = MessageLimits(max_bytes=MAX_PENDING_BYTES, max_nodes=1_000_000, compressed=False)
_RESULTS: Final = MessageLimits(compressed=False)
_UNREADABLE: Final = (DecodeError, LookupError, TypeError, ValueError, AttributeError)
"""What reading raises where a message is not what it should be."""
_SLOW_BYTES: Final = 2**20


@dataclasses.dataclass(slots=True)
class _Choice:
    """What one choice of a prompt has told, and in the end saved.

    Attributes:
        news: What it told since the last chunk, as it came; None where something was dropped.
        num_pending: Bytes of that.
        printed: What it printed since then.
        sent: The names whose values went out and nothing of them was lost since, so that items may follow.
        saves: Everything it saved, once it has ended.
        warnings: What it is to be warned of, once it has ended.
    """

    news: list[bytes | None] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    printed: list[str] = dataclasses.field(default_factory=list)
    sent: set[str] = dataclasses.field(default_factory=set)
    saves: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def hear(self, told: TraceEvent) -> int:
        """Keep what was told; returns the size of what waits for the next chunk."""
        if told.printed:
            self.printed.append(told.printed)
        if told.news is None:
            return 0
        self.news.append(told.news)
        self.num_pending += len(told.news)
        return len(told.news)

    def drop(self) -> None:
        """Let go of what waits: values come when they are whole again, with the last chunk if not before."""
        self.news[:] = [None]
        self.num_pending = 0

    def take_unread(self) -> list[bytes | None]:
        """Return what waits; what is told from now on waits for the next chunk."""
        unread, self.news, self.num_pending = self.news, [], 0
        return unread

    def read(self, unread: Sequence[bytes | None]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is new in JSON's types: values, and items that lists grew by."""
        saves: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for data in unread:
            if data is None:
                self.sent.clear()
                continue
            message = decode(data, limits=_NEWS)
            for name, value in _named(message["whole"]).items():
                saves[name] = value
                grown.pop(name, None)
                self.sent.add(name)
            for name, items in _named(message["grown"]).items():
                if name not in self.sent:
                    continue  # those before them are missing
                if name in saves:
                    saves[name] = [*saves[name], *items]
                else:
                    grown.setdefault(name, []).extend(items)
        return self._plain(saves), self._plain(grown)

    def _plain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name, value in values.items():
            try:
                plain.update(plain_saves({name: value}, _tensor))
            except NotPlainError:  # the last chunk says so
                self.sent.discard(name)
        return plain

    def take_printed(self) -> str:
        printed = "".join(self.printed)
        self.printed.clear()
        return printed


class HeldSlot(Protocol):
    """A prompt's place among those that run at once."""

    async def taken(self) -> None:
        """Wait for it."""

    def leave(self) -> None:
        """Leave it, or wait for it no more; harmless when repeated."""


class _NoPlace:
    """The place of a prompt of which any number run at once."""

    async def taken(self) -> None:
        pass

    def leave(self) -> None:
        pass


class TracedPrompt:
    """One prompt of the call while it runs.

    Attributes:
        key: What the worker knows its trace by.
        request_id: What vLLM calls its request, and no other: clients may have given several one name, and
            who ends one of them by it ends all.
        choices: One for each of its choices.
        place: Its place among those that run at once, which is left when the worker has forgotten it.
        has_begun: Whether the worker may know of it.
        is_over: Whether the worker has forgotten it.
        tier: How its steps ran, once it is over.
        share: Where what waits for the next chunk is counted, with that of all traces.
    """

    share: UnreadShare

    def __init__(self, call: TraceCall, request_id: str, num_choices: int) -> None:
        """Begin with one prompt."""
        self.key = uuid.uuid4().hex
        self.request_id = f"{request_id}-{self.key}"
        self.choices = [_Choice() for _ in range(num_choices)]
        self.place = call.place()
        self.has_begun = self.is_over = False
        self.tier = ""
        self._call = call

    def entry(self) -> TraceEntry:
        """Return what its request carries; with several choices the blocks go ahead of them."""
        data = self._call.data if len(self.choices) == 1 else b""
        return TraceEntry(
            self.key, 0, len(self.choices), data, [{}], self._call.streams,
            prints=True, plain=True, sandbox_of=self._call.sandbox_of,
        )  # fmt: skip

    def hear(self, told: TraceEvent) -> None:
        """Take note of what a block told after a step."""
        self.share.add(self.choices[told.choice].hear(told))

    def drop(self, _error: SlowReaderError) -> None:
        """Let go of what waits for the next chunk; the last one has everything."""
        for choice in self.choices:
            choice.drop()

    async def take_news(self, choice: _Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a choice has told since the last call.

        Raises:
            ApiError: ``trace_failed``: it cannot be read.
        """
        num_bytes = choice.num_pending
        self.share.take(num_bytes)
        unread = choice.take_unread()
        with self._read("told"):
            if num_bytes < _SLOW_BYTES:
                return choice.read(unread)
            return await asyncio.to_thread(choice.read, unread)

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
        """Take what came of the block; may take long, and is called on a thread.

        Raises:
            ApiError: The block failed, or there is nothing of it.
        """
        results = results_of({0: output})
        with self._read("left behind"):
            message = decode(data, resolve=lambda _: next(iter(results.values()), None), limits=_RESULTS)
            for block in message["blocks"]:
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
            choice.saves = plain_saves(saves, _tensor)
        except NotPlainError as error:
            raise ApiError(ErrorCode.TRACE_FAILED, str(error), self._call.param) from error


class TraceCall:
    """A call with a trace.

    Args:
        data: The block as a message, see ``request_code``.
        name: Key of the result.
        param: Where the operation stands in the request.
        filename: What tracebacks call the code.
        streams: Whether the answer streams.
        max_requests: How many requests it may make.
        sandbox_of: In whose sandbox it runs; nothing where it runs as the engine's own.

    Attributes:
        place: Asks for a place for one prompt; raises ApiError where too many wait. Any number run at once
            until somebody sets another.
    """

    place: Callable[[], HeldSlot] = _NoPlace

    def __init__(
        self,
        data: bytes,
        *,
        name: str,
        param: str,
        filename: str,
        streams: bool,
        max_requests: int,
        sandbox_of: str = "",
    ) -> None:
        """Start with no prompt."""
        self.ticket = uuid.uuid4().hex
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
        """Take on a prompt.

        Raises:
            ApiError: The call makes too many requests, or streams several choices; ``queue_full``.
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
        """Return what is new of a choice since the last call; None where nothing is.

        Raises:
            ApiError: ``trace_failed``: it cannot be read.
        """
        prompt, found = self._choice(choice, num_choices)
        saves, grown = await prompt.take_news(found)
        printed = found.take_printed()
        if not (saves or grown or printed):
            return None
        return CollectedResults([TraceResult(self._name, saves, grown, printed)], final=False)

    def take_final(self, choice: int, num_choices: int) -> CollectedResults:
        """Return everything that a choice has saved."""
        prompt, found = self._choice(choice, num_choices)
        result = TraceResult(self._name, found.saves or {}, {}, found.take_printed(), found.warnings)
        return CollectedResults([result], is_code=True, tier=prompt.tier)

    def failed(self, error: Mapping[str, Any]) -> ApiError:
        """Return the error of a block, which ``encode_error`` has told."""
        if (error.get("module"), error["name"]) == _NO_SANDBOX:  # no fault of the block's
            return ApiError(ErrorCode.QUEUE_FULL, f"The trace did not begin: {error['message']}", self.param)
        place = self._place(error.get("entries") or ())
        notes = "".join(f" {note}" for note in error.get("notes") or ())
        return ApiError(
            ErrorCode.TRACE_FAILED,
            f"The trace failed{place}: {error['name']}: {error['message']}{notes}",
            self.param,
        )

    def _place(self, entries: Sequence[Mapping[str, Any]]) -> str:
        for entry in reversed(entries):
            if entry["file"] == self._filename:
                return f" in line {entry['line'] - NUM_LINES_BEFORE}, `{entry['source'].strip()}`"
        if entries:
            return f" in {entries[-1]['file']}, line {entries[-1]['line']}, `{entries[-1]['source'].strip()}`"
        return ""

    def _choice(self, choice: int, num_choices: int) -> tuple[TracedPrompt, _Choice]:
        # vLLM numbers choices prompt by prompt.
        number, index = divmod(choice, num_choices)
        prompt = self.prompts[number]
        return prompt, prompt.choices[index]


def _named(values: Any) -> dict[str, Any]:
    """Return values by variable, as they should be."""
    if type(values) is not dict or not all(type(name) is str for name in values):
        raise DecodeError("its values have no names")
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
