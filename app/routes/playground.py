"""``GET /playground``: a page for trying interventions, and its assets. ``GET /`` leads browsers to it.

The page needs no key, contains none, and calls the API as any client does.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.responses import RedirectResponse, Response

from api_schemas.errors import ApiError, ErrorCode
from app.pages import IMMUTABLE, REVALIDATE, answer
from app.playground.assets import assets, page

router = APIRouter(include_in_schema=False)


@router.get("/")
async def get_root(request: Request, accept: Annotated[str, Header()] = "") -> Response:
    """To the page for a browser; 404 for clients of the API, as on vLLM's server."""
    headers = {"Vary": "Accept"}
    if "text/html" in accept:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/playground", headers=headers)
    raise ApiError(ErrorCode.NOT_FOUND, "The server has no route GET /; GET /openapi.json lists its routes.")


@router.get("/playground")
async def get_page(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The page."""
    return answer(page(), REVALIDATE, if_none_match)


@router.get("/playground/assets/{name}")
async def get_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a stylesheet of the page."""
    found = assets().get(name)
    if found is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The playground has no file {name!r}; load the page again.")
    return answer(found, IMMUTABLE, if_none_match)
