"""For whom jobs run: what their keys still are when their turn comes, and what running them uses up.

A job waits, perhaps for hours, perhaps over a restart. Whether its key has ended meanwhile, and what is left
to it, is found out when it is about to run, whichever process ended the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from api_schemas.jobs import JobStatus
from app.admission.counts import Taken
from app.admission.estimates import Estimate
from app.admission.rates import Rates
from app.audit.records import Record
from app.auth.keys import Keys
from app.auth.principal import Principal
from app.services.code_policy import sandbox_of
from app.settings import Settings
from app.storage.storage_usage import StoredBytes
from app.storage.tables import JobRow
from nnsight_engine.core.metering import UsageMeter

RunOver = Callable[[JobStatus | None, UsageMeter], None]
"""Is told of a run that is over: how it ended, None if it is to run again, and what it used."""


def _unwatched(_record: Record, _traceparent: str) -> RunOver:
    return lambda _ended, _meter: None


class JobCallers:
    """The keys of jobs.

    Args:
        keys: Know them.
        rates: Count what jobs use.
        stored: Is told what may be kept.
        settings: Say how far code is trusted.
        watch: Is called as a run begins, in its task: with its record, and the ``traceparent`` of the request
            that let it run. What it returns is called when the run is over.
    """

    def __init__(
        self,
        keys: Keys,
        rates: Rates,
        stored: StoredBytes,
        settings: Settings,
        watch: Callable[[Record, str], RunOver] = _unwatched,
    ) -> None:
        """Keep the parts."""
        self.watch = watch
        self._settings = settings
        self._keys = keys
        self._rates = rates
        self._stored = stored

    async def of(self, job: JobRow) -> Principal | None:
        """Return for whom a job runs; None if its key has ended, and none was made to replace it."""
        caller = await self._keys.holder(job.key_id)
        if caller is not None:
            learn(self._stored, caller)
        return caller

    def sandbox_of(self, caller: Principal) -> str:
        """Return in whose sandbox their code runs, see ``code_policy``."""
        return sandbox_of(self._settings, caller)

    async def wait_s(self, caller: Principal) -> int:
        """Return in how many seconds a job of theirs may begin; 0 for now."""
        return await self._rates.wait_s(caller)

    async def set_aside(self, caller: Principal, estimate: Estimate) -> list[Taken]:
        """Set aside what a job states that it will use, which waits no more."""
        return await self._rates.set_aside(caller, estimate)

    async def count(self, caller: Principal, meter: UsageMeter, reserved: Sequence[Taken]) -> None:
        """Count what a job has used, of which some was set aside."""
        await self._rates.count(caller, meter, reserved)


def learn(stored: StoredBytes, caller: Principal) -> None:
    """Have the places where something is kept know what a caller may keep."""
    stored.learn(f"key:{caller.key_id}", caller.limits.stored_bytes)
    stored.learn(f"tenant:{caller.tenant}", caller.tenant_limits.stored_bytes)


__all__ = ["JobCallers", "RunOver", "learn"]
