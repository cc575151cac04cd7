"""All resources with a share per tenant (``tenant_share``), computed from the settings.

Limits set for a key or a tenant are separate, because they may change at any time: ``admission.rates`` and
``storage.quotas``.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self

from api_schemas.errors import ErrorCode
from app.limits.allowances import Allowance
from app.settings import Settings

_BODY_PROCESSES: Final = 2
_GRAMMAR_PROCESSES: Final = 2
_SWEEPS: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TenantBudget:
    """``waiting_jobs`` are of all servers with the same database, ``running_jobs`` of this one.

    A tenant's oldest results make room for its new ones. ``vector_bytes`` count detectors too.
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
    sweeps: Allowance
    waiting_sweeps: Allowance
    running_jobs: Allowance
    waiting_jobs: Allowance
    job_bytes: Allowance
    vector_bytes: Allowance
    dictionary_bytes: Allowance
    preset_bytes: Allowance
    result_bytes: Allowance

    @classmethod
    def of(cls, settings: Settings) -> Self:
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
            sweeps=Allowance.of("running sweeps", _SWEEPS, share),
            waiting_sweeps=Allowance.of("queued sweeps", settings.max_queued_sweeps, share),
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
