"""The server's metrics: what each counts, and ``GET /metrics``' text.

One registry for each server, of which a process may have several; vLLM keeps its own in the process's, and
both are told together. Where several processes answer for one port, ``prometheus_client`` adds up what all
have counted (the setting ``metrics_dir``), so everything here is a metric of that library, also what others
have counted. Labels have only values of which there are few: what clients write is one of those known, or
``other``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
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

from api_schemas.errors import STATUS, ErrorCode
from api_schemas.interventions import OPERATIONS
from api_schemas.jobs import JobStatus
from app.audit.records import CODE, Record
from app.lifecycle import Phase
from nnsight_engine.core.engine_counts import SANDBOX_EVENTS, STEP_BUCKETS_S, TIERS, EngineCounts

OTHER: Final = "other"
"""Stands for every value of a label that is none of those known."""

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
_CODE_OPS: Final = frozenset({"trace", "session"})
_BUSY: Final = frozenset({429, 503})
_CLIENT_LEFT: Final = "client_left"


class _TalliedHistogram(Histogram):
    """A histogram of what somebody else has observed."""

    def add(self, tallies: Sequence[int], total: float) -> None:
        """Add observations.

        Args:
            tallies: How many there were in each bucket, the unbounded one last.
            total: Their sum.
        """
        for bucket, number in zip(self._buckets, tallies, strict=True):
            if number:
                bucket.inc(number)
        self._sum.inc(total)


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """What there is at the moment, of everything that comes and goes.

    Attributes:
        phase: Of the server.
        in_flight: Requests being answered, and jobs being run.
        waiting: How much waits, by what it waits for.
        jobs: Jobs by status.
        oldest_job_s: How long the job that has waited longest waits; 0 where none does.
        stored: Bytes kept, and most that may be, by place.
    """

    phase: Phase
    in_flight: int
    waiting: Mapping[str, int]
    jobs: Mapping[str, int]
    oldest_job_s: float
    stored: Mapping[str, tuple[int, int]]


class Metrics:
    """The metrics of one server.

    Args:
        folder: Where several processes keep theirs together; None where this is the only one.

    Attributes:
        first_token_s: Histogram by route and kind.
        between_tokens_s: Likewise.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Make all metrics, those without labels at zero."""
        own = self._own = CollectorRegistry()
        self._folder = folder
        self._told = EngineCounts()
        self._engine_told = 0
        self._num_restarts = 0
        self._requests = Counter(
            "nnsight_engine_requests",
            "Requests that were answered, by how that ended.",
            ["route", "method", "model", "tenant_class", "outcome"],
            registry=own,
        )
        self._rejected = Counter(
            "nnsight_engine_rejected",
            "Requests that were refused or failed with one of the server's error codes.",
            ["reason"],
            registry=own,
        )
        self._request_s = Histogram(
            "nnsight_engine_request_seconds",
            "From a request's last byte to its answer's, of completions, chats and traces that succeeded.",
            ["route", "kind"],
            buckets=_REQUEST_BUCKETS_S,
            registry=own,
        )
        self.first_token_s = Histogram(
            "nnsight_engine_time_to_first_token_seconds",
            "From a request's last byte to the first event of its stream that has text.",
            ["route", "kind"],
            buckets=_FIRST_BUCKETS_S,
            registry=own,
        )
        self.between_tokens_s = Histogram(
            "nnsight_engine_inter_token_seconds",
            "Between events with tokens, of streams of one choice.",
            ["route", "kind"],
            buckets=_BETWEEN_BUCKETS_S,
            registry=own,
        )
        self._interventions = Counter(
            "nnsight_engine_interventions",
            "Operations of requests and jobs that ran, by kind of point and by how their steps ran.",
            ["op", "tier", "point"],
            registry=own,
        )
        self._prompts = Counter(
            "nnsight_engine_cache_salted_requests",
            "Completions and chats by what keeps their part of the prefix cache from others'.",
            ["salt"],
            registry=own,
        )
        self._captured = Counter(
            "nnsight_engine_captured_bytes",
            "Bytes of captures and saves that left the engine.",
            registry=own,
        )
        self._job_ends = Counter(
            "nnsight_engine_jobs_ended", "Runs of jobs by end.", ["status"], registry=own
        )
        self._restarts = Counter(
            "nnsight_engine_engine_restarts", "Engines started in place of one that died.", registry=own
        )
        self._stalls = Counter(
            "nnsight_engine_loop_stalls",
            "Times that the event loop stopped for a second or longer.",
            registry=own,
        )
        self._stalled_s = Counter(
            "nnsight_engine_loop_stalled_seconds", "How long it has stopped in these.", registry=own
        )
        self._make_engines(own)
        self._make_levels(own)

    def _make_engines(self, own: CollectorRegistry) -> None:
        """Make those of what engines count."""
        self._steps = Counter(
            "nnsight_engine_steps",
            "Steps of the engine: plain, with interventions in the compiled model, or with it uncompiled.",
            ["tier"],
            registry=own,
        )
        self._step_s = _TalliedHistogram(
            "nnsight_engine_step_intervention_seconds",
            "What interventions took of one step, of steps that had some.",
            buckets=STEP_BUCKETS_S,
            registry=own,
        )
        self._sandboxes = Counter(
            "nnsight_engine_sandboxes",
            "Sandboxes given to traces, ended before their time, and traces for which there was none.",
            ["event"],
            registry=own,
        )
        # Whoever asks how much something has grown needs to have seen it at zero.
        for tier in TIERS:
            self._steps.labels(tier)
        for event in SANDBOX_EVENTS:
            self._sandboxes.labels(event)
        for status in JobStatus:
            if status.is_final:
                self._job_ends.labels(status.value.lower())

    def _make_levels(self, own: CollectorRegistry) -> None:
        """Make those of what is there at the moment; several processes' are added up, or are the same."""

        def gauge(name: str, about: str, labels: Iterable[str] = (), *, is_shared: bool = False) -> Gauge:
            mode: Literal["livemax", "livesum"] = "livemax" if is_shared else "livesum"
            return Gauge(f"nnsight_engine_{name}", about, labels, registry=own, multiprocess_mode=mode)

        self._phase = gauge("phase", "How many server processes are in this phase.", ["phase"])
        self._in_flight = gauge("in_flight", "Requests being answered, and jobs being run.")
        self._waiting = gauge("waiting", "What waits before it reaches the engine, by what for.", ["queue"])
        self._jobs = gauge("jobs", "Jobs in the database.", ["status"], is_shared=True)
        self._oldest_job_s = gauge(
            "oldest_waiting_job_seconds", "How long a job has waited, of those that wait.", is_shared=True
        )
        self._stored = gauge("stored_bytes", "Bytes kept.", ["store"], is_shared=True)
        self._most_stored = gauge("stored_bytes_limit", "Most bytes that may be.", ["store"], is_shared=True)

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return await asyncio.to_thread(self._exposition)

    def _exposition(self) -> bytes:
        told = CollectorRegistry()
        if self._folder is not None:
            multiprocess.MultiProcessCollector(told, path=str(self._folder))  # type: ignore[no-untyped-call]
        else:
            told.register(self._own)
            told.register(REGISTRY)
        return generate_latest(told)

    def count_engine(self, counts: EngineCounts, number: int = 0) -> None:
        """Learn what the engine has counted since it started; the next one begins again at zero.

        Args:
            counts: Its counts.
            number: Which engine of this server it is.
        """
        last, self._told = self._told if number == self._engine_told else EngineCounts(), counts
        self._engine_told = number
        for tier in TIERS:
            self._steps.labels(tier).inc(_grown(last.steps.get(tier, 0), counts.steps.get(tier, 0)))
        for event in SANDBOX_EVENTS:
            before, now = last.sandboxes.get(event, 0), counts.sandboxes.get(event, 0)
            self._sandboxes.labels(event).inc(_grown(before, now))
        tallies = [
            int(_grown(before, now))
            for before, now in zip(last.intervention_buckets, counts.intervention_buckets, strict=True)
        ]
        self._step_s.add(tallies, _grown(last.intervention_s, counts.intervention_s))

    def count_restarts(self, num_restarts: int) -> None:
        """Learn how often this server has started an engine in place of one that died."""
        self._restarts.inc(num_restarts - self._num_restarts)
        self._num_restarts = num_restarts

    def count_stall(self, seconds: float, *, is_new: bool) -> None:
        """Count that the event loop stopped, or that a stall counted before has gone on; from any thread."""
        if is_new:
            self._stalls.inc()
        self._stalled_s.inc(seconds)

    def set_levels(self, levels: Levels) -> None:
        """Learn what there is at the moment."""
        for phase in Phase:
            self._phase.labels(phase.value).set(phase is levels.phase)
        self._in_flight.set(levels.in_flight)
        for queue, number in levels.waiting.items():
            self._waiting.labels(queue).set(number)
        for status in JobStatus:
            if status is not JobStatus.LOG:
                self._jobs.labels(status.value.lower()).set(levels.jobs.get(status.value, 0))
        self._oldest_job_s.set(levels.oldest_job_s)
        for store, (used, most) in levels.stored.items():
            self._stored.labels(store).set(used)
            self._most_stored.labels(store).set(most)

    def count_request(self, record: Record, models: Sequence[str]) -> None:
        """Count a request that is over.

        Args:
            record: What is known of it.
            models: What the model may be called, first what it is called by whoever says nothing.
        """
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
        """Count how long a request took that used the engine, and is over just now."""
        taken_s = time.perf_counter() - record.begun_s
        self._request_s.labels(record.route, kind_of(record.operations)).observe(taken_s)

    def count_use(self, record: Record, points: Collection[str], captured_bytes: int) -> None:
        """Count what a request or a job has done to the model, and what it has read of it.

        Args:
            record: What is known of it.
            points: The kinds of points that there are.
            captured_bytes: What left the engine.
        """
        self._captured.inc(captured_bytes)
        tier = record.tier if record.tier in _TIERS else "unknown"
        for op, point in record.uses:
            known = point if point == CODE or point in points else OTHER
            self._interventions.labels(op if op in _OPS else OTHER, tier, known).inc()

    def count_job(self, status: JobStatus) -> None:
        """Count a run of a job."""
        self._job_ends.labels(status.value.lower()).inc()

    def close(self) -> None:
        """Have other processes tell no more of what was here."""
        if self._folder is not None:
            multiprocess.mark_process_dead(os.getpid(), str(self._folder))  # type: ignore[no-untyped-call]


def kind_of(operations: Collection[str]) -> str:
    """Return what a request is, by its operations: ``plain``, ``operations`` or ``code``."""
    return _KINDS[not _CODE_OPS.isdisjoint(operations)] if operations else "plain"


def outcome_of(record: Record) -> str:
    """Return how a request ended: ``ok``, ``refused``, ``busy``, ``failed`` or ``client_left``."""
    if record.error == _CLIENT_LEFT:
        return _CLIENT_LEFT
    status = record.status or 0
    if 0 < status < 400 and record.error in _CODES:  # told in the middle of a stream, which had begun well
        status = STATUS.get(ErrorCode(record.error), 400)
    if status in _BUSY and record.error != ErrorCode.ENGINE_DEAD:
        return "busy"
    if not status or status >= 500 or (record.error and status < 400):
        return "failed"
    return "ok" if status < 400 else "refused"


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


__all__ = ["OTHER", "Levels", "Metrics", "kind_of", "outcome_of"]
