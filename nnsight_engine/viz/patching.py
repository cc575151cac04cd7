"""The effects of patches as a heat map: layers up, positions across (causal tracing, Meng et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nnsight_engine.viz.drawing import draw_cells, figure_of, place
from nnsight_engine.viz.numbers import as_json, labels, numbers, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def patching_map(
    effects: Any,
    *,
    tokens: Sequence[str] | None = None,
    layers: Sequence[Any] | None = None,
    label: str = "effect of the patch",
    ax: Axes | None = None,
) -> Figure:
    """Draw the effect of a patch at each layer and position: red is an increase, blue a decrease, white zero.

    Args:
        effects: Numbers of shape ``[layers, positions]``: a tensor, an array, lists (None stays empty), or a
            tensor object.
        tokens: The text of each column; by default its position.
        layers: The label of each row, from the lowest layer; by default its number.
        label: The meaning of the numbers, for the colour bar.
        ax: Axes to draw into; a new figure by default.

    Returns:
        The figure, whose first axes have the map.

    Raises:
        VizError: The numbers have another shape, or the number of labels is wrong.
    """
    values = numbers(as_json(effects), dimensions=2, shape="[layers, positions]")
    height, width = values.shape
    rows = labels(layers, range(height), "layers")
    columns = [shown(one) for one in labels(tokens, range(width), "tokens")]
    finite = np.abs(values[np.isfinite(values)])
    largest = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    size = min(3 + 0.5 * width, 24), min(1.6 + 0.22 * height, 18)
    ax = place(ax, width=size[0], height=size[1], label=label, columns=columns)
    # Symmetric, so that zero is always white.
    limits = (-largest, largest)
    image = draw_cells(ax, values, rows=rows, columns=columns, limits=limits, cmap="RdBu_r", is_rising=True)
    ax.set_xlabel("position patched")
    ax.set_ylabel("layer patched")
    figure = figure_of(ax)
    figure.colorbar(image, ax=ax, label=label)
    return figure
