"""``GET /docs`` and ``GET /redoc``: the API's OpenAPI document, rendered by Swagger UI and by Redoc.

Their scripts come from the package ``fastapi-offline`` (Swagger UI under Apache-2.0, Redoc under MIT): a
script loaded from another host would have the rights of this origin.
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import Annotated, Final

from fastapi import APIRouter, Header
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from app.pages import REVALIDATE, Asset, answer, asset

router = APIRouter(include_in_schema=False)

_PACKAGE: Final = "fastapi_offline"
_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js")
_LOGO: Final = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
"""The image that Redoc loads from its vendor's host."""
_BLANK: Final = b"data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
_START: Final = "swagger-ui-start.js"
_START_SCRIPT: Final = (
    b'SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null});\n'
)
_HEAD: Final = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>NNsight Engine</title>\n'
    '<link rel="icon" href="data:,">\n'
)
_SWAGGER_UI: Final = asset(
    f'{_HEAD}<link rel="stylesheet" href="docs/assets/swagger-ui.css">\n</head>\n'
    '<body>\n<div id="page"></div>\n<script src="docs/assets/swagger-ui-bundle.js"></script>\n'
    f'<script src="docs/assets/{_START}"></script>\n</body>\n</html>\n'.encode(),
    "docs.html",
)
# Redoc's search needs a web worker, which the content security policy forbids.
_REDOC: Final = asset(
    f'{_HEAD}</head>\n<body>\n<redoc spec-url="openapi.json" disable-search="true"></redoc>\n'
    '<script src="docs/assets/redoc.standalone.js"></script>\n</body>\n</html>\n'.encode(),
    "redoc.html",
)


@router.get("/docs")
async def get_swagger_ui(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The API's documentation, with forms to send requests."""
    return answer(_SWAGGER_UI, REVALIDATE, if_none_match)


@router.get("/redoc")
async def get_redoc(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The API's documentation, for reading."""
    # Redoc inserts inline styles
    return answer(_REDOC, REVALIDATE, if_none_match, style_src="'self' 'unsafe-inline'")


@router.get("/docs/assets/{name}")
async def get_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a stylesheet of these pages."""
    found = _assets().get(name)
    if found is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The documentation has no file {name!r}; load the page again.")
    return answer(found, REVALIDATE, if_none_match)


@functools.cache
def _assets() -> dict[str, Asset]:
    folder = importlib.resources.files(_PACKAGE) / "static"
    found = {name: asset((folder / name).read_bytes().replace(_LOGO, _BLANK), name) for name in _FILES}
    return {**found, _START: asset(_START_SCRIPT, _START)}
