"""``GET /playground``: a page for trying interventions, and its assets.

The page needs no key, contains none, and calls the API as any client does.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from app.pages import IMMUTABLE, REVALIDATE, answer
from app.playground.assets import assets, page

router = APIRouter(prefix="/playground", include_in_schema=False)


@router.get("")
async def get_page(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The page."""
    return answer(page(), REVALIDATE, if_none_match)


@router.get("/assets/{name}")
async def get_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a stylesheet of the page."""
    found = assets().get(name)
    if found is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The playground has no file {name!r}; load the page again.")
    return answer(found, IMMUTABLE, if_none_match)
