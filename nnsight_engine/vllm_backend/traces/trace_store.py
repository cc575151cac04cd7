"""The traces of a worker by key, from their first request until their saved values are collected or dropped.

A client that never collects leaves traces behind, so the oldest that have ended are dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from nnsight_engine.remote_backend.values.received_blocks import failure_of
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.serialization import encode
from nnsight_engine.vllm_backend.traces.context import TraceContext
from nnsight_engine.vllm_backend.traces.trace_end import TraceEnd, TraceMember, is_too_much

if TYPE_CHECKING:
    from nnsight_engine.interleaving.threads import Threads
    from nnsight_engine.serialization import Policy
    from nnsight_engine.serialization.message.table import Piece
    from nnsight_engine.vllm_backend.traces.entry import TraceEntry
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.reporting import Reporting
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool

_MAX_UNCOLLECTED: Final = 1024
"""Limit for ended traces that wait to be collected; beyond it the oldest are dropped."""


class TraceStore:
    """The traces that have not been collected.

    Attributes:
        last_spent_s: Seconds that the engine has waited for the trace closed last: for its blocks, decoding
            them and encoding their saved values.
        last_tier: How the steps of the trace closed last ran, see ``TracedRequest``.
        last_has_begun: False if there was no sandbox process for the trace closed last.
    """

    def __init__(
        self, sandboxes: SandboxPool, reporting: Reporting, threads: Threads, max_bytes: int
    ) -> None:
        self.members: dict[str, TraceMember] = {}
        self.threads = threads
        self.closing = TraceEnd(threads, max_bytes)
        self._sandboxes = sandboxes
        self._reporting = reporting
        self._contexts: dict[tuple[str, int], TraceContext] = {}
        self._by_key: dict[str, list[str]] = {}
        self._held: dict[str, bytes] = {}
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self.last_spent_s = 0.0
        self.last_tier = "tap"
        self.last_has_begun = True

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
        name = (member.entry.key, member.choice)
        member.context = self._contexts.get(name)
        if member.context is not None:
            return
        entry = self.with_blocks(member.entry)
        # On a block thread, because decoding a trace runs its sender's code, and outside of inference mode.
        with self._timed(entry.key):
            member.context, member.error = (
                self.threads.take().start(lambda: TraceContext(entry, model, policy)).empty()
            )
        if member.context is not None:
            self._contexts[name] = member.context

    @contextlib.contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spent_s[key] += time.monotonic() - begin

    def requests(self, key: str, index: int | None = None) -> list[str]:
        return [one for one in self._by_key.get(key, ()) if index in {None, self.members[one].entry.index}]

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        """Close blocks whose requests have ended, and return their saved values as pieces of a message.

        Host tensors are pieces without a copy: they must be written out before the worker does anything else.

        Args:
            results: The result of each request, by ``"<block>/<choice>"``, for blocks that wait for it.
            index: The only block to close; the trace, not a sandboxed one, continues. None ends it.

        Raises:
            RuntimeError: The trace is sandboxed and its values have not arrived, see ``has_collected``.
        """
        if index is None:
            self._held.pop(key, None)
        pieces = self._collected(key, results, index)
        self.last_spent_s = self._spent_s.pop(key, 0.0)
        if index is not None:  # the rest will be closed later
            self._spent_s[key] = self.last_spent_s
        return pieces

    def _collected(self, key: str, results: Mapping[str, Any], index: int | None) -> list[Piece]:
        if key in self._by_key and self._sandboxes.knows(key):
            return self._collected_of_sandbox(key)
        request_ids = self.requests(key, index)
        every = self._by_key.pop(key, None)
        if every is None:
            return [encode({"blocks": [], "before": None})]
        if index is not None:
            self._by_key[key] = [one for one in every if one not in request_ids]
        members = [self.members.pop(request_id) for request_id in request_ids]
        self.last_has_begun = not any(isinstance(one.error, SandboxUnavailableError) for one in members)
        in_order = sorted(members, key=lambda one: (one.entry.index, one.choice))
        blocks = [self.closing.closed(member, results) for member in in_order]
        for request_id in request_ids:
            self._reporting.close(request_id, key)
        if any(member.entry.prints for member in members):  # the client fetches prints and failure together
            self._reporting.fail(key, failure_of(blocks))
        contexts = [context for name, context in self._contexts.items() if name[0] == key]
        # Containers shared by all blocks; a block that saved too much may have filled them.
        too_much = any(one.request is not None and is_too_much(one.request.error) for one in members)
        before = contexts[0].saved_before if contexts and not too_much else None
        if index is None:
            for name in [name for name in self._contexts if name[0] == key]:
                del self._contexts[name]
        requests = [one.request for one in members if one.request is not None]
        self._spent_s[key] += sum(request.spent_s for request in requests)
        self.last_tier = "eager" if any(request.tier == "eager" for request in requests) else "tap"
        num_bytes = sum(request.memory.result_bytes for request in requests)
        compress = any(member.entry.compresses for member in members)
        with self._timed(key):
            return self.closing.encoded({"blocks": blocks, "before": before}, num_bytes, compress=compress)

    def _collected_of_sandbox(self, key: str) -> list[Piece]:
        self.last_tier = self._sandboxes.tier(key)
        has_begun = self._sandboxes.has_begun(key)
        pieces, spent_s = self._sandboxes.collect(key)
        self._spent_s[key] += spent_s
        members = [self.members.pop(request_id) for request_id in self._by_key.pop(key)]
        outside = next((member.error for member in members if member.error is not None), None)
        self.last_has_begun = has_begun and not isinstance(outside, SandboxUnavailableError)
        return pieces if outside is None else [self.closing.failed(members, outside)]

    def drop(self, key: str) -> float | None:
        self._held.pop(key, None)
        self.last_spent_s = 0.0
        self._spent_s[key] += self._sandboxes.drop(key)
        if key in self._by_key:
            self.collect(key, {})
        self._spent_s.pop(key, None)
        self.take_remaining(key)
        return self.last_spent_s

    def take_remaining(self, key: str) -> tuple[str, str]:
        return self._sandboxes.take_remaining(key) or self._reporting.take_remaining(key)

    def excess(self, has_block: Callable[[str], bool]) -> list[str]:
        """Return the oldest traces without a block that runs, if more are stored than may be."""
        num_over = len(self._by_key) - _MAX_UNCOLLECTED
        if num_over <= 0:
            return []
        ended = (key for key, requests in self._by_key.items() if not any(map(has_block, requests)))
        return list(itertools.islice(ended, num_over))
