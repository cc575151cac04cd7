"""``/v1/presets``: lists of operations stored on the server, which requests use by name."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Response
from starlette.requests import Request

from api_schemas.presets import NewPreset, PresetContent
from app.catalog.presets import Presets
from app.http.openapi import error_responses, json_body
from app.routes.catalog import list_of
from app.routes.parameters import CurrentContext, Intervener, ServerComponents

router: Final = list_of(Presets.kind)

_MADE: Final[dict[int | str, dict[str, Any]]] = error_responses(400, 403, 404, 409, 413, 422, 503)


@router.post(
    "",
    status_code=201,
    summary="Keep a preset",
    openapi_extra=json_body(NewPreset),
    responses=_MADE,
)
async def create_preset(
    request: Request, components: ServerComponents, context: CurrentContext, caller: Intervener
) -> PresetContent:
    """The next version of its name."""
    preset, _ = await components.presets.create(request, caller)
    context.record.subject = str(preset.reference)
    return preset


@router.put(
    "",
    status_code=201,
    summary="Keep a preset, unless its newest version is the same",
    openapi_extra=json_body(NewPreset),
    responses={
        200: {"model": PresetContent, "description": "The newest version, which is the same."},
        **_MADE,
    },
)
async def put_preset(
    request: Request,
    response: Response,
    components: ServerComponents,
    context: CurrentContext,
    caller: Intervener,
) -> PresetContent:
    """The next version of its name; none if operations, description and sharing are those of the newest."""
    preset, is_new = await components.presets.create(request, caller, unless_same=True)
    response.status_code = 201 if is_new else 200
    context.record.subject = str(preset.reference)
    return preset


@router.get("/{preset}", summary="Describe a preset", responses=error_responses(404, 503))
async def get_preset(preset: str, components: ServerComponents, caller: Intervener) -> PresetContent:
    """`calm` is the newest version, `calm@3` a specific one. Returns its operations too."""
    return await components.presets.get(preset, caller.tenant)


@router.delete("/{preset}", status_code=204, summary="Remove a preset", responses=error_responses(404, 503))
async def delete_preset(
    preset: str, components: ServerComponents, context: CurrentContext, caller: Intervener
) -> None:
    """One version, the newest of a name alone; its number is not reused. Shared ones need `admin`."""
    removed = await components.presets.remove(preset, caller)
    context.record.subject = f"{removed.name}@{removed.version}"
