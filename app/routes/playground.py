"""``GET /playground``: a page to try interventions with, and what it loads.

The page asks for no key, holds none, and calls the API as any client does. Its policy lets it run its own
script, speak to its own server, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Header
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from app.playground.assets import Asset, assets, page

router = APIRouter(prefix="/playground", include_in_schema=False)

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_NOT_MODIFIED: Final = 304


@router.get("")
async def get_page(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The page."""
    return _answer(page(), "no-cache", if_none_match)


@router.get("/assets/{name}")
async def get_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a style of the page's."""
    found = assets().get(name)
    if found is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The playground has no file {name!r}; load the page again.")
    return _answer(found, _FOR_EVER, if_none_match)


def _answer(asset: Asset, cache: str, held: str) -> Response:
    headers = {**_HEADERS, "Cache-Control": cache, "ETag": asset.etag}
    if asset.etag in held:
        return Response(status_code=_NOT_MODIFIED, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
