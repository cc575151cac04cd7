"""The server's metrics, and their exposition for ``GET /metrics``.

Each server has a registry of its own, exposed with vLLM's, the process's default. If several processes serve
one port (``metrics_dir``), ``prometheus_client`` aggregates, so everything here is a metric of that library.
The number of values of each label is bounded: those from clients are mapped to known ones or to ``other``.

Times of tokens are measured when events are sent to the client. The first event with text counts as the first
token, since a chat begins with an event without text. After that each of vLLM's events is at least one token,
possibly with empty text, except those that end a stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from api_schemas.errors import ErrorCode
from api_schemas.interventions import OPERATIONS
from api_schemas.jobs import JobStatus
from app.audit import CODE, Record
from app.http.lifecycle import Phase
from nnsight_engine.core.work_context import SANDBOX_EVENTS, STEP_BUCKETS_S, TIERS, EngineCounts

OTHER: Final = "other"
"""The value of a label for everything that is not known."""

_REQUEST_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FIRST_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN_BUCKETS_S: Final = (
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    10,
)

_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "WEBSOCKET"})
_CODES: Final = frozenset(code.value for code in ErrorCode)
_OPS: Final = frozenset({*OPERATIONS, "session"})
_TIERS: Final = frozenset(TIERS)
_KINDS: Final = {True: CODE, False: "operations"}
_MARKS: Final = ("flag", "stop")
_CODE_OPS: Final = frozenset({"trace", "session"})
_OWN: Final = "own"
_NAMED: Final = ("preset", "vector", "detector", "dictionary")
_MAX_NAMES: Final = 100
_BUSY: Final = frozenset({429, 503})
_CLIENT_LEFT: Final = "client_left"


class _TalliedHistogram(Histogram):
    def add(self, tallies: Sequence[int], total: float) -> None:
        """Add new observations per bucket, the unbounded bucket last; ``total`` is their sum."""
        for bucket, number in zip(self._buckets, tallies, strict=True):
            if number:
                bucket.inc(number)
        self._sum.inc(total)


@dataclasses.dataclass(frozen=True, slots=True)
class GaugeValues:
    """Current values: requests and jobs ``in_flight``, items by queue, stored bytes and limit by store."""

    phase: Phase
    in_flight: int
    waiting: Mapping[str, int]
    jobs: Mapping[str, int]
    oldest_job_s: float
    stored: Mapping[str, tuple[int, int]]


class Metrics:
    """The metrics of one server; ``folder`` shares them with other processes on its port."""

    def __init__(self, folder: Path | None = None) -> None:
        registry = self._registry = CollectorRegistry()
        self._folder = folder
        self._last_counts = EngineCounts()
        self._last_engine = 0
        self._num_restarts = 0
        self._requests = Counter(
            "nnsight_engine_requests",
            "Answered requests, by outcome.",
            ["route", "method", "model", "tenant_class", "outcome"],
            registry=registry,
        )
        self._rejected = Counter(
            "nnsight_engine_rejected",
            "Requests that were refused or failed, by error code.",
            ["reason"],
            registry=registry,
        )
        self._request_s = Histogram(
            "nnsight_engine_request_seconds",
            "From a request's last byte to its answer's, for successful completions, chats and traces.",
            ["route", "kind"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "nnsight_engine_time_to_first_token_seconds",
            "Time from a request's last byte to the first event of its stream with text.",
            ["route", "kind"],
            buckets=_FIRST_BUCKETS_S,
            registry=registry,
        )
        self.between_tokens_s = Histogram(
            "nnsight_engine_inter_token_seconds",
            "Time between events with tokens, for streams of one choice.",
            ["route", "kind"],
            buckets=_BETWEEN_BUCKETS_S,
            registry=registry,
        )
        self._interventions = Counter(
            "nnsight_engine_interventions",
            "Operations of completed requests and jobs, by kind of point and by tier of the steps.",
            ["op", "tier", "point"],
            registry=registry,
        )
        self._prompts = Counter(
            "nnsight_engine_cache_salted_requests",
            "Completions and chats, by the isolation of their prefix cache.",
            ["salt"],
            registry=registry,
        )
        self._named = {
            kind: Counter(
                f"nnsight_engine_{kind}_requests",
                f"Requests with a {kind}: shared ones by name, `own` for those of a tenant.",
                [kind],
                registry=registry,
            )
            for kind in _NAMED
        }
        self._names: dict[str, set[str]] = {kind: set() for kind in _NAMED}
        self._marked = Counter(
            "nnsight_engine_marked_choices",
            "Choices in which a condition held: that of a `flag`, or of a `stop`, which ended them.",
            ["op"],
            registry=registry,
        )
        for op in _MARKS:
            self._marked.labels(op)
        self._captured = Counter(
            "nnsight_engine_captured_bytes",
            "Bytes of captures and saves that left the engine.",
            registry=registry,
        )
        self._job_ends = Counter(
            "nnsight_engine_jobs_ended", "Runs of jobs by end.", ["status"], registry=registry
        )
        self._restarts = Counter(
            "nnsight_engine_engine_restarts", "Engine restarts after a failure.", registry=registry
        )
        self._stalls = Counter(
            "nnsight_engine_loop_stalls",
            "Number of times that the event loop was blocked for a second or longer.",
            registry=registry,
        )
        self._stalled_s = Counter(
            "nnsight_engine_loop_stalled_seconds",
            "Seconds that the event loop was blocked in these stalls.",
            registry=registry,
        )
        self._make_engine_metrics(registry)
        self._make_gauges(registry)

    def _make_engine_metrics(self, registry: CollectorRegistry) -> None:
        self._steps = Counter(
            "nnsight_engine_steps",
            "Steps of the engine: plain, with interventions in the compiled model, or uncompiled.",
            ["tier"],
            registry=registry,
        )
        self._step_s = _TalliedHistogram(
            "nnsight_engine_step_intervention_seconds",
            "Seconds of interventions in one step, for steps with interventions.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._sandboxes = Counter(
            "nnsight_engine_sandboxes",
            "Sandboxes that were assigned to traces, killed early, or not available.",
            ["event"],
            registry=registry,
        )
        # Rates can be computed only for series that existed at zero before.
        for tier in TIERS:
            self._steps.labels(tier)
        for event in SANDBOX_EVENTS:
            self._sandboxes.labels(event)
        for status in JobStatus:
            if status.is_final:
                self._job_ends.labels(status.value.lower())

    def _make_gauges(self, registry: CollectorRegistry) -> None:
        """Create the gauges; over several processes they are summed, or equal if shared."""

        def gauge(
            name: str, description: str, labels: Iterable[str] = (), *, is_shared: bool = False
        ) -> Gauge:
            mode: Literal["livemax", "livesum"] = "livemax" if is_shared else "livesum"
            return Gauge(
                f"nnsight_engine_{name}", description, labels, registry=registry, multiprocess_mode=mode
            )

        self._phase = gauge("phase", "Number of server processes in this phase.", ["phase"])
        self._in_flight = gauge("in_flight", "Requests being answered and jobs being run.")
        self._waiting = gauge("waiting", "Requests waiting before the engine, by resource.", ["queue"])
        self._jobs = gauge("jobs", "Jobs in the database.", ["status"], is_shared=True)
        self._oldest_job_s = gauge(
            "oldest_waiting_job_seconds", "Waiting time of the job that has waited longest.", is_shared=True
        )
        self._stored = gauge("stored_bytes", "Stored bytes.", ["store"], is_shared=True)
        self._max_stored = gauge(
            "stored_bytes_limit", "Limit on the stored bytes.", ["store"], is_shared=True
        )

    async def exposition(self) -> bytes:
        return await asyncio.to_thread(self._exposition)

    def _exposition(self) -> bytes:
        """Return the text for Prometheus; runs on a thread."""
        registry = CollectorRegistry()
        if self._folder is not None:
            multiprocess.MultiProcessCollector(registry, path=str(self._folder))  # type: ignore[no-untyped-call]
        else:
            registry.register(self._registry)
            registry.register(REGISTRY)
        return generate_latest(registry)

    def count_engine(self, counts: EngineCounts, number: int = 0) -> None:
        """Set the counts since the start of the engine ``number``; a restarted one begins at zero again."""
        last, self._last_counts = self._last_counts if number == self._last_engine else EngineCounts(), counts
        self._last_engine = number
        for tier in TIERS:
            self._steps.labels(tier).inc(_increase(last.steps.get(tier, 0), counts.steps.get(tier, 0)))
        for event in SANDBOX_EVENTS:
            old_count, new_count = last.sandboxes.get(event, 0), counts.sandboxes.get(event, 0)
            self._sandboxes.labels(event).inc(_increase(old_count, new_count))
        tallies = [
            int(_increase(old_count, new_count))
            for old_count, new_count in zip(
                last.intervention_buckets, counts.intervention_buckets, strict=True
            )
        ]
        self._step_s.add(tallies, _increase(last.intervention_s, counts.intervention_s))

    def count_restarts(self, num_restarts: int) -> None:
        self._restarts.inc(num_restarts - self._num_restarts)
        self._num_restarts = num_restarts

    def count_stall(self, seconds: float, *, is_new: bool) -> None:
        """Count a new stall of the event loop, or more of a counted one, from any thread."""
        if is_new:
            self._stalls.inc()
        self._stalled_s.inc(seconds)

    def update_gauges(self, levels: GaugeValues) -> None:
        for phase in Phase:
            self._phase.labels(phase.value).set(phase is levels.phase)
        self._in_flight.set(levels.in_flight)
        for queue, number in levels.waiting.items():
            self._waiting.labels(queue).set(number)
        for status in JobStatus:
            if status is not JobStatus.LOG:
                self._jobs.labels(status.value.lower()).set(levels.jobs.get(status.value, 0))
        self._oldest_job_s.set(levels.oldest_job_s)
        for store, (used, limit) in levels.stored.items():
            self._stored.labels(store).set(used)
            self._max_stored.labels(store).set(limit)

    def count_request(self, record: Record, models: Sequence[str]) -> None:
        """Count an answered request; ``models`` are the names that may become labels."""
        model = record.model or (models[0] if record.operations or record.salt is not None else "")
        self._requests.labels(
            record.route or OTHER,
            record.method if record.method in _METHODS else OTHER,
            model if model in models or not model else OTHER,
            record.caller_class,
            outcome_of(record),
        ).inc()
        if record.error and record.error != _CLIENT_LEFT:
            self._rejected.labels(record.error if record.error in _CODES else OTHER).inc()
        if record.salt is not None:
            self._prompts.labels(record.salt).inc()

    def count_time(self, record: Record) -> None:
        duration_s = time.perf_counter() - record.begun_s
        self._request_s.labels(record.route, kind_of(record.operations)).observe(duration_s)

    def count_use(self, record: Record, points: Collection[str], captured_bytes: int) -> None:
        """Count the operations of a request or job; ``points`` are the model's, the possible labels."""
        self._captured.inc(captured_bytes)
        tier = record.step_tier if record.step_tier in _TIERS else "unknown"
        for op, point in record.uses:
            point_label = point if point == CODE or point in points else OTHER
            self._interventions.labels(op if op in _OPS else OTHER, tier, point_label).inc()
        for op in record.marked:
            self._marked.labels(op).inc()
        for kind, name in record.named:
            self._named[kind].labels(self._label_of(kind, name)).inc()

    def _label_of(self, kind: str, name: str) -> str:
        """Return the label of a shared thing, the first ones by name; a tenant's own has no name."""
        if not name:
            return _OWN
        names = self._names[kind]
        if len(names) < _MAX_NAMES:
            names.add(name)
        return name if name in names else OTHER

    def count_job(self, status: JobStatus) -> None:
        self._job_ends.labels(status.value.lower()).inc()

    def close(self) -> None:
        """Remove this process's gauges from the shared metrics."""
        if self._folder is not None:
            multiprocess.mark_process_dead(os.getpid(), str(self._folder))  # type: ignore[no-untyped-call]


def kind_of(operations: Collection[str]) -> str:
    """Return the label of a request's kind: code, operations, or plain without interventions."""
    return _KINDS[not _CODE_OPS.isdisjoint(operations)] if operations else "plain"


def outcome_of(record: Record) -> str:
    """Return the label of a request's outcome: ok, refused, busy, failed or client_left."""
    if record.error == _CLIENT_LEFT:
        return _CLIENT_LEFT
    status = record.status or 0
    # An error in the middle of a stream, after the success status was sent.
    if 0 < status < 400 and record.error in _CODES:
        status = ErrorCode(record.error).status
    if status in _BUSY and record.error != ErrorCode.ENGINE_DEAD:
        return "busy"
    if not status or status >= 500 or (record.error and status < 400):
        return "failed"
    return "ok" if status < 400 else "refused"


def _increase(old_count: float, new_count: float) -> float:
    """Return what was added since the last count; a smaller one has begun at zero again."""
    return new_count - old_count if new_count >= old_count else new_count


_ERROR: Final = 'data: {"error"'
_DONE: Final = "data: [DONE]"
_USAGE: Final = re.compile(r'"choices": ?\[\]')
_TEXT: Final = re.compile(r'"(?:text|content|reasoning)": ?"[^"]|"tool_calls": ?\[ ?\{|"finish_reason": ?"')
_HEAD_LENGTH: Final = 512
"""The number of characters in which an event shows whether it has choices."""
_LARGE: Final = 8192
"""An event of more characters contains results of interventions, which come with tokens."""


class TokenTimes:
    """The token times of one stream; with several choices, which interleave, only the first token's."""

    def __init__(self, metrics: Metrics, record: Record, num_choices: int) -> None:
        kind = kind_of(record.operations)
        self._begun_s = record.begun_s
        self._first = metrics.first_token_s.labels(record.route, kind)
        between = metrics.between_tokens_s.labels(record.route, kind)
        self._observe_gap = between.observe if num_choices == 1 else None
        self._last_s = 0.0

    def record_event(self, event: str) -> None:
        """Observe the first token at the first event with text or an end.

        After it every event with a token is observed, if the stream has one choice.
        """
        if self._last_s:
            if self._observe_gap is not None and _has_token(event):
                now = time.perf_counter()
                self._observe_gap(now - self._last_s)
                self._last_s = now
        elif _has_text(event):
            self._last_s = time.perf_counter()
            self._first.observe(self._last_s - self._begun_s)


def _has_token(event: str) -> bool:
    """Return whether an event has choices: it is not an error, the usage or the end of the stream."""
    if event.startswith((_DONE, _ERROR)):
        return False
    return _USAGE.search(event, 0, _HEAD_LENGTH) is None


def _has_text(event: str) -> bool:
    """Return whether an event has text, a call of a tool, a choice's end, or results of interventions."""
    if not _has_token(event):
        return False
    if len(event) > _LARGE:
        return True
    return _TEXT.search(event) is not None
