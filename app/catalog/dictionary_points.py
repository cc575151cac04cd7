"""The points of a dictionary: those of the hook that its cfg names, or those that the upload gives."""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.points import Point, PointPattern
from api_schemas.server import Capabilities, PointCapability
from app.catalog.rows import LAYER_PREFIX, points_of
from nnsight_engine.features.saelens import SaeLensConfig, point_of


def points_of_dictionary(
    sae_config: SaeLensConfig, at: str | None, output_at: str | None, capabilities: Capabilities
) -> tuple[str, str | None]:
    """Return the points that a dictionary reads and that a transcoder writes, None for others.

    ``at`` and ``output_at`` are the points that the upload gives; None for those of the cfg's hooks.

    Raises:
        ApiError: ``invalid_dictionary``, ``unknown_point``, ``unknown_layer``, ``wrong_width``.
    """
    config = sae_config.config
    point = _checked_point(at, sae_config.hook, "hook_name", "at", config.input_width, capabilities)
    if config.architecture.is_transcoder:
        return point, _checked_point(
            output_at, sae_config.output_hook, "hook_name_out", "output_at", config.output_width, capabilities
        )
    if output_at is not None:
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"Only a transcoder has a second point, and this is of the architecture {config.architecture}; "
            "leave `output_at` out.",
            "output_at",
        )
    return point, None


def _capability_of(capabilities: Capabilities, point: Point) -> PointCapability | None:
    return next(
        (
            capability
            for capability in capabilities.points
            if capability.name == f"{LAYER_PREFIX}{point.leaf}"
            and (capability.layers is None or point.layer in capability.layers)
        ),
        None,
    )


def _checked_point(
    chosen: str | None, hook: str, field: str, param: str, width: int, capabilities: Capabilities
) -> str:
    """Return ``chosen``, or the point of the cfg's hook, checked; ``field`` is the cfg's, for messages."""
    text = chosen if chosen is not None else point_of(hook, capabilities.architecture)
    if text is None:
        named = f"is {clip(hook)!r}, which is no point of this model" if hook else "is missing"
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"The cfg's `{field}` {named}: give the point as `{param}`, such as layers.8.output.",
            param,
        )
    points = points_of(text, capabilities.sizes.num_layers, param)
    if len(points) != 1:
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"A dictionary belongs to one point, and {clip(text)!r} are {len(points)}.",
            param,
        )
    (point,) = points
    capability = _capability_of(capabilities, point)
    if capability is None or "steer" not in capability.operations:
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"This model has no point {point} that a dictionary could belong to; GET /v1/capabilities lists "
            "its points.",
            param,
        )
    if capability.width != width:
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"The values at {point} have {capability.width} numbers, and those of the dictionary {width}.",
            param,
        )
    return str(point)


def width_at(point_name: str, capabilities: Capabilities) -> int | None:
    """Return the width of the values at a point; None if the served model has no such point."""
    try:
        (point,) = PointPattern.parse(point_name, "at").resolve(capabilities.sizes.num_layers, "at")
    except ApiError:  # the model has fewer layers than the one that it was stored for
        return None
    capability = _capability_of(capabilities, point)
    return None if capability is None else capability.width
