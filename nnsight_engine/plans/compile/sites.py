"""Resolves a request's ``at`` to sites of this model.

No site twice, under any name: an operation acts once at a site, and results are keyed by site.
"""

from __future__ import annotations

from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import excerpt
from api_schemas.points import MODEL_POINTS, LayerSelection, Point, PointPattern, point_name, resolve_layer
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.sites import PlannedSite

_ALL_LAYERS: Final = "all"


def resolve_sites(
    at: str | list[str], operation: str, spec: ModelSpec, param: str
) -> tuple[PlannedSite, ...]:
    """Return the sites in order; raise ``unknown_point``, ``unknown_layer`` or ``unsupported_at_point``."""
    sites: list[PlannedSite] = []
    seen: dict[PlannedSite, PlannedSite] = {}
    texts = [(at, param)] if isinstance(at, str) else [(text, f"{param}.{i}") for i, text in enumerate(at)]
    for text, path in texts:
        pattern = PointPattern.parse(text, path)
        _check_leaf(pattern, text, operation, spec, path)
        for point in _in_layers(pattern, text, spec, path):
            site = PlannedSite(point.leaf, point.layer)
            _refuse_second(site, seen, path)
            sites.append(site)
    return tuple(sites)


def resolve_lens_sites(layers: str | list[int], spec: ModelSpec, param: str) -> tuple[PlannedSite, ...]:
    leaf = spec.leaf("output")
    if leaf is None or "logit_lens" not in leaf.operations:
        raise ApiError(
            ErrorCode.UNSUPPORTED_AT_POINT,
            f"`logit_lens` needs the residual stream and the unembedding, which {spec.name} does not offer; "
            "GET /v1/capabilities lists the operations of each point.",
            param,
        )
    if isinstance(layers, str):
        numbers = (
            range(spec.num_layers)
            if layers == _ALL_LAYERS
            else LayerSelection.parse(layers, param).resolve(spec.num_layers, param)
        )
        return tuple(PlannedSite("output", layer) for layer in numbers)
    seen: dict[PlannedSite, PlannedSite] = {}
    for index, layer in enumerate(layers):
        path = f"{param}.{index}"
        _refuse_second(PlannedSite("output", resolve_layer(layer, spec.num_layers, path)), seen, path)
    return tuple(seen.values())


def leaf_of(site: PlannedSite, spec: ModelSpec) -> LeafSpec:
    leaf = spec.leaf(site.leaf, site.layer)
    if leaf is None:
        raise ApiError(ErrorCode.UNKNOWN_POINT, f"{spec.name} has no point {site}.")
    return leaf


def _in_layers(pattern: PointPattern, text: str, spec: ModelSpec, param: str) -> list[Point]:
    """Return the points of a pattern, in those of its layers that have the leaf; raises if none has."""
    points = pattern.resolve(spec.num_layers_of(pattern.leaf), param)
    found = [point for point in points if spec.leaf(point.leaf, point.layer) is not None]
    if not found:
        having = ", ".join(str(layer) for layer in spec.layers_of(pattern.leaf))
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"{spec.name} has no point {excerpt(text)}: its blocks differ, and {pattern.leaf} is in layers "
            f"{having}.",
            param,
        )
    return found


def _check_leaf(pattern: PointPattern, text: str, operation: str, spec: ModelSpec, param: str) -> None:
    leaf = spec.leaf(pattern.leaf)
    if leaf is None or (pattern.layers is None) != (pattern.leaf in MODEL_POINTS):
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"{spec.name} has no point {excerpt(text)}; it has "
            f"{', '.join(dict.fromkeys(_form(known) for known in spec.leaves))}.",
            param,
        )
    if operation not in leaf.operations:
        raise ApiError(
            ErrorCode.UNSUPPORTED_AT_POINT,
            f"`{operation}` is not possible at {excerpt(text)}, which takes "
            f"{', '.join(leaf.operations) or 'no operation'}; GET /v1/capabilities lists what each point "
            "takes.",
            param,
        )


def _refuse_second(site: PlannedSite, seen: dict[PlannedSite, PlannedSite], param: str) -> None:
    place = canonical_site(site)
    first = seen.setdefault(place, site)
    if first is not site:
        same = "named twice" if first == site else f"the same place as {first}"
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"One operation may name a place once; {site} is {same}. Use a second operation to act twice.",
            param,
        )


def canonical_site(site: PlannedSite) -> PlannedSite:
    """Return one canonical site for places with two names: a layer's input is the output before it."""
    if site.leaf != "input":
        return site
    return PlannedSite("embed.output") if site.layer == 0 else PlannedSite("output", site.layer - 1)


def _form(leaf: LeafSpec) -> str:
    return point_name(leaf.name)
