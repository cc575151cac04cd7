"""Reports of one sandbox process about its requests, kept until the step ends.

A process that reports values not requested, or prints without end, is ended: it would fill the engine's
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nnsight_engine.remote_backend.prints import MAX_BYTES
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.sandboxed.messages import SandboxReply


class SessionReports:
    def __init__(self, entries: Mapping[str, TraceEntry]) -> None:
        self.over: set[str] = set()
        self._entries = entries
        self._reports: dict[str, Report] = {}
        self._num_printed = 0

    def note(self, ended: Collection[str], replies: Sequence[SandboxReply]) -> None:
        """Record a step's reports; SandboxEndedError if the process reports what was not requested."""
        self.over.update(ended)
        for reply in replies:
            entry = self._entries.get(reply.request_id)
            self._num_printed += len(reply.printed)
            if self._num_printed > 2 * MAX_BYTES:  # an unmodified process stops at half of that
                raise SandboxEndedError.broken("it printed without end")
            if entry is None:
                continue
            if not _is_wanted(reply, entry):  # nothing would ever read it
                raise SandboxEndedError.broken("it reported what nobody asked for")
            self._reports[reply.request_id] = (entry.key, entry.index, reply.data, reply.printed)

    def take(self) -> tuple[list[str], dict[str, Report]]:
        over, self.over = self.over, set()
        reports, self._reports = self._reports, {}
        return list(over), reports


def _is_wanted(reply: SandboxReply, entry: TraceEntry) -> bool:
    return (entry.streams or reply.data is None) and (entry.prints or not reply.printed)


__all__ = ["SessionReports"]
