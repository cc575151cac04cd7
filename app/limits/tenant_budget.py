"""All resources with a share per tenant (``tenant_share``), computed from the settings.

Limits set for a key or a tenant are separate, because they may change at any time: ``admission.rates`` and
``storage.quotas``.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self

from api_schemas.errors import ErrorCode
from app.limits.limit import UNBOUNDED, Limit
from app.settings import Settings

_BODY_PROCESSES: Final = 2
_GRAMMAR_PROCESSES: Final = 2
_SWEEPS: Final = 2
_MAX_SOCKETS: Final = 64
"""The most of one tenant. Each buffers a partially received message, which is not counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class TenantBudget:
    """``waiting_jobs`` are of all servers with the same database, ``running_jobs`` of this one.

    A tenant's oldest results make room for its new ones. ``vector_bytes`` count detectors too.
    """

    received_bytes: Limit
    sockets: Limit
    body_processes: Limit
    grammar_processes: Limit
    waiting_grammars: Limit
    sandboxes: Limit
    waiting_sandboxed: Limit
    waiting_traces: Limit
    trainings: Limit
    waiting_trainings: Limit
    sweeps: Limit
    waiting_sweeps: Limit
    running_jobs: Limit
    waiting_jobs: Limit
    job_bytes: Limit
    vector_bytes: Limit
    dictionary_bytes: Limit
    preset_bytes: Limit
    result_bytes: Limit

    @classmethod
    def of(cls, settings: Settings) -> Self:
        share, queued = settings.tenant_share, settings.max_queued_traces
        return cls(
            received_bytes=Limit(
                "bytes of requests being sent or answered",
                settings.max_received_bytes,
                share,
                code=ErrorCode.RATE_LIMITED,
                then="send this one again when some have ended",
            ),
            sockets=Limit(
                "open WebSockets",
                UNBOUNDED,
                each=_MAX_SOCKETS,
                code=ErrorCode.RATE_LIMITED,
                then="close some",
            ),
            body_processes=Limit("large bodies being read", _BODY_PROCESSES, share),
            grammar_processes=Limit("grammars being compiled", _GRAMMAR_PROCESSES, share),
            waiting_grammars=Limit("queued grammars", queued, share),
            sandboxes=Limit("sandboxes", settings.max_sandboxes, share),
            waiting_sandboxed=Limit("queued requests with sandboxed code", queued, share),
            waiting_traces=Limit("queued traces (max_queued_traces)", queued, share),
            trainings=Limit("running trainings", 1, share),
            waiting_trainings=Limit("queued trainings", settings.bounds.max_queued_trainings, share),
            sweeps=Limit("running sweeps", _SWEEPS, share),
            waiting_sweeps=Limit("queued sweeps", settings.bounds.max_queued_sweeps, share),
            running_jobs=Limit("running jobs", settings.max_running_jobs, share),
            waiting_jobs=Limit(
                "queued jobs", settings.max_queued_jobs, share, then="send the trace again later"
            ),
            job_bytes=Limit(
                "bytes of jobs",
                settings.job_store_bytes,
                share,
                code=ErrorCode.JOB_STORE_FULL,
                then="remove some jobs (DELETE /v1/jobs/{id}), or wait until they expire",
            ),
            vector_bytes=Limit(
                "bytes of vectors and detectors",
                settings.vector_store_bytes,
                share,
                code=ErrorCode.VECTOR_STORE_FULL,
                then="remove some (DELETE /v1/vectors/{id}, DELETE /v1/detectors/{id})",
            ),
            dictionary_bytes=Limit(
                "bytes of dictionaries",
                settings.dictionary_store_bytes,
                share,
                code=ErrorCode.DICTIONARY_STORE_FULL,
                then="remove some dictionaries (DELETE /v1/dictionaries/{id})",
            ),
            preset_bytes=Limit(
                "bytes of presets",
                settings.bounds.preset_store_bytes,
                share,
                code=ErrorCode.PRESET_STORE_FULL,
                then="remove some presets (DELETE /v1/presets/{name})",
            ),
            result_bytes=Limit(
                "bytes of results", settings.result_store_bytes, share, code=ErrorCode.CAPTURE_TOO_LARGE
            ),
        )
