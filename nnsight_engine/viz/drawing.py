"""Heat maps with a colour bar, the basis of all plots; figures are created without pyplot.

pyplot would keep a figure until it is closed, and would make it the user's current figure.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from nnsight_engine.viz.numbers import Array, VizError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":
        raise
    raise ModuleNotFoundError(
        "nnsight_engine.viz draws with matplotlib, which is not installed: pip install 'nnsight-engine[viz]'",
        name=error.name,
    ) from error

_MAX_LABELS: Final = 40
"""Maximum number of ticks on one axis; with more items, only every second or third is labelled."""
_DARK: Final = 0.5
"""The luminance, of 0 to 1, below which a colour gets white text."""
_LETTER_IN: Final = 0.075
"""Width of a letter, in inches."""
_POINTS_PER_INCH: Final = 72
_MIN_TEXT_POINTS: Final = 4
_MAX_TEXT_POINTS: Final = 9


class Picture(Figure):
    """A figure that a notebook shows as a cell's last value, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=110)
        return content.getvalue()


def axes_for(ax: Axes | None, *, width: float, height: float, label: str, columns: Sequence[str]) -> Axes:
    """Return ``ax``, or axes of a new figure of this size (inches), as high as its colour bar's label."""
    if ax is not None:
        return ax
    # The columns' labels are slanted, and below the colour bar.
    letters = len(label) + 0.6 * max(map(len, columns))
    size = width, max(height, _LETTER_IN * letters + 0.8)
    return Picture(figsize=size, layout="constrained").add_subplot()


def figure_of(ax: Axes) -> Figure:
    """Return the figure that ``ax`` is part of; raise VizError if it is not part of one."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise VizError("`ax` must be the axes of a figure, and these were removed from theirs")
    return figure


def draw_cells(
    ax: Axes,
    values: Array,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    cmap: str,
    is_rising: bool = False,
) -> AxesImage:
    """Draw ``values``, ``[rows, columns]``, as coloured cells with a label at each row and column.

    Cells that are NaN stay empty; ``is_rising`` puts the first row at the bottom, as layers are drawn.
    """
    image = ax.imshow(
        values,  # matplotlib leaves NaN empty
        aspect="auto",
        origin="lower" if is_rising else "upper",
        vmin=limits[0],
        vmax=limits[1],
        cmap=cmap,
        interpolation="nearest",
    )
    _label(ax.set_xticks, columns, rotation=45, ha="right", rotation_mode="anchor")
    _label(ax.set_yticks, rows)
    ax.tick_params(length=0)
    return image


def write_cells(ax: Axes, image: AxesImage, values: Array, texts: Sequence[Sequence[str]]) -> None:
    """Write a text into each cell, light on dark colours and dark on light ones."""
    size = _text_size(ax, values)
    for (row, column), value in np.ndenumerate(values):
        text = texts[row][column]
        if text:
            color = _readable_on(image, float(value))
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize=size, clip_on=True)


def _text_size(ax: Axes, values: Array) -> float:
    """Return a font size (points) at which about five letters fit into a cell."""
    box = ax.get_position()
    width, height = figure_of(ax).get_size_inches()
    letter_in = min(width * box.width / values.shape[1] / 5, height * box.height / values.shape[0] / 1.6)
    return float(np.clip(_POINTS_PER_INCH * letter_in, _MIN_TEXT_POINTS, _MAX_TEXT_POINTS))


def _readable_on(image: AxesImage, value: float) -> str:
    """Return a text's colour on a cell, by the luminance of the cell's colour; an empty cell is white."""
    red, green, blue, _ = image.to_rgba(np.array([value]))[0] if np.isfinite(value) else (1, 1, 1, 1)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < _DARK else "black"


def _label(set_ticks: Any, texts: Sequence[str], **style: Any) -> None:
    step = -(-len(texts) // _MAX_LABELS)
    set_ticks(range(0, len(texts), step), list(texts)[::step], fontsize=8, **style)
