"""The string form of one or several points in a model.

``layers.10.attn.q`` names one point on every architecture; ``layers.*.output`` and ``layers.3:9.output``
(half-open) name several, and ``layers.-1.output`` one counted from the end. Which points a model has is
checked by the engine, not here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from api_schemas.errors import ApiError, ErrorCode, excerpt

VISION: Final = "vision.output"
MODEL_POINTS: Final = ("embed.output", VISION, "norm.output", "logits", "samples")
"""Points of the whole model; every other leaf belongs to a layer."""

ENCODER_BLOCK: Final = "vision.layers.output"
"""The leaf of the output of a vision encoder's block; the layer is written before the last part."""

_PREFIX: Final = "layers."
_ENCODER_PREFIX: Final = "vision.layers."
_MAX_LENGTH: Final = 128
_LEAF: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_INDEX: Final = r"-?(?:0|[1-9][0-9]{0,5})"
_SELECTION: Final = re.compile(rf"\*|(?P<index>{_INDEX})|(?P<start>{_INDEX})?:(?P<stop>{_INDEX})?")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A leaf such as ``attn.q`` with its layer, or a point of the whole model with the layer -1."""

    leaf: str
    layer: int = -1

    def __str__(self) -> str:
        return point_name(self.leaf, self.layer)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSelection:
    """Layers by their string form: ``*``, ``4``, ``-1``, ``3:9``, ``:9``, ``-4:``.

    ``index`` is None for a range; ``start`` and ``stop`` (half-open) are None for the model's first and last.
    """

    text: str
    index: int | None = None
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str, param: str | None = None) -> LayerSelection:
        """Parse the string form; raises ApiError ``unknown_layer`` for any other text."""
        match = _SELECTION.fullmatch(text)
        if match is None:
            raise ApiError(
                ErrorCode.UNKNOWN_LAYER,
                f"Layers are selected by a number such as 4 or -1, by a range such as 3:9, or by *; "
                f"got {excerpt(text)}.",
                param,
            )
        index, start, stop = (
            None if part is None else int(part) for part in match.group("index", "start", "stop")
        )
        return cls(text, index, start, stop)

    def resolve(self, num_layers: int, param: str | None = None) -> range:
        """Return the layers of a model; raises ApiError ``unknown_layer``.

        A range past the end is refused, not shortened: it names layers that do not exist.
        """
        if self.index is not None:
            layer = resolve_layer(self.index, num_layers, param)
            return range(layer, layer + 1)
        start = 0 if self.start is None else self._resolve_bound(self.start, num_layers, param)
        stop = num_layers if self.stop is None else self._resolve_bound(self.stop, num_layers, param)
        if start >= stop:
            raise ApiError(
                ErrorCode.UNKNOWN_LAYER,
                f"A range of layers must name at least one; {self.text} of {num_layers} layers is "
                f"{start} up to and without {stop}.",
                param,
            )
        return range(start, stop)

    def _resolve_bound(self, bound: int, num_layers: int, param: str | None) -> int:
        """Return an end of a range counted from the first layer; the number of layers is one, too."""
        resolved = bound + num_layers if bound < 0 else bound
        if not 0 <= resolved <= num_layers:
            raise ApiError(
                ErrorCode.UNKNOWN_LAYER,
                f"The ends of a range of layers must lie between {-num_layers} and {num_layers}, the number "
                f"of layers; got {bound} in {self.text}.",
                param,
            )
        return resolved


@dataclasses.dataclass(frozen=True, slots=True)
class PointPattern:
    """A point in a request's notation: one leaf and, for a leaf of layers, the selected layers."""

    leaf: str
    layers: LayerSelection | None = None

    @classmethod
    def parse(cls, text: str, param: str | None = None) -> PointPattern:
        """Parse ``logits`` or ``layers.3:9.output``; ApiError ``unknown_point`` or ``unknown_layer``."""
        if len(text) > _MAX_LENGTH:
            raise _unknown_point(text, param)
        prefix = next(
            (candidate for candidate in (_PREFIX, _ENCODER_PREFIX) if text.startswith(candidate)), None
        )
        if prefix is None:
            if text not in MODEL_POINTS:
                raise _unknown_point(text, param)
            return cls(text)
        selection, _, leaf = text[len(prefix) :].partition(".")
        if not leaf:
            raise ApiError(
                ErrorCode.UNKNOWN_POINT,
                f"A layer's point needs a leaf, such as {prefix}3.output; got {excerpt(text)}.",
                param,
            )
        if _LEAF.fullmatch(leaf) is None:
            raise _unknown_point(text, param)
        if prefix == _ENCODER_PREFIX:
            leaf = f"{prefix}{leaf}"
        return cls(leaf, LayerSelection.parse(selection, param))

    def resolve(self, num_layers: int, param: str | None = None) -> tuple[Point, ...]:
        """Return the points in order of layers; raises ApiError ``unknown_layer``."""
        if self.layers is None:
            return (Point(self.leaf),)
        return tuple(Point(self.leaf, layer) for layer in self.layers.resolve(num_layers, param))


def point_name(leaf: str, layer: int | None = None) -> str:
    """Return the string form; a negative layer means the whole model, None all layers."""
    if leaf in MODEL_POINTS or (layer is not None and layer < 0):
        return leaf
    prefix = _ENCODER_PREFIX if leaf.startswith(_ENCODER_PREFIX) else _PREFIX
    return f"{prefix}{'*' if layer is None else layer}.{leaf.removeprefix(_ENCODER_PREFIX)}"


def resolve_layer(layer: int, num_layers: int, param: str | None = None) -> int:
    """Return the layer, negatives counted from the end; ApiError ``unknown_layer`` if there is none."""
    resolved = layer + num_layers if layer < 0 else layer
    if not 0 <= resolved < num_layers:
        raise ApiError(
            ErrorCode.UNKNOWN_LAYER,
            f"A layer of this model must lie between {-num_layers} and {num_layers - 1}, "
            f"got {excerpt(layer)}.",
            param,
        )
    return resolved


def _unknown_point(text: str, param: str | None) -> ApiError:
    return ApiError(
        ErrorCode.UNKNOWN_POINT,
        f"A point is one of {', '.join(MODEL_POINTS)}, or a layer's leaf such as layers.3.output, "
        f"layers.*.attn.q or layers.3:9.mlp.output; got {excerpt(text)}. GET /v1/capabilities lists them.",
        param,
    )
