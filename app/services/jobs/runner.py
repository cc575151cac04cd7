"""The runner of jobs: claims the next job while a slot is free, and renews the leases of its jobs.

Claims are in the database, so servers that share one never run the same job; a dead server's jobs are
recovered when their leases expire. No job is claimed unless the engine serves, or while the server drains.

A job may wait for hours, or across a restart. Its key and remaining quota are checked when it is about to
run, whichever process ended the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection
from typing import Final

from api_schemas.errors import ErrorCode
from app.admission.rates import groups_of
from app.auth.principal import Principal
from app.http.lifecycle import Phase
from app.limits.limit import name_of_key
from app.limits.tenant_budget import TenantBudget
from app.services.jobs.run import Ending, JobParts, JobRun, RunOver, run_record
from app.storage.jobs.store import LEASE_S, LeaseLostError
from app.storage.quotas import StoredQuotas
from app.storage.tables import JobRow
from nnsight_engine.core.work_context import working_for

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_RENEW_S: Final = LEASE_S / 3
_RECOVER_S: Final = LEASE_S / 3
_MAX_HOLD_S: Final = 5.0
_STOP_S: Final = 15.0
"""An engine that has not ended a job after this time is left; the next start takes the job for interrupted.
"""


class JobRunner:
    """Runs jobs, each in a slot; those that wait for a busy engine have none.

    ``_served_at`` is when each owner had its last turn, ``_held_until`` when a key may have one again.
    """

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._limit = TenantBudget.of(parts.settings).running_jobs
        self._slots = asyncio.Semaphore(self._limit.total)
        self._runs: dict[asyncio.Task[None], JobRun] = {}
        self._served_at: dict[str, float] = {}
        self._held_until: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._loops: list[asyncio.Task[None]] = []

    def num_running(self, owner: str) -> int:
        return sum(run.job.owner == owner for run in self._runs.values())

    def start(self) -> None:
        """Begin to claim jobs; must be called in the running event loop."""
        self._is_stopping = False
        self._loops = [
            asyncio.create_task(self._dispatch(), name="jobs-dispatch"),
            asyncio.create_task(self._keep_jobs(), name="jobs-keep"),
        ]

    def wake(self) -> None:
        self._wake.set()

    def cancel(self, job_id: str) -> None:
        """Cancel a job if it runs here; the database records the cancellation before."""
        for run in self._runs.values():
            if run.job.id == job_id:
                run.end_early(Ending.CANCELLED)

    async def stop(self) -> None:
        """Put running jobs back into the queue, and claim no more; idempotent."""
        self._is_stopping = True
        self.wake()
        for run in self._runs.values():
            run.end_early(Ending.STOPPED)
        loops, self._loops = self._loops, []
        ending = [*loops[:1], *self._runs]
        if ending:
            await asyncio.wait(ending, timeout=_STOP_S)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def recover(self, dead: Collection[str] = ()) -> None:
        """Requeue or end jobs whose leases have expired, and those of ``dead`` processes."""
        lost = await self._parts.store.recover(dead=dead, own_ids=self._running_ids())
        for job in lost:
            if job.owner and job.started_at is not None:
                self._parts.log.add(run_record(job, ErrorCode.INTERRUPTED))
        await self._parts.files.remove_results(lost)
        if lost:
            self.wake()

    async def _dispatch(self) -> None:
        """Claim and start jobs while there are slots; looks again when woken, or after a second."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                while await self._claim_and_start():
                    pass
            except Exception:
                logger.exception("claiming a job failed; retrying")
            # Jobs queued or lost by other servers, and an engine that becomes ready, do not set the event.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    async def _claim_and_start(self) -> bool:
        """Claim a job, and begin to run it or put it back; return whether there was one."""
        # A slot that is free may be for a job that has waited for its engine.
        if self._is_stopping or self._slots.locked() or self._parts.lifecycle.phase is not Phase.READY:
            return False
        await self._slots.acquire()
        with contextlib.ExitStack() as slot:
            slot.callback(self._slots.release)
            job = await self._claim()
            if job is None:
                return False
            try:
                caller = await self._caller_of(job)
                wait_s = 0.0 if caller is None else await self._parts.rates.wait_s(caller)
                if not wait_s and not self._is_stopping:
                    self._start_run(job, caller)
                    slot.pop_all()
                    return True
            except Exception:
                logger.exception("job %s could not begin; it is put back", job.id)
                wait_s = _MAX_HOLD_S
            await self._put_back(job, wait_s)
        return True

    async def _claim(self) -> JobRow | None:
        """Claim the next job of this model, but of no busy engine, key that waits, or tenant at its share."""
        moment = time.monotonic()
        self._held_until = {key: until for key, until in self._held_until.items() if moment < until}
        running = Counter(run.job.owner for run in self._runs.values())
        return await self._parts.store.claim(
            self._parts.served().names[0],
            self._served_at,
            without_kinds={run.waits_for for run in self._runs.values() if run.waits_for is not None},
            without_keys=list(self._held_until),
            # Tenants that use their whole share; without keys there are none.
            without_owners=[owner for owner, num in running.items() if owner and num >= self._limit.each],
        )

    async def _caller_of(self, job: JobRow) -> Principal | None:
        """Return the holder of a job's key; None if it has ended without a replacement."""
        caller = await self._parts.keys.holder(job.key_id)
        if caller is not None:
            set_quotas(self._parts.quotas, caller)
        return caller

    def _start_run(self, job: JobRow, caller: Principal | None) -> None:
        """Run a job in a task; its slot, which this takes over, is released at the end."""
        run = JobRun(job, caller, self._parts, self._slots, self.wake)
        on_over = self._parts.watch(run.context, job.traceparent)
        self._served_at[job.owner] = time.monotonic()
        with working_for(run.context):  # a task inherits it where it is created
            task = asyncio.create_task(self._run_job(run), name=f"job-{job.id}")
        self._runs[task] = run
        task.add_done_callback(lambda task: self._on_run_done(task, on_over))

    async def _put_back(self, job: JobRow, hold_s: float) -> None:
        """Put back a job that has not begun, and claim none of its key for a while.

        Kept, its lease would expire, and the job would end as interrupted without having run.
        """
        # Asked again before a long wait is over, since limits may change.
        self._held_until[job.key_id] = time.monotonic() + min(hold_s, _MAX_HOLD_S)
        while True:
            try:
                with contextlib.suppress(LeaseLostError):
                    await self._parts.store.requeue(job, has_begun=False)
            except Exception:
                logger.exception("job %s could not be put back; retrying", job.id)
                await asyncio.sleep(_LOOK_S)
            else:
                return

    async def _run_job(self, run: JobRun) -> None:
        """Run a job, count its usage, and remove it if its client has removed it meanwhile."""
        parts = self._parts
        try:
            with parts.lifecycle.serving():
                await run.run()
                # Its client may have removed it while it ran.
                await parts.files.remove(await parts.store.remove_expired(time.time(), run.job.id))
        except Exception:
            # The job keeps its lease until it expires, and is then recovered as lost.
            logger.exception("the end of job %s could not be recorded", run.job.id)
        finally:
            try:
                # Before another job of the same key may begin.
                await parts.rates.bill(groups_of(run.caller), run.context.meter, run.reserved)
            except Exception:
                logger.exception("the usage of job %s could not be counted", run.job.id)

    def _on_run_done(self, task: asyncio.Task[None], on_over: RunOver) -> None:
        run = self._runs.pop(task)
        run.release_slot()
        self.wake()
        on_over(run.ended)

    def _running_ids(self) -> list[str]:
        return [run.job.id for run in self._runs.values()]

    async def _keep_jobs(self) -> None:
        """End cancelled and lost runs, renew the leases of the others, and recover jobs of dead servers."""
        renewed_at = recovered_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._runs:
                    await self._check_held_jobs()
                if self._runs and time.monotonic() - renewed_at > _RENEW_S:
                    renewed_at = time.monotonic()
                    await self._parts.store.renew(self._running_ids())
                if time.monotonic() - recovered_at > _RECOVER_S:
                    recovered_at = time.monotonic()
                    await self.recover()
            except Exception:
                logger.exception("renewing the leases of jobs failed; retrying")

    async def _check_held_jobs(self) -> None:
        """End jobs that were cancelled through other servers or taken over by them."""
        running = list(self._runs.values())
        cancelled_by_id = await self._parts.store.held_jobs([run.job.id for run in running])
        for run in running:
            if run.job.id not in cancelled_by_id:
                run.end_early(Ending.LOST)
            elif cancelled_by_id[run.job.id]:
                run.end_early(Ending.CANCELLED)


def set_quotas(quotas: StoredQuotas, caller: Principal) -> None:
    """Set how many bytes a caller's key and tenant may store, which may have changed since the last call."""
    quotas.set_quota(name_of_key(caller.key_id), caller.limits.stored_bytes)
    quotas.set_quota(caller.tenant, caller.tenant_limits.stored_bytes)
