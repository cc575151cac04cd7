"""``/v1/admin``: the keys and limits of all tenants, and the audit log, for operators."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel
from starlette.requests import Request

from api_schemas.administration import (
    MAX_NAME,
    AuditPage,
    CreatedKey,
    Key,
    KeyList,
    Limits,
    NewKey,
    Rotation,
    Tenant,
    TenantList,
)
from app.audit import changed
from app.components import Components
from app.http.bodies import BodyLimits, read_object
from app.http.errors import validated
from app.http.openapi import error_responses, json_body
from app.routes.parameters import ADMIN, CurrentContext, ServerComponents
from app.storage.audit import AuditFilter, AuditStore

T = TypeVar("T", bound=BaseModel)

_MAX_BODY_BYTES: Final = 64 * 1024

router = APIRouter(prefix="/v1/admin", tags=["keys"], dependencies=[ADMIN])


@router.post(
    "/keys",
    status_code=201,
    summary="Make a key",
    openapi_extra=json_body(NewKey),
    responses=error_responses(400, 413, 422),
)
async def create_key(
    request: Request, response: Response, components: ServerComponents, context: CurrentContext
) -> CreatedKey:
    """The secret, `key`, is only in this answer."""
    response.headers["Cache-Control"] = "no-store"
    created = await components.keys.create(await _read(request, components, NewKey))
    context.record.subject, context.record.details = created.id, changed(created)
    return created


@router.get("/keys", summary="List keys, the newest first")
async def list_keys(
    components: ServerComponents,
    tenant: Annotated[str | None, Query(max_length=MAX_NAME, description="Only this tenant's.")] = None,
) -> KeyList:
    """Includes keys that have ended."""
    return KeyList(data=await components.keys.page(tenant))


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    summary="Replace a key by another of the same rights",
    openapi_extra=json_body(Rotation),
    responses=error_responses(400, 404, 409, 413, 422),
)
async def rotate_key(
    key_id: str, request: Request, response: Response, components: ServerComponents, context: CurrentContext
) -> CreatedKey:
    """The old key ends now, or after `grace_s`."""
    response.headers["Cache-Control"] = "no-store"
    rotation = await _read(request, components, Rotation)
    created = await components.keys.rotate(key_id, rotation.grace_s)
    context.record.details = changed(created)
    return created


@router.delete("/keys/{key_id}", summary="Revoke a key", responses=error_responses(404))
async def revoke_key(key_id: str, components: ServerComponents) -> Key:
    """The key is refused from now on; lists still include it."""
    return await components.keys.revoke(key_id)


@router.get("/tenants", summary="List tenants, by name")
async def list_tenants(components: ServerComponents) -> TenantList:
    """Every tenant that has, or had, a key."""
    return TenantList(data=await components.keys.tenants())


@router.put(
    "/tenants/{tenant}/limits",
    summary="Limit all keys of a tenant together",
    openapi_extra=json_body(Limits),
    responses=error_responses(400, 404, 413, 422),
)
async def limit_tenant(
    tenant: str, request: Request, components: ServerComponents, context: CurrentContext
) -> Tenant:
    """Limits that are left out are removed."""
    limited = await components.keys.limit(tenant, await _read(request, components, Limits))
    context.record.details = changed(limited)
    return limited


async def _read(request: Request, components: Components, model: type[T]) -> T:
    """Read and validate a body of limited size, after the caller's key was checked.

    A body that is declared as a route's parameter would be read by FastAPI before the key is checked.
    """
    settings = components.settings
    limits = BodyLimits(_MAX_BODY_BYTES, settings.upload_idle_timeout_s)
    return validated(model, await read_object(request, limits))


_MAX_PAGE: Final = 1000
_MAX_NUMBER: Final = 2**63 - 1
Time = Annotated[float | None, Query(allow_inf_nan=False, description="In seconds since 1970.")]


@router.get("/audit", summary="Who ran what, the newest first")
async def get_audit(
    components: ServerComponents,
    tenant: Annotated[
        str | None, Query(max_length=MAX_NAME, description="Only entries of this tenant.")
    ] = None,
    key_id: Annotated[str | None, Query(max_length=64, description="Only entries of this key.")] = None,
    since: Time = None,
    until: Time = None,
    after: Annotated[
        int | None, Query(ge=0, le=_MAX_NUMBER, description="The last number of the previous page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 100,
) -> AuditPage:
    """A page of entries; pass its `last_number` as `after` for the next. Entries appear within a second."""
    filter_ = AuditFilter(tenant, key_id, since, until, after)
    entries, has_more = await AuditStore(components.database).page(filter_, limit=limit)
    return AuditPage(data=entries, last_number=entries[-1].number if entries else None, has_more=has_more)
