"""The dispatcher of jobs: claims the next job while there is a free slot, and renews the leases of its jobs.

Claims are in the database, so servers that share one never run the same job; a dead server's jobs are
recovered when their leases expire. No job is claimed unless the engine serves, or while the server drains.

A job may wait for hours, or across a restart. Its key and remaining quota are checked when it is about to
run, whichever process ended the key.

Removal of jobs with their files: expired ones, deleted ones, and files that belong to no job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.admission.counters import Reservation
from app.admission.estimates import Estimate
from app.admission.rates import Rates
from app.auth.keys import Keys
from app.auth.principal import ANONYMOUS, Principal, sandbox_of
from app.http.contexts import RequestContext
from app.http.lifecycle import Lifecycle, Phase
from app.limits.allowances import Allowance
from app.services.jobs.runs import Ending, JobRun, JobTools, record_interrupted
from app.services.jobs.slots import JobSlot, JobSlots
from app.settings import Settings
from app.storage.database import Database
from app.storage.jobs.files import ORPHAN_S, JobFiles
from app.storage.jobs.leases import LEASE_S
from app.storage.jobs.store import JobRemoval, RemovedJobs
from app.storage.quotas import StoredBytes
from app.storage.tables import JobRow
from nnsight_engine.core.work_context import working_for

logger = logging.getLogger(__name__)

_MAX_SWEEP_S: Final = 60.0


class JobCleanup:
    def __init__(self, database: Database, files: JobFiles, *, ttl_s: float) -> None:
        self._jobs = JobRemoval(database)
        self._files = files
        self._interval_s = min(_MAX_SWEEP_S, max(0.05, ttl_s / 4))
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove files that belong to no job, count the others, and begin to remove expired jobs."""
        await self._remove_orphans()
        await self.count()
        self._sweeper = asyncio.create_task(self._sweep(), name="jobs-sweep")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def count(self) -> None:
        """Update the stored bytes from the database, where other servers write too."""
        self._files.space.set_stored(await self._jobs.used_bytes())

    async def remove_ended(self, job_id: str) -> None:
        """Remove a job that its client deleted while it ran, after its end."""
        await self.remove_files(await self._jobs.remove_ended(job_id))

    async def remove_files(self, gone: RemovedJobs) -> None:
        await self._files.remove(gone.ids)
        for holder, num_bytes in gone.freed:
            self._files.space.free(num_bytes, holder)

    async def _remove_orphans(self) -> None:
        """Remove the files of servers that died between writing a job's files and inserting its row."""
        await self._files.remove_others(await self._jobs.known())

    async def _sweep(self) -> None:
        others_at = time.monotonic()
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                while (gone := await self._jobs.remove_expired(time.time())).ids:
                    await self.remove_files(gone)
                await self.count()
                if time.monotonic() - others_at > ORPHAN_S:
                    others_at = time.monotonic()
                    await self._remove_orphans()
            except Exception:
                logger.exception("removing expired jobs failed; retrying")


RunOver = Callable[[JobStatus | None], None]
"""Called when a run is over: with its final status, None if it is to run again."""


def _unwatched(_run: RequestContext, _traceparent: str) -> RunOver:
    return lambda _ended: None


class JobCallers:
    """The keys under which jobs run.

    ``watch`` is called when a run begins, with its context and the queuing request's ``traceparent``; the
    function that it returns is called when the run is over.
    """

    def __init__(
        self,
        keys: Keys,
        rates: Rates,
        stored: StoredBytes,
        settings: Settings,
        watch: Callable[[RequestContext, str], RunOver] = _unwatched,
    ) -> None:
        self.rates = rates
        self.watch = watch
        self._settings = settings
        self._keys = keys
        self._stored = stored

    async def of(self, job: JobRow) -> Principal | None:
        """Return the caller of a job; None if its key has ended without a replacement."""
        caller = await self._keys.holder(job.key_id)
        if caller is not None:
            set_limits(self._stored, caller)
        return caller

    def sandbox_of(self, caller: Principal) -> str | None:
        return sandbox_of(self._settings, caller)


def set_limits(stored: StoredBytes, caller: Principal) -> None:
    stored.set_limits(f"key:{caller.key_id}", caller.limits.stored_bytes)
    stored.set_limits(f"tenant:{caller.tenant}", caller.tenant_limits.stored_bytes)


_LOOK_S: Final = 1.0
_RENEW_S: Final = LEASE_S / 3
_RECOVER_S: Final = LEASE_S / 3
_MAX_HOLD_S: Final = 5.0
_STOP_S: Final = 15.0
"""An engine that has not ended a job after this time is left; the next start takes the job for interrupted.
"""


class JobDispatcher:
    """Claims and runs jobs; those that wait for a busy engine do not count for ``allowance``."""

    def __init__(
        self,
        tools: JobTools,
        *,
        cleanup: JobCleanup,
        lifecycle: Lifecycle,
        model: Callable[[], str],
        allowance: Allowance,
        callers: JobCallers,
    ) -> None:
        self._tools = tools
        self._cleanup = cleanup
        self._lifecycle = lifecycle
        self._model = model
        self._slots = JobSlots(allowance.total, self.wake)
        self._allowance = allowance
        self._runs: dict[str, JobRun] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._served_at: dict[str, float] = {}
        self._callers = callers
        self._held_until: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._loops: list[asyncio.Task[None]] = []

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def num_running(self, owner: str) -> int:
        return sum(run.owner == owner for run in self._runs.values())

    def start(self) -> None:
        """Begin to claim jobs; must be called in the running event loop."""
        self._loops = [
            asyncio.create_task(self._dispatch(), name="jobs-dispatch"),
            asyncio.create_task(self._renew_leases(), name="jobs-keep"),
        ]

    def wake(self) -> None:
        self._wake.set()

    def cancel(self, job_id: str) -> None:
        """Cancel a job that runs here; the database records the cancellation before."""
        if job_id in self._runs:
            self._runs[job_id].end_early(Ending.CANCELLED)

    async def stop(self) -> None:
        """Put running jobs back into the queue, and claim no more."""
        self._is_stopping = True
        self.wake()
        for run in list(self._runs.values()):
            run.end_early(Ending.STOPPED)
        ending = [*self._loops[:1], *self._running.values()]
        if ending:
            await asyncio.wait(ending, timeout=_STOP_S)
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._loops:
            await self._tools.leases.give_back_all()

    async def _dispatch(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            try:
                while await self._begin_next():
                    pass
            except Exception:
                logger.exception("claiming a job failed; retrying")
            # Jobs queued or lost by other servers, and an engine that becomes ready, do not set the event.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    async def _begin_next(self) -> bool:
        if self._slots.are_taken or not self._may_begin():
            return False
        slot, job = await self._slots.take(), None
        try:
            job = await self._tools.leases.claim(
                self._model(),
                self._served_at,
                without=self._slots.waiting,
                without_keys=self._held(),
                without_owners=self._full(),
            )
        finally:
            if job is None:
                slot.release()
        if job is None:
            return False
        is_begun = False
        try:
            caller = await self._callers.of(job)
            if caller is not None and await self._put_back_over_quota(job, caller):
                return True
            if self._is_stopping:
                return False  # its lease is given back by stop()
            self._begin(job, slot, caller)
            is_begun = True
        except Exception:
            # Kept, its lease would expire, and the job would end as interrupted without having run.
            await self._hold(job, _MAX_HOLD_S)
            raise
        finally:
            if not is_begun:
                slot.release()
        return True

    def _begin(self, job: JobRow, slot: JobSlot, caller: Principal | None) -> None:
        self._served_at[job.owner] = time.monotonic()
        sandbox_of = job.owner if caller is None else self._callers.sandbox_of(caller)
        refusal = _key_ended(job) if caller is None else None
        caller = caller or ANONYMOUS
        reserved: list[Reservation] = []

        async def reserve(estimate: Estimate) -> None:
            reserved.extend(await self._callers.rates.reserve_unchecked(caller, estimate))

        run = JobRun(job, self._tools, slot, sandbox_of=sandbox_of, reserve=reserve, refusal=refusal)
        run.context.principal = caller
        self._runs[job.id] = run
        with working_for(run.context):  # a task inherits it where it is created
            self._running[job.id] = asyncio.create_task(
                self._run(job, run, slot, caller, reserved), name=f"job-{job.id}"
            )

    def _held(self) -> list[str]:
        """Return the keys whose jobs wait because their quota is used up."""
        moment = time.monotonic()
        self._held_until = {key: until for key, until in self._held_until.items() if moment < until}
        return list(self._held_until)

    def _full(self) -> list[str]:
        """Return the tenants that use their whole share of the slots; without keys there are none."""
        running = Counter(run.owner for run in self._runs.values())
        return [owner for owner, num in running.items() if not self._allowance.permits(owner, num)]

    async def _put_back_over_quota(self, job: JobRow, caller: Principal) -> bool:
        wait_s = await self._callers.rates.wait_s(caller)
        if wait_s:
            # Asked again before the wait is over, since limits may change.
            await self._hold(job, min(wait_s, _MAX_HOLD_S))
        return bool(wait_s)

    async def _hold(self, job: JobRow, seconds: float) -> None:
        """Put a job back, and claim none of its key for a while."""
        self._held_until[job.key_id] = time.monotonic() + seconds
        await self._tools.leases.put_back(job)

    def _may_begin(self) -> bool:
        return not self._is_stopping and self._lifecycle.phase is Phase.READY

    async def _run(
        self, job: JobRow, run: JobRun, slot: JobSlot, caller: Principal, reserved: Sequence[Reservation]
    ) -> None:
        over: RunOver | None = None
        try:
            over = self._callers.watch(run.context, job.traceparent)
            with self._lifecycle.serving():
                await run.run()
                await self._cleanup.remove_ended(job.id)
        except Exception:
            # The job keeps its lease until it expires, and is then recovered as lost.
            logger.exception("the end of job %s could not be recorded", job.id)
        finally:
            try:
                # Before another job of the same key may begin.
                await self._callers.rates.count(caller, run.context.meter, reserved)
            except Exception:
                logger.exception("the usage of job %s could not be counted", job.id)
            finally:
                del self._runs[job.id], self._running[job.id]
                slot.release()
                self.wake()
                if over is not None:
                    over(run.ended)

    async def _renew_leases(self) -> None:
        renewed_at = recovered_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._running:
                    await self._check_held_jobs()
                if self._running and time.monotonic() - renewed_at > _RENEW_S:
                    renewed_at = time.monotonic()
                    await self._tools.leases.renew(self.running)
                if time.monotonic() - recovered_at > _RECOVER_S:
                    recovered_at = time.monotonic()
                    await self._recover()
            except Exception:
                logger.exception("renewing the leases of jobs failed; retrying")

    async def _check_held_jobs(self) -> None:
        """End jobs that were cancelled through other servers or taken over by them."""
        running = self.running
        held = await self._tools.leases.held_jobs(running)
        for job_id in running:
            if job_id not in self._runs:
                continue
            if job_id not in held:
                self._runs[job_id].end_early(Ending.LOST)
            elif held[job_id]:
                self._runs[job_id].end_early(Ending.CANCELLED)

    async def _recover(self) -> None:
        lost = await self._tools.leases.recover(own=self.running)
        record_interrupted(lost, self._tools.log)
        await self._tools.files.remove_results([(job.id, job.attempt) for job in lost])
        for job in lost:
            self._tools.notify_followers(job.id)
        if lost:
            self.wake()


def _key_ended(job: JobRow) -> ApiError:
    return ApiError(
        ErrorCode.KEY_ENDED,
        f"The key {job.key_id!r}, which sent this job, ended before the job's turn came; run it again with "
        f"another of the tenant's keys, POST /v1/jobs/{job.id}/rerun.",
    )
