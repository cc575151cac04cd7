"""The routes that every kind of named things has: its list, and one of them by its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.responses import Response

from api_schemas.fields import Listed, Page
from app.catalog.catalog import Catalog
from app.components import Components
from app.formats.uploads import FORM_TYPE
from app.http.openapi import (
    BINARY,
    SAFETENSORS_TYPE,
    AfterId,
    OfName,
    PageLimit,
    error_responses,
    json_body,
    schema_of,
)
from app.routes.parameters import Intervener, ServerComponents
from app.storage.versions import Kind

T = TypeVar("T", bound=Listed)
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

FILE_ANSWER: Final[dict[str, Any]] = {
    "description": "A safetensors file.",
    "content": {SAFETENSORS_TYPE: {"schema": BINARY}},
}


def catalog_of(components: Components, kind: Kind[T]) -> Catalog[T, Any]:
    catalog: Catalog[T, Any] = getattr(components, kind.plural)
    return catalog


def upload_body(model: type[BaseModel], form: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that is JSON, or a form with a file."""
    body = json_body(model)
    body["requestBody"]["content"][FORM_TYPE] = {"schema": schema_of(form)}
    return body


def list_of(kind: Kind[Any]) -> APIRouter:
    """Return a router with the list of a kind, for further routes."""
    router = APIRouter(prefix=f"/v1/{kind.plural}", tags=[kind.plural])

    @router.get(
        "",
        name=f"list_{kind.plural}",
        summary=f"List {kind.plural}, the newest first",
        description=f"The caller's own {kind.plural} and shared ones; pass a page's `last_id` as `after` for "
        "the next.",
        response_model=kind.listed,
        responses=error_responses(404, 503),
    )
    async def page(
        components: ServerComponents,
        caller: Intervener,
        limit: PageLimit = 20,
        after: AfterId = None,
        name: OfName = None,
    ) -> Page[Any]:
        return await catalog_of(components, kind).page(caller.tenant, name=name, after=after, limit=limit)

    return router


def routes_of(kind: Kind[Any], about: str, content: tuple[str, str] | None = None) -> APIRouter:
    """Return a router with the list of a kind, and what describes, sends and removes one by its id.

    ``about`` documents its description, ``content`` its safetensors file: a summary, and what is in it.
    """
    router, name, responses = list_of(kind), kind.name, error_responses(404, 503)

    def by_id(handler: HandlerT) -> HandlerT:
        """Name a handler's ``id_`` in the path after the kind, ``vector_id``, by its annotation."""
        handler.__annotations__["id_"] = Annotated[str, Path(alias=f"{name}_id")]
        return handler

    @router.get(
        f"/{{{name}_id}}",
        name=f"get_{name}",
        summary=f"Describe a {name}",
        description=about,
        response_model=kind.shown,
        responses=responses,
    )
    @by_id
    async def get(id_: str, components: ServerComponents, caller: Intervener) -> Any:
        return await catalog_of(components, kind).get(id_, caller.tenant)

    @router.delete(
        f"/{{{name}_id}}",
        name=f"delete_{name}",
        status_code=204,
        summary=f"Remove a {name}",
        description="Running requests go on; the version number is not reused. Shared ones need the scope "
        "`admin`.",
        responses=responses,
    )
    @by_id
    async def delete(id_: str, components: ServerComponents, caller: Intervener) -> None:
        await catalog_of(components, kind).remove(id_, caller)

    if content is None:
        return router

    @router.get(
        f"/{{{name}_id}}/content",
        name=f"get_{name}_content",
        summary=content[0],
        description=content[1],
        response_class=Response,
        responses={200: FILE_ANSWER, **responses},
    )
    @by_id
    async def get_content(id_: str, components: ServerComponents, caller: Intervener) -> Response:
        file = await catalog_of(components, kind).content(id_, caller.tenant)
        return Response(file, media_type=SAFETENSORS_TYPE, headers={"Cache-Control": "private, no-store"})

    return router
