"""The callers of jobs: the current state of their keys when a job runs, and the usage that it is charged.

A job may wait for hours, or across a restart. Its key and remaining quota are checked when it is about to
run, whichever process ended the key.
"""

from __future__ import annotations

from collections.abc import Callable

from api_schemas.jobs import JobStatus
from app.admission.rates import Rates
from app.auth.code_policy import sandbox_of
from app.auth.keys import Keys
from app.auth.principal import Principal
from app.request_context import RequestContext
from app.settings import Settings
from app.storage.storage_usage import StoredBytes
from app.storage.tables import JobRow

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


__all__ = ["JobCallers", "RunOver", "set_limits"]
