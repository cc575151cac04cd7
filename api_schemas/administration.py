"""What administrators send and read: API keys with their tenants, scopes, tiers and limits; the audit log.

Scopes permit routes and operations, and the tier determines the isolation in which a key's code runs.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from api_schemas.fields import REFERENCE_PATTERN


class AuditEntry(BaseModel):
    """One recorded action. It contains no prompts, answers or code.

    Attributes:
        number: The entry's number in the log; entries are numbered in the order in which they were written.
        time: The start of the action, in seconds since 1970.
        tenant: The caller's tenant; empty for a command on the server's machine.
        key_id: The caller's key; empty for a command.
        request_id: The value of the response header `x-request-id`.
        method: The method of the request; `RUN` for a job that was run, `CLI` for a command.
        route: The route of the request, such as `/v1/jobs/{job_id}`, or the command.
        subject: The id of the affected job or key, or the name of the tenant.
        model: The model, as named in the request.
        operations: The request's operations, in order; or the kind of a trace.
        code_sha256: SHA-256 of the code as sent: the message of a trace, or the text of an operation.
        code_bytes: The size of that code.
        status: The HTTP status of the response; null if there was none.
        error: The error code, also of an error after the status was sent; `client_left` if the client
            disconnected before the end, `under_way` while the request runs.
        tokens: The number of prompt tokens and generated tokens; null if the request generates none.
        captured_bytes: The bytes of captured and saved values; null if the request generates no tokens.
        intervention_s: The seconds during which its operations and blocks had the engine to themselves; null
            if the request generates no tokens.
        request_bytes: The number of bytes that were read of the request's body.
        response_bytes: The number of bytes of the response's body.
        duration_s: The time from the request to the last byte of the response.
        details: The changed properties, for changes of keys and tenants.
    """

    model_config = ConfigDict(from_attributes=True)

    number: int
    time: float
    tenant: str
    key_id: str
    request_id: str
    method: str
    route: str
    subject: str
    model: str
    operations: list[str]
    code_sha256: str
    code_bytes: int
    status: int | None
    error: str
    tokens: int | None
    captured_bytes: int | None
    intervention_s: float | None
    request_bytes: int
    response_bytes: int
    duration_s: float
    details: dict[str, Any]


class AuditPage(BaseModel):
    """A page of the audit log, the newest entries first.

    Attributes:
        object: Always ``list``.
        data: The entries.
        last_number: The number of the last entry; pass it as ``after`` for the next page.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    last_number: int | None = None
    has_more: bool


MAX_NAME: Final = 64
_NAME: Final = r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$"
_MAX_PRESETS: Final = 100


def _number(value: object) -> object:
    """Reject values that pydantic would convert to a number: true, and numbers in quotes."""
    if isinstance(value, (bool, str)):
        raise ValueError("must be a number")  # noqa: TRY004 - what pydantic reports
    return value


class Scope(enum.StrEnum):
    """The permissions of a key; every key may read the server's status and models."""

    COMPLETIONS = "completions"
    """Completions and chat."""
    INTERVENTIONS = "interventions"
    """Requests with interventions, and their captures."""
    CODE = "code"
    """Traces, jobs, and operations that are code."""
    METRICS = "metrics"
    """Metrics: sums over all tenants, without data of a single one."""
    ADMIN = "admin"
    """Keys of every tenant, and the audit log."""


class Tier(enum.StrEnum):
    """How the code of a key runs."""

    SANDBOXED = "sandboxed"
    """In a sandbox process that can only compute."""
    TRUSTED = "trusted"
    """In the engine's workers, with all their rights."""


class Limits(BaseModel):
    """Quotas; an absent one is not limited. Minutes are sliding windows.

    Attributes:
        requests_per_minute: Requests of any kind.
        concurrency: Completions, chats, traces and trainings that run at once; jobs are not counted.
        tokens_per_minute: Tokens of prompts and generated tokens. This limit and the next two include jobs.
        captured_bytes_per_minute: Bytes of the results of captures, lenses, probes and saves.
        intervention_seconds_per_minute: Seconds during which operations and blocks have the engine to
            themselves.
        stored_bytes: Bytes stored at one time: jobs with their requests and results, result files, vectors,
            presets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(default=None, ge=1, le=2**31)
    concurrency: int | None = Field(default=None, ge=1, le=2**31)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=2**40)
    captured_bytes_per_minute: int | None = Field(default=None, ge=1, le=2**50)
    intervention_seconds_per_minute: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    stored_bytes: int | None = Field(default=None, ge=1, le=2**50)

    _are_numbers = field_validator("*", mode="before")(_number)


class NewKey(BaseModel):
    """A key to be created.

    Attributes:
        tenant: Its owner, a team or a customer: a short name. The tenant owns all data that its keys create.
        scopes: Its permissions.
        name: Its purpose, for people.
        tier: How its code runs.
        limits: Its own limits; those of its tenant apply as well.
        expires_in_s: Its lifetime, in seconds from now.
        trusted_codecs: Whether it may send blocks as pickles, if the server accepts them.
        presets: The only presets by which it may intervene, ``calm`` or one version, ``calm@3``, which those
            with code need; null for no such limit.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "allOf": [
                {
                    "if": {"properties": {"trusted_codecs": {"const": True}}, "required": ["trusted_codecs"]},
                    "then": {"properties": {"tier": {"const": "trusted"}}, "required": ["tier"]},
                },
                {
                    "if": {"properties": {"presets": {"type": "array"}}, "required": ["presets"]},
                    "then": {"properties": {"scopes": {"not": {"contains": {"const": "admin"}}}}},
                },
            ]
        },
    )

    tenant: str = Field(
        max_length=MAX_NAME,
        pattern=_NAME,
        description="Lower-case letters and digits, and . _ - between them, like `acme-research`.",
    )
    scopes: tuple[Scope, ...] = Field(default=(Scope.COMPLETIONS,), min_length=1, max_length=len(Scope))
    name: str = Field(default="", max_length=200)
    tier: Tier = Tier.SANDBOXED
    limits: Limits = Limits()
    expires_in_s: float | None = Field(default=None, gt=0, le=1e10, allow_inf_nan=False)
    trusted_codecs: bool = False
    presets: tuple[Annotated[str, Field(pattern=REFERENCE_PATTERN)], ...] | None = Field(
        default=None, min_length=1, max_length=_MAX_PRESETS
    )

    _is_number = field_validator("expires_in_s", mode="before")(_number)

    @field_validator("scopes")
    @classmethod
    def _check_unique(cls, scopes: tuple[Scope, ...]) -> tuple[Scope, ...]:
        """Return the scopes in the order of ``Scope``, each once."""
        return tuple(sorted(set(scopes), key=list(Scope).index))

    @field_validator("presets")
    @classmethod
    def _check_limited(cls, presets: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if presets is not None and Scope.ADMIN in info.data.get("scopes", ()):
            raise ValueError("a key with the scope 'admin' can create keys without this limit")
        return presets

    @field_validator("trusted_codecs")
    @classmethod
    def _check_trusted(cls, trusted_codecs: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - pydantic's
        # Unpickling runs the sender's code, outside any sandbox.
        if trusted_codecs and info.data.get("tier") is not Tier.TRUSTED:
            raise ValueError("only a key of the tier 'trusted' may send blocks as pickles, which are code")
        return trusted_codecs


class Key(BaseModel):
    """A key, without its secret.

    Attributes:
        id: Its id, the second part of the key itself.
        tenant: Its owner.
        name: Its purpose.
        scopes: Its permissions.
        tier: How its code runs.
        limits: Its own limits.
        created_at: The time of its creation. All times are seconds since 1970.
        expires_at: The time at which it expires.
        revoked_at: The time at which it was revoked.
        last_used_at: The time of the last request with it, to the minute.
        replaces: The key that it replaced, by rotation.
        trusted_codecs: Whether it may send blocks as pickles.
        presets: The only presets by which it may intervene; null for no such limit.
    """

    id: str
    tenant: str
    name: str
    scopes: tuple[Scope, ...]
    tier: Tier
    limits: Limits
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    replaces: str | None = None
    trusted_codecs: bool = False
    presets: tuple[str, ...] | None = None


class CreatedKey(Key):
    """A key that was just created; ``key`` is not stored and never shown again."""

    key: str


class KeyList(BaseModel):
    """Keys, the newest first."""

    data: list[Key]


class Tenant(BaseModel):
    """A tenant.

    Attributes:
        name: Its name.
        limits: The limits of all its keys together.
        created_at: The time at which its first key was created, in seconds since 1970.
    """

    name: str
    limits: Limits
    created_at: float


class TenantList(BaseModel):
    """Tenants, by name."""

    data: list[Tenant]


class Rotation(BaseModel):
    """The replacement of a key by a new one with the same rights.

    Attributes:
        grace_s: How long the old key remains valid, in seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    grace_s: float = Field(default=0.0, ge=0, le=1e10, allow_inf_nan=False)

    _is_number = field_validator("grace_s", mode="before")(_number)
