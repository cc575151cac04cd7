"""``GET /v1/admin/audit``: the audit log, for operators."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query

from api_schemas.audit import AuditPage
from api_schemas.keys import MAX_NAME
from app.context import ADMIN, Served
from app.storage.audit import AuditStore, Wanted

router = APIRouter(prefix="/v1/admin/audit", tags=["keys"], dependencies=[ADMIN])

_MAX_PAGE: Final = 1000
_MAX_NUMBER: Final = 2**63 - 1
Time = Annotated[float | None, Query(allow_inf_nan=False, description="In seconds since 1970.")]


@router.get("", summary="Who ran what, the newest first")
async def get_audit(
    context: Served,
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
    wanted = Wanted(tenant, key_id, since, until, after)
    entries, has_more = await AuditStore(context.database).page(wanted, limit=limit)
    return AuditPage(data=entries, last_number=entries[-1].number if entries else None, has_more=has_more)
