"""Plots of attention patterns, one map per head."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nnsight_engine.viz.drawing import Picture, draw_cells, figure_of
from nnsight_engine.viz.numbers import Array, VizError, as_json, labels, numbers, result_kind, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = 4
_SUFFIX: Final = ".attn.pattern"


def attention_maps(
    pattern: Any,
    *,
    tokens: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    layer: int | None = None,
    point: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a layer's attention, one map per head, with queries as rows and keys as columns.

    Args:
        pattern: Probabilities of shape ``[heads, queries, keys]``, or ``[1, heads, queries, keys]`` as in
            ``model.points["layers.3.attn.pattern"]`` for one prompt; or a server's result of a ``capture``
            at such a point, whose tensor is ``[positions, heads, keys]``.
        tokens: The text of each key, from the first; by default its position.
        heads: The heads to draw; all by default.
        layer: The layer, for the titles; by default that of the captured point.
        point: Which of the captured points to draw, if there are several.
        ax: Axes to draw into, for a single head; a new figure by default.

    Returns:
        The figure, with axes for each head, in order.

    Raises:
        VizError: The numbers have another shape, a head does not exist, or ``ax`` is given for several
            heads.
    """
    pattern = as_json(pattern)
    if result_kind(pattern) == "capture":
        values, queries, captured = _of_capture(pattern, point)
        named = re.match(r"layers\.(\d+)\.", captured)
        layer = int(named[1]) if layer is None and named else layer
    else:
        values = numbers(pattern, dimensions=3, shape="[heads, queries, keys]")
        queries = None
    num_heads, num_queries, num_keys = values.shape
    # With fewer queries than keys, as during generation, the queries are the last positions.
    queries = queries or list(range(num_keys - num_queries, num_keys))
    names = [shown(one) for one in labels(tokens, range(num_keys), "tokens")]
    rows = [names[query] if query < num_keys else str(query) for query in queries]
    chosen = _chosen(heads, num_heads)
    if ax is not None and len(chosen) != 1:
        raise VizError(f"`ax` is for a single head, such as heads=[{chosen[0]}]; got {len(chosen)} heads")
    axes = [ax] if ax is not None else _grid(len(chosen), num_keys)
    for head, one in zip(chosen, axes, strict=True):
        image = draw_cells(one, values[head], rows=rows, columns=names, limits=(0, 1), cmap="Blues")
        one.set_title(f"head {head}" if layer is None else f"layer {layer}, head {head}", fontsize=9)
        one.set_xlabel("key", fontsize=8)
        one.set_ylabel("query", fontsize=8)
    figure = figure_of(axes[0])
    figure.colorbar(image, ax=axes, label="attention probability")
    return figure


def _of_capture(result: Any, point: str | None) -> tuple[Array, list[int], str]:
    points: dict[str, Any] = result.get("points") or {}
    found = [point] if point is not None else [name for name in points if name.endswith(_SUFFIX)]
    if len(found) != 1 or found[0] not in points:
        raise VizError(f"`point` must name one attn.pattern of {', '.join(points) or 'none'}; got {point!r}")
    values = numbers(points[found[0]], dimensions=3, shape="[positions, heads, keys]")
    positions = [int(one) for one in result.get("positions") or ()]
    if len(positions) != values.shape[0]:
        raise VizError(f"a capture has one position for each row, got {len(positions)} for {values.shape[0]}")
    return np.moveaxis(values, 1, 0), positions, found[0]


def _chosen(heads: Sequence[int] | None, num_heads: int) -> list[int]:
    chosen = list(range(num_heads)) if heads is None else [int(head) for head in heads]
    wrong = [head for head in chosen if not 0 <= head < num_heads]
    if wrong or not chosen:
        raise VizError(f"heads must be some of 0 to {num_heads - 1}, got {wrong or chosen}")
    return chosen


def _grid(num_maps: int, num_keys: int) -> list[Axes]:
    columns = min(num_maps, _COLUMNS)
    rows = math.ceil(num_maps / columns)
    side = min(1.6 + 0.16 * num_keys, 5.0)
    figure = Picture(figsize=(columns * side + 0.8, rows * side), layout="constrained")
    return [figure.add_subplot(rows, columns, number + 1) for number in range(num_maps)]
