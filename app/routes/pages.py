"""Pages for browsers: the playground, and the OpenAPI document, rendered by Swagger UI and by Redoc.

The playground needs no key, contains none, and calls the API as any client does. Its assets have a hash in
their names, so only the page is revalidated. Scripts of the documentation come from the package
``fastapi-offline`` (Swagger UI under Apache-2.0, Redoc under MIT): a script loaded from another host would
have the rights of this origin.

Serves pages with a strict policy: they may use this server's own scripts and this server, nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request
from starlette.responses import RedirectResponse, Response

from api_schemas.errors import ApiError, ErrorCode

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}

_DIRECTIVES: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REVALIDATE: Final = "no-cache"
"""Cache-Control for files whose name stays the same when their content changes."""
IMMUTABLE: Final = "public, max-age=31536000, immutable"
"""Cache-Control for files whose name contains a hash of their content."""
_NOT_MODIFIED: Final = 304


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def asset(content: bytes, name: str) -> Asset:
    """Return a file with its media type and tag, by the ending of its name."""
    kind = _TYPES[name.rpartition(".")[2]]
    return Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def asset_response(file: Asset, cache: str, known_etags: str, **directives: str) -> Response:
    """Return a file, or 304 if ``known_etags`` has its tag; ``directives`` replace those of the policy."""
    replaced = {name.replace("_", "-"): value for name, value in directives.items()}
    policy = "; ".join(f"{name} {value}" for name, value in {**_DIRECTIVES, **replaced}.items())
    headers = {**_HEADERS, "Content-Security-Policy": policy, "Cache-Control": cache, "ETag": file.etag}
    if file.etag in known_etags:
        return Response(status_code=_NOT_MODIFIED, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


STATIC: Final = Path(__file__).resolve().parents[1] / "playground" / "static"
PAGE: Final = "index.html"


@functools.cache
def page() -> Asset:
    return _read(STATIC / PAGE)


@functools.cache
def assets() -> dict[str, Asset]:
    return {path.name: _read(path) for path in sorted((STATIC / "assets").iterdir())}


def _read(path: Path) -> Asset:
    return asset(path.read_bytes(), path.name)


playground_router = APIRouter(include_in_schema=False)


@playground_router.get("/")
async def get_root(request: Request, accept: Annotated[str, Header()] = "") -> Response:
    """To the page for a browser; 404 for clients of the API, as on vLLM's server."""
    headers = {"Vary": "Accept"}
    if "text/html" in accept:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/playground", headers=headers)
    raise ApiError(ErrorCode.NOT_FOUND, "The server has no route GET /; GET /openapi.json lists its routes.")


@playground_router.get("/playground")
async def get_page(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The page."""
    return asset_response(page(), REVALIDATE, if_none_match)


@playground_router.get("/playground/assets/{name}")
async def get_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a stylesheet of the page."""
    file = assets().get(name)
    if file is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The playground has no file {name!r}; load the page again.")
    return asset_response(file, IMMUTABLE, if_none_match)


documentation_router = APIRouter(include_in_schema=False)

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


@documentation_router.get("/docs")
async def get_swagger_ui(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The API's documentation, with forms to send requests."""
    return asset_response(_SWAGGER_UI, REVALIDATE, if_none_match)


@documentation_router.get("/redoc")
async def get_redoc(if_none_match: Annotated[str, Header()] = "") -> Response:
    """The API's documentation, for reading."""
    # Redoc inserts inline styles
    return asset_response(_REDOC, REVALIDATE, if_none_match, style_src="'self' 'unsafe-inline'")


@documentation_router.get("/docs/assets/{name}")
async def get_documentation_asset(name: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    """A script or a stylesheet of these pages."""
    file = _assets().get(name)
    if file is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"The documentation has no file {name!r}; load the page again.")
    return asset_response(file, REVALIDATE, if_none_match)


@functools.cache
def _assets() -> dict[str, Asset]:
    """Return the files of the documentation by name, without the logo on another host."""
    folder = importlib.resources.files(_PACKAGE) / "static"
    files = {name: asset((folder / name).read_bytes().replace(_LOGO, _BLANK), name) for name in _FILES}
    return {**files, _START: asset(_START_SCRIPT, _START)}
