"""The traces of a worker by key, from their first request until their saved values are collected or dropped.

A client that never collects leaves traces behind, so the oldest that have ended are dropped. At its end a
trace's blocks are closed, and its saved values are encoded as a message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from nnsight_engine.remote_backend.values.received_blocks import failure_of, outcome_of, outcome_pieces
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.serialization import encode, encode_error
from nnsight_engine.serialization.limits import MessageLimits
from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.json_values import NotPlainError, SaveBudget, plain_saves
from nnsight_engine.vllm_backend.traces.caches import first_values
from nnsight_engine.vllm_backend.traces.context import TraceContext
from nnsight_engine.vllm_backend.traces.errors import TraceBytesError
from nnsight_engine.vllm_backend.traces.points import place_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nnsight_engine.interleaving.threads import Threads
    from nnsight_engine.serialization import Policy
    from nnsight_engine.serialization.message import Piece
    from nnsight_engine.vllm_backend.traces.caches import RequestCache
    from nnsight_engine.vllm_backend.traces.context import TraceContext, TraceEntry
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.reporting import Reporting
    from nnsight_engine.vllm_backend.traces.request import TracedRequest
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool


class Result:
    """The value of ``tracer.result`` in the worker; the client replaces a saved one with its own result.

    ``reference`` is the client's name for it: the request's, or ``"<request>/<choice>"`` where choices have
    their own.
    """

    def __init__(self, plain: Any, reference: str) -> None:
        self._reference = reference
        for name, value in (plain or {}).items():
            setattr(self, name, value)

    @property
    def reference(self) -> tuple[str, str]:
        return "result", self._reference


def client_reference(value: Any) -> tuple[str, ...] | None:
    """Return the reference for a result, or for a place in the model; the client has both. Else None."""
    if isinstance(value, Result):
        return value.reference
    return place_of(value)


def checked(saves: dict[str, Any], max_bytes: int) -> tuple[dict[str, Any], NotPlainError | None]:
    """Return the saved values if JSON can represent them; otherwise an empty dict and the error."""
    try:
        plain_saves(saves, lambda _tensor: None, SaveBudget(max_bytes), frozenset({Result}))
    except NotPlainError as error:
        return {}, error
    return saves, None


_MAX_BYTES: Final = MessageLimits().max_bytes
_BESIDE_BYTES: Final = 2**24
"""Allowance for the parts of a message that are not tensors, such as errors."""
_BYTES_WRITTEN_A_SECOND: Final = 100e6
"""Minimum rate at which results are encoded; it extends the time that a block's thread may take."""


class EndedTrace(NamedTuple):
    """What is left of a trace that has ended, or of one of its blocks.

    Attributes:
        pieces: The encoded results.
        spent_s: Seconds that the engine has waited for it: for its blocks, decoding them and encoding their
            saved values.
        printed: Printed text that has not been reported yet.
        failure: One line about how a block failed; empty if none did.
        tier: How its steps ran, see ``TracedRequest``.
        has_begun: False if there was no sandbox process for it.
    """

    pieces: list[Piece]
    spent_s: float
    printed: str = ""
    failure: str = ""
    tier: str = "tap"
    has_begun: bool = True


@dataclasses.dataclass(slots=True)
class TraceMember:
    request: TracedRequest | None
    context: TraceContext | None
    entry: TraceEntry
    choice: int
    error: BaseException | None = None
    shapes: RequestCache | None = None
    is_known: bool = False


class TraceEnd:
    """Closes blocks and encodes their results, on ``threads``: that runs code of the blocks' objects."""

    def __init__(self, threads: Threads, max_bytes: int, max_message_bytes: int = _MAX_BYTES) -> None:
        self._threads = threads
        self._max_bytes = max_bytes
        self._max_message_bytes = max_message_bytes

    def failed(self, members: Sequence[TraceMember], error: BaseException) -> bytes:
        """Return the message of a trace one of whose requests did not reach the trace's sandbox process."""
        blocks = [
            outcome_of(member.entry.index, {}, self.error_data(member.error or error), choice=member.choice)
            for member in members
        ]
        return encode({"blocks": blocks, "before": None})

    def closed(self, member: TraceMember, results: Mapping[str, Any]) -> dict[str, Any]:
        """Close a request's block; return its saved values, or its error, as data for the client."""
        error = member.error
        if member.request is not None:
            name = f"{member.entry.index}/{member.choice}"
            reference = name if member.entry.plain else str(member.entry.index)
            member.request.close(Result(results.get(name), reference))
            error = member.request.error
        saves: dict[str, Any] = {}
        flows: dict[str, Any] = {}
        if member.context is not None and member.request is not None and not is_too_much(error):
            saves = member.context.saves(member.entry.index)
            flows = member.context.flows(member.entry.index)
        if member.entry.plain:
            saves, error = ({}, error) if error is not None else checked(saves, self._max_bytes)
        data = None if error is None else self.error_data(error)
        warnings = [] if member.request is None or data is not None else member.request.warnings()
        outcome = outcome_of(
            member.entry.index, saves, data, choice=member.choice, flows=flows, warnings=warnings
        )
        return outcome | {"shapes": {} if member.shapes is None else first_values(member.shapes)}

    def encoded(self, message: dict[str, Any], num_bytes: int, *, compress: bool) -> list[Piece]:
        """Return a trace's results as pieces, encoded on a block thread: it runs code of the saved objects.

        ``num_bytes``, their size, extends the thread's time. If encoding fails, the message carries the
        error in place of the values.
        """
        max_bytes = min(self._max_bytes * len(message["blocks"]), self._max_message_bytes) + _BESIDE_BYTES
        limits = MessageLimits(max_bytes=max_bytes)
        stack = self._threads.take_stack()
        stack.left_s += num_bytes / _BYTES_WRITTEN_A_SECOND
        pieces: list[Piece] | None
        pieces, error = stack.start(
            lambda: outcome_pieces(message, client_reference, compress=compress, limits=limits)
        ).empty()
        if pieces is not None:
            return pieces
        for block in message["blocks"]:
            block["saves"] = block["flows"] = {}
            block["error"] = block["error"] or self.error_data(error)
        return [encode({**message, "before": None})]

    def error_data(self, error: BaseException) -> dict[str, Any]:
        """Return an error as data, encoded on a block thread: it runs code of the error's class."""
        try:
            data: dict[str, Any] = self._threads.run(lambda: encode_error(error))
        except BaseException as failed:  # noqa: BLE001 - whatever that code does
            name, why = type(error).__name__, type(failed).__name__
            return encode_error(RuntimeError(f"the block raised {name}, which cannot be sent: {why}"))
        return data


def is_too_much(error: BaseException | None) -> bool:
    """Return whether a request has failed because it held too much memory."""
    return isinstance(error, TraceBytesError)


_MAX_UNCOLLECTED: Final = 1024
"""Limit for ended traces that wait to be collected; beyond it the oldest are dropped."""


class TraceStore:
    """The traces that have not been collected."""

    def __init__(
        self, sandboxes: SandboxPool, reporting: Reporting, threads: Threads, max_bytes: int
    ) -> None:
        self.members: dict[str, TraceMember] = {}
        self.threads = threads
        self.closing = TraceEnd(threads, max_bytes)
        self._sandboxes = sandboxes
        self._reporting = reporting
        self._contexts: dict[tuple[str, int], TraceContext] = {}  # by key and choice
        self._by_key: dict[str, list[str]] = {}  # request ids
        self._held: dict[str, bytes] = {}  # encoded blocks that came before their requests
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return len(self._by_key.keys() | self._held.keys())

    def hold(self, key: str, data: bytes) -> None:
        self._held[key] = data

    def with_blocks(self, entry: TraceEntry) -> TraceEntry:
        return entry if entry.data else msgspec.structs.replace(entry, data=self._held.get(entry.key, b""))

    def add(self, request_id: str, entry: TraceEntry) -> TraceMember:
        member = self.members[request_id] = TraceMember(None, None, entry, 0)
        self._by_key.setdefault(entry.key, []).append(request_id)
        return member

    def decode(self, member: TraceMember, model: WorkerModel, policy: Policy | None) -> None:
        """Decode the blocks into ``member.context``, once per choice, or set ``member.error``."""
        name = (member.entry.key, member.choice)
        member.context = self._contexts.get(name)
        if member.context is not None:
            return
        entry = self.with_blocks(member.entry)
        # On a block thread, because decoding a trace runs its sender's code, and outside of inference mode.
        with self._timed(entry.key):
            member.context, member.error = (
                self.threads.take_stack().start(lambda: TraceContext(entry, model, policy)).empty()
            )
        if member.context is not None:
            self._contexts[name] = member.context

    @contextlib.contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        """Add the seconds in this context to those that the engine has waited for the trace."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spent_s[key] += time.monotonic() - begin

    def requests(self, key: str, index: int | None = None) -> list[str]:
        """Return the ids of a trace's requests that are not collected yet, or of those of one block."""
        return [
            request_id
            for request_id in self._by_key.get(key, ())
            if index in {None, self.members[request_id].entry.index}
        ]

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> EndedTrace:
        """Close blocks whose requests have ended.

        Host tensors are pieces without a copy: they must be written out before the worker does anything else.

        Args:
            results: The result of each request, by ``"<block>/<choice>"``, for blocks that wait for it.
            index: The only block to close; the trace, not a sandboxed one, continues. None ends it.

        Raises:
            RuntimeError: The trace is sandboxed and its values have not arrived, see ``has_collected``.
        """
        if index is None:
            self._held.pop(key, None)
        if key in self._by_key and self._sandboxes.knows(key):
            return self._collected_of_sandbox(key)
        request_ids = self.requests(key, index)
        all_ids = self._by_key.pop(key, None)
        if all_ids is None:
            pieces: list[Piece] = [encode({"blocks": [], "before": None})]
            return EndedTrace(pieces, self._spent_s.pop(key, 0.0))
        if index is not None:
            self._by_key[key] = [request_id for request_id in all_ids if request_id not in request_ids]
        members = [self.members.pop(request_id) for request_id in request_ids]
        in_order = sorted(members, key=lambda member: (member.entry.index, member.choice))
        blocks = [self.closing.closed(member, results) for member in in_order]
        for request_id in request_ids:
            self._reporting.close(request_id, key)
        if any(member.entry.prints for member in members):  # the client fetches prints and failure together
            self._reporting.fail(key, failure_of(blocks))
        contexts = [context for name, context in self._contexts.items() if name[0] == key]
        # Containers shared by all blocks; a block that saved too much may have filled them.
        too_much = any(member.request is not None and is_too_much(member.request.error) for member in members)
        before = contexts[0].saved_before if contexts and not too_much else None
        if index is None:
            for name in [name for name in self._contexts if name[0] == key]:
                del self._contexts[name]
        requests = [member.request for member in members if member.request is not None]
        self._spent_s[key] += sum(request.spent_s for request in requests)
        num_bytes = sum(request.memory.result_bytes for request in requests)
        compress = any(member.entry.compresses for member in members)
        with self._timed(key):
            pieces = self.closing.encoded({"blocks": blocks, "before": before}, num_bytes, compress=compress)
        tier = "eager" if any(request.tier == "eager" for request in requests) else "tap"
        has_begun = not any(isinstance(member.error, SandboxUnavailableError) for member in members)
        if index is not None:  # the rest will be closed later
            return EndedTrace(pieces, self._spent_s[key], tier=tier, has_begun=has_begun)
        remaining = self._reporting.take_remaining(key)
        return EndedTrace(pieces, self._spent_s.pop(key), *remaining, tier, has_begun)

    def _collected_of_sandbox(self, key: str) -> EndedTrace:
        """End a sandboxed trace; all its blocks fail if one of its requests did not reach the process."""
        ended = self._sandboxes.collect(key)
        members = [self.members.pop(request_id) for request_id in self._by_key.pop(key)]
        error_outside = next((member.error for member in members if member.error is not None), None)
        if error_outside is None:
            return ended
        has_begun = ended.has_begun and not isinstance(error_outside, SandboxUnavailableError)
        return ended._replace(pieces=[self.closing.failed(members, error_outside)], has_begun=has_begun)

    def drop(self, key: str) -> float:
        """Drop a trace without its results; return the seconds that the engine has waited for it."""
        self._held.pop(key, None)
        self._spent_s[key] += self._sandboxes.drop(key)
        if key in self._by_key:
            return self.collect(key, {}).spent_s
        return self._spent_s.pop(key)

    def excess(self, has_block: Callable[[str], bool]) -> list[str]:
        """Return the oldest traces without a block that runs, if more are stored than may be."""
        num_over = len(self._by_key) - _MAX_UNCOLLECTED
        if num_over <= 0:
            return []
        ended = (key for key, requests in self._by_key.items() if not any(map(has_block, requests)))
        return list(itertools.islice(ended, num_over))
