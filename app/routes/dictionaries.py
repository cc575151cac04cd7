"""``/v1/dictionaries``: sparse autoencoders and transcoders on the server, their features and labels."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.dictionaries import Dictionary, DictionaryFromHub, DictionaryUpload, FeatureList
from app.catalog.dictionaries import Dictionaries
from app.catalog.dictionary_form import CSV_TYPE
from app.http.openapi import SAFETENSORS_TYPE, PageLimit, Strict, error_responses
from app.routes.catalog import FILE_ANSWER, routes_of, upload_body
from app.routes.parameters import Intervener, ServerComponents
from app.services.streaming import download

router: Final = routes_of(
    Dictionaries.kind, "Returns the dictionary's points, its architecture and its sizes."
)

_LABELS: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "description": "Labels by the id of the feature.",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
                    "additionalProperties": {"type": "string"},
                }
            },
            CSV_TYPE: {"schema": {"type": "string", "description": "Lines of an id and a label."}},
        },
    }
}
_FeatureQuery = Annotated[
    int | None, Query(ge=0, lt=2**31, description="The one feature, with a label or not.")
]
_AfterFeature = Annotated[int, Query(ge=-1, lt=2**31, description="The last id of the previous page.")]
_Words = Annotated[str, Query(max_length=256, description="Words that all occur in the label, without case.")]


@router.post(
    "",
    status_code=201,
    summary="Keep a dictionary",
    openapi_extra=upload_body(DictionaryFromHub, DictionaryUpload),
    responses=error_responses(400, 403, 404, 408, 409, 413, 415, 422, 429, 503),
)
async def create_dictionary(
    request: Request, components: ServerComponents, caller: Intervener, *, strict: Strict = False
) -> Dictionary:
    """A form with SAELens' files, the tensors as safetensors and `cfg.json`; or JSON: a place on the Hub."""
    if request.headers.get("content-type", "").split(";", 1)[0].strip().lower() == "application/json":
        return await components.dictionaries.create_from_hub(request, caller, strict=strict)
    return await components.dictionaries.create(request, caller, strict=strict)


@router.get(
    "/{dictionary_id}/content",
    summary="Fetch a dictionary's weights as a safetensors file",
    response_class=Response,
    responses={
        200: FILE_ANSWER,
        206: {**FILE_ANSWER, "description": "The requested range of it."},
        **error_responses(404, 416, 429, 500, 503),
    },
)
async def get_dictionary_content(
    request: Request, dictionary_id: str, components: ServerComponents, caller: Intervener
) -> Response:
    """The file that was uploaded; `Range` resumes a download."""
    about, file = await components.dictionaries.open(dictionary_id, caller.tenant)
    return await download(
        request,
        file,
        media_type=SAFETENSORS_TYPE,
        tag=f'"{about.sha256}"',
        stall_s=components.settings.client_stall_timeout_s,
    )


@router.get(
    "/{dictionary_id}/config",
    summary="Fetch a dictionary's cfg.json",
    response_class=Response,
    responses={
        200: {"description": "The cfg.", "content": {"application/json": {"schema": {"type": "object"}}}},
        **error_responses(404, 503),
    },
)
async def get_dictionary_config(
    dictionary_id: str, components: ServerComponents, caller: Intervener
) -> Response:
    """The `cfg.json` that was uploaded."""
    cfg = await components.dictionaries.content(dictionary_id, caller.tenant)
    return Response(cfg, media_type="application/json", headers={"Cache-Control": "private, no-store"})


@router.get(
    "/{dictionary_id}/features",
    summary="List or search the features of a dictionary",
    responses=error_responses(400, 404, 422, 429, 503),
)
async def list_features(
    dictionary_id: str,
    components: ServerComponents,
    caller: Intervener,
    query: _Words = "",
    id: _FeatureQuery = None,
    after: _AfterFeature = -1,
    limit: PageLimit = 20,
) -> FeatureList:
    """Features with a label, by id; pass a page's `last_id` as `after` for the next."""
    return await components.dictionaries.features(
        dictionary_id, caller.tenant, query=query, feature=id, after=after, limit=limit
    )


@router.put(
    "/{dictionary_id}/labels",
    summary="Replace the labels of a dictionary's features",
    openapi_extra=_LABELS,
    responses=error_responses(400, 404, 408, 413, 422, 503),
)
async def put_labels(
    request: Request, dictionary_id: str, components: ServerComponents, caller: Intervener
) -> Dictionary:
    """Labels by id, as JSON or CSV. Those of shared dictionaries need the scope `admin`."""
    return await components.dictionaries.set_labels(request, dictionary_id, caller)
