"""The result of a sweep: a map for two axes, a curve for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nnsight_engine.viz.drawing import axes_for, figure_of
from nnsight_engine.viz.maps import patching_map
from nnsight_engine.viz.numbers import Array, VizError, as_json, numbers, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Label = int | float | str


def sweep_figure(
    sweep: Any, *, at: Mapping[str, _Label] | None = None, control: bool = False, ax: Axes | None = None
) -> Figure:
    """Draw the result of ``POST /v1/sweeps``: the change of the metric as a map, or the metric as a curve.

    Axes with one label are left out. A map has the first of two axes up and the second across. A curve has
    the run without interventions as a dashed line, unless its axis is the prompts, and the control's curve
    if there is one.

    Args:
        sweep: The sweep, as JSON or as an object.
        at: The label of each axis that is not drawn, such as ``{"head": 3}``.
        control: Whether a map is of the control; curves have both.
        ax: Axes to draw into; a new figure by default.

    Returns:
        The figure, whose first axes have the map or the curves.

    Raises:
        VizError: It is no sweep, has another number of axes than one or two, or no finite metric to compare
            a map with.
    """
    sweep = as_json(sweep)
    if not isinstance(sweep, Mapping) or sweep.get("object") != "sweep":
        raise VizError("the result of a sweep is needed, the JSON that POST /v1/sweeps returns")
    chosen = dict(at or {})
    axes, values, random = _drawn(sweep, chosen)
    prompt = None if "prompt" in axes else int(chosen.get("prompt", 0))
    baselines = [one.get("unsteered") for one in sweep["baselines"]]
    if len(axes) == 1:
        ((name, labels),) = axes.items()
        baseline = baselines[prompt] if prompt is not None and prompt < len(baselines) else None
        return _curve(name, labels, values, random, baseline, str(sweep["metric"]), ax)
    if control and random is None:
        raise VizError("this sweep has no control")
    (rows, columns) = axes
    figure = patching_map(
        _change(random if control and random is not None else values, [*axes], baselines, prompt),
        layers=_texts(sweep, rows, axes[rows], prompt),
        tokens=_texts(sweep, columns, axes[columns], prompt),
        label=f"change of {sweep['metric']}",
        ax=ax,
    )
    drawn = ax or figure.axes[0]
    drawn.set_xlabel(columns)
    drawn.set_ylabel(rows)
    return figure


def _drawn(
    sweep: Mapping[str, Any], chosen: dict[str, _Label]
) -> tuple[dict[str, list[_Label]], Array, Array | None]:
    """Return the axes that are drawn, and the values there of the sweep and of its control."""
    dims, coords = [str(name) for name in sweep["dims"]], sweep["coords"]
    index: list[int | slice] = []
    for name in dims:
        labels = coords[name]
        if name in chosen and chosen[name] not in labels:
            raise VizError(f"{name} is one of {', '.join(map(str, labels))}; got {chosen[name]!r}")
        is_single = name in chosen or len(labels) == 1
        index.append(labels.index(chosen.get(name, labels[0])) if is_single else slice(None))
    unknown = chosen.keys() - {*dims, "prompt"}
    axes = {name: list(coords[name]) for name, one in zip(dims, index, strict=True) if one == slice(None)}
    if unknown or not 1 <= len(axes) <= len(("rows", "columns")):
        raise VizError(
            f"one or two axes can be drawn, and `at` fixes the others by label: this sweep has "
            f"{', '.join(dims) or 'no axis'}; got at={chosen}"
        )
    shape = f"[{', '.join(dims)}]"
    sides = [
        None if one is None else numbers(one, dimensions=len(dims), shape=shape)[tuple(index)]
        for one in (sweep["values"], sweep.get("control"))
    ]
    values, random = sides
    if values is None:
        raise VizError("this sweep has no values")
    return axes, values, random


def _change(values: Array, axes: list[str], baselines: list[float | None], prompt: int | None) -> Array:
    """Subtract the baseline of the prompt, or of each if they are an axis."""
    chosen = baselines if prompt is None else baselines[prompt : prompt + 1]
    if not chosen or None in chosen:
        raise VizError("the metric without interventions is not finite here, so there is no change to draw")
    shape = [-1 if name == "prompt" else 1 for name in axes] if prompt is None else [1, 1]
    return values - np.reshape(np.asarray(chosen, np.float64), shape)


def _texts(sweep: Mapping[str, Any], name: str, labels: list[_Label], prompt: int | None) -> list[str]:
    if name != "position" or prompt is None or prompt >= len(sweep["tokens"]):
        return [str(one) for one in labels]
    tokens = sweep["tokens"][prompt]
    return [f"{one} {shown(tokens[int(one)])}" for one in labels]


def _curve(
    name: str,
    labels: list[_Label],
    values: Array,
    random: Array | None,
    baseline: float | None,
    metric: str,
    ax: Axes | None,
) -> Figure:
    texts = [str(one) for one in labels]
    ax = axes_for(ax, width=6.0, height=3.6, label=metric, columns=texts)
    is_numeric = all(isinstance(one, int | float) for one in labels)
    places = np.asarray(labels if is_numeric else range(len(labels)), np.float64)
    order = np.argsort(places)
    ax.plot(places[order], values[order], marker="o", markersize=3, label="sweep")
    if random is not None:
        ax.plot(places[order], random[order], marker="o", markersize=3, label="random direction")
    if baseline is not None:
        ax.axhline(baseline, linestyle="--", color="grey", linewidth=1, label="without interventions")
    if not is_numeric:
        ax.set_xticks(places, texts, rotation=45, ha="right", fontsize=8)
    ax.set_xlabel(name)
    ax.set_ylabel(metric)
    ax.legend(fontsize=8)
    return figure_of(ax)
