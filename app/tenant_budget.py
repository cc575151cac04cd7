"""The budget of a tenant: its share of each of the server's finite resources, computed from the settings.

All resources with a share per tenant (``tenant_share``) are listed here. Limits that an operator sets for a
key or a tenant are separate, because they may change at any time: requests, tokens and seconds per minute
(``admission.quotas``), and stored bytes (``storage.storage_usage``).
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self

from api_schemas.errors import ErrorCode
from app.allowance import Allowance
from app.settings import Settings

_BODY_PROCESSES: Final = 2
_GRAMMAR_PROCESSES: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TenantBudget:
    """The allowances of all resources of one server.

    Attributes:
        received_bytes: Bytes received from clients, until their requests are answered.
        body_processes: Processes that parse large bodies.
        grammar_processes: Grammars that are compiled at once.
        waiting_grammars: Grammars that wait for that.
        sandboxes: Sandbox processes.
        waiting_sandboxed: Requests that wait for one.
        waiting_traces: Traces that wait for one of the processes beside the server.
        trainings: Trainings that run.
        waiting_trainings: Trainings that wait.
        running_jobs: Jobs that run on this server.
        waiting_jobs: Jobs that wait, on all servers with the same database.
        job_bytes: Bytes of the files of jobs.
        vector_bytes: Bytes of vectors and detectors.
        dictionary_bytes: Bytes of dictionaries.
        preset_bytes: Bytes of presets.
        result_bytes: Bytes of results behind URLs; a tenant's oldest ones make room for its new ones.
    """

    received_bytes: Allowance
    body_processes: Allowance
    grammar_processes: Allowance
    waiting_grammars: Allowance
    sandboxes: Allowance
    waiting_sandboxed: Allowance
    waiting_traces: Allowance
    trainings: Allowance
    waiting_trainings: Allowance
    running_jobs: Allowance
    waiting_jobs: Allowance
    job_bytes: Allowance
    vector_bytes: Allowance
    dictionary_bytes: Allowance
    preset_bytes: Allowance
    result_bytes: Allowance

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the budget that the settings describe."""
        share, queued = settings.tenant_share, settings.max_queued_traces
        return cls(
            received_bytes=Allowance.of(
                "bytes of requests being sent or answered",
                settings.max_received_bytes,
                share,
                ErrorCode.RATE_LIMITED,
                "send this one again when some have ended",
            ),
            body_processes=Allowance.of("large bodies being read", _BODY_PROCESSES, share),
            grammar_processes=Allowance.of("grammars being compiled", _GRAMMAR_PROCESSES, share),
            waiting_grammars=Allowance.of("queued grammars", queued, share),
            sandboxes=Allowance.of("sandboxes", settings.max_sandboxes, share),
            waiting_sandboxed=Allowance.of("queued requests with sandboxed code", queued, share),
            waiting_traces=Allowance.of("queued traces (max_queued_traces)", queued, share),
            trainings=Allowance.of("running trainings", 1, share),
            waiting_trainings=Allowance.of("queued trainings", settings.max_queued_trainings, share),
            running_jobs=Allowance.of("running jobs", settings.max_running_jobs, share),
            waiting_jobs=Allowance.of(
                "queued jobs", settings.max_queued_jobs, share, then="send the trace again later"
            ),
            job_bytes=Allowance.of(
                "bytes of jobs",
                settings.job_store_bytes,
                share,
                ErrorCode.JOB_STORE_FULL,
                "remove some jobs (DELETE /v1/jobs/{id}), or wait until they expire",
            ),
            vector_bytes=Allowance.of(
                "bytes of vectors and detectors",
                settings.vector_store_bytes,
                share,
                ErrorCode.VECTOR_STORE_FULL,
                "remove some (DELETE /v1/vectors/{id}, DELETE /v1/detectors/{id})",
            ),
            dictionary_bytes=Allowance.of(
                "bytes of dictionaries",
                settings.dictionary_store_bytes,
                share,
                ErrorCode.DICTIONARY_STORE_FULL,
                "remove some dictionaries (DELETE /v1/dictionaries/{id})",
            ),
            preset_bytes=Allowance.of(
                "bytes of presets",
                settings.preset_store_bytes,
                share,
                ErrorCode.PRESET_STORE_FULL,
                "remove some presets (DELETE /v1/presets/{name})",
            ),
            result_bytes=Allowance.of(
                "bytes of results", settings.result_store_bytes, share, ErrorCode.CAPTURE_TOO_LARGE
            ),
        )


__all__ = ["TenantBudget"]
