"""``/v1/admin/keys`` and ``/v1/admin/tenants``: keys of every tenant, for those who run the server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api_schemas.keys import MAX_NAME, CreatedKey, Key, KeyList, Limits, NewKey, Rotation, Tenant, TenantList
from app.context import ADMIN, Served
from app.openapi import error_responses

router = APIRouter(prefix="/v1/admin/keys", tags=["keys"], dependencies=[ADMIN])
tenants_router = APIRouter(prefix="/v1/admin/tenants", tags=["keys"], dependencies=[ADMIN])


@router.post("", status_code=201, summary="Make a key", responses=error_responses(400))
async def create_key(new: NewKey, response: Response, context: Served) -> CreatedKey:
    """`key` is in this answer and nowhere else. The first key closes the server to whoever has none."""
    response.headers["Cache-Control"] = "no-store"
    return await context.keys.create(new)


@router.get("", summary="List keys, the newest first")
async def list_keys(
    context: Served,
    tenant: Annotated[str | None, Query(max_length=MAX_NAME, description="Only this tenant's.")] = None,
) -> KeyList:
    """Those that have ended too."""
    return KeyList(data=await context.keys.page(tenant))


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Replace a key by another of the same rights",
    responses=error_responses(400, 404, 409),
)
async def rotate_key(key_id: str, rotation: Rotation, response: Response, context: Served) -> CreatedKey:
    """The old one ends now, or after `grace_s`."""
    response.headers["Cache-Control"] = "no-store"
    return await context.keys.rotate(key_id, rotation.grace_s)


@router.delete("/{key_id}", summary="Revoke a key", responses=error_responses(404))
async def revoke_key(key_id: str, context: Served) -> Key:
    """It opens nothing from now on; lists still tell of it."""
    return await context.keys.revoke(key_id)


@tenants_router.get("", summary="List tenants, by name")
async def list_tenants(context: Served) -> TenantList:
    """Whoever has, or had, a key."""
    return TenantList(data=await context.keys.tenants())


@tenants_router.put(
    "/{tenant}/limits", summary="Limit all keys of a tenant together", responses=error_responses(400, 404)
)
async def limit_tenant(tenant: str, limits: Limits, context: Served) -> Tenant:
    """What is left out is not limited any more."""
    return await context.keys.limit(tenant, limits)
