"""Maps: attention patterns of each head, the logit lens, and the effects of patches.

The logit lens has layers up, tokens across, and the most likely next token in each cell (nostalgebraist,
"interpreting GPT: the logit lens", 2020). Patches have layers up, positions across (causal tracing, Meng et
al. 2022).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from pydantic import ValidationError

from api_schemas.results import LogitLensResult
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.viz.drawing import Picture, axes_for, draw_cells, figure_of, write_cells
from nnsight_engine.viz.numbers import Array, VizError, as_json, labels, numbers, result_kind, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nnsight_engine.core.token_texts import Tokenizer

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
        layer_match = re.match(r"layers\.(\d+)\.", captured)
        layer = int(layer_match[1]) if layer is None and layer_match else layer
    else:
        values = numbers(pattern, dimensions=3, shape="[heads, queries, keys]")
        queries = None
    num_heads, num_queries, num_keys = values.shape
    # With fewer queries than keys, as during generation, the queries are the last positions.
    queries = queries or list(range(num_keys - num_queries, num_keys))
    names = [shown(label) for label in labels(tokens, range(num_keys), "tokens")]
    rows = [names[query] if query < num_keys else str(query) for query in queries]
    chosen = _chosen(heads, num_heads)
    if ax is not None and len(chosen) != 1:
        raise VizError(f"`ax` is for a single head, such as heads=[{chosen[0]}]; got {len(chosen)} heads")
    axes = [ax] if ax is not None else _grid(len(chosen), num_keys)
    for head, axis in zip(chosen, axes, strict=True):
        image = draw_cells(axis, values[head], rows=rows, columns=names, limits=(0, 1), cmap="Blues")
        axis.set_title(f"head {head}" if layer is None else f"layer {layer}, head {head}", fontsize=9)
        axis.set_xlabel("key", fontsize=8)
        axis.set_ylabel("query", fontsize=8)
    figure = figure_of(axes[0])
    figure.colorbar(image, ax=axes, label="attention probability")
    return figure


def _of_capture(result: Any, point: str | None) -> tuple[Array, list[int], str]:
    """Return probabilities ``[heads, queries, keys]``, the queries' positions, and the captured point."""
    points: dict[str, Any] = result.get("points") or {}
    captured = [point] if point is not None else [name for name in points if name.endswith(_SUFFIX)]
    if len(captured) != 1 or captured[0] not in points:
        raise VizError(f"`point` must name one attn.pattern of {', '.join(points) or 'none'}; got {point!r}")
    values = numbers(points[captured[0]], dimensions=3, shape="[positions, heads, keys]")
    positions = [int(position) for position in result.get("positions") or ()]
    if len(positions) != values.shape[0]:
        raise VizError(f"a capture has one position for each row, got {len(positions)} for {values.shape[0]}")
    return np.moveaxis(values, 1, 0), positions, captured[0]


def _chosen(heads: Sequence[int] | None, num_heads: int) -> list[int]:
    """Return the numbers of the heads to draw, all by default; VizError if one does not exist."""
    chosen = list(range(num_heads)) if heads is None else [int(head) for head in heads]
    wrong = [head for head in chosen if not 0 <= head < num_heads]
    if wrong or not chosen:
        raise VizError(f"heads must be some of 0 to {num_heads - 1}, got {wrong or chosen}")
    return chosen


def _grid(num_maps: int, num_keys: int) -> list[Axes]:
    """Return the axes of a new figure for that many maps, in rows of at most ``_COLUMNS``."""
    columns = min(num_maps, _COLUMNS)
    rows = math.ceil(num_maps / columns)
    side = min(1.6 + 0.16 * num_keys, 5.0)  # in inches
    figure = Picture(figsize=(columns * side + 0.8, rows * side), layout="constrained")
    return [figure.add_subplot(rows, columns, number + 1) for number in range(num_maps)]


_LABEL: Final = "probability of the most likely next token"


class Decodes(Protocol):
    """A converter of token ids to text: a tokenizer."""

    def decode(self, token_ids: Any, /) -> Any: ...


def lens_map(
    result: Any,
    *,
    tokens: Sequence[str] | None = None,
    layers: Sequence[Any] | None = None,
    decode: Decodes | Callable[[int], str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw each layer's most likely next token after each token, coloured by its probability.

    Args:
        result: A server's result of ``logit_lens``, as JSON or as an object; or logits (or
            log-probabilities) of shape ``[layers, tokens, vocabulary]``, also as a list with one tensor per
            layer.
        tokens: The text of each column; by default its position.
        layers: The label of each row, from the lowest layer; by default its number.
        decode: A tokenizer, or a function that returns the text of an id; required for logits.
        ax: Axes to draw into; a new figure by default.

    Returns:
        The figure, whose first axes have the map.

    Raises:
        VizError: ``result`` is neither, or the number of labels is wrong.
    """
    result = as_json(result)
    if result_kind(result) is None:
        names, positions, texts, chances = _of_logits(result, decode)
    else:
        names, positions, texts, chances = _of_result(result)
    rows = labels(layers, names, "layers")
    columns = [shown(label) for label in labels(tokens, positions, "tokens")]
    height, width = chances.shape
    size = min(3 + 0.75 * width, 24), min(1.6 + 0.28 * height, 18)  # in inches
    ax = axes_for(ax, width=size[0], height=size[1], label=_LABEL, columns=columns)
    image = draw_cells(ax, chances, rows=rows, columns=columns, limits=(0, 1), cmap="viridis", is_rising=True)
    write_cells(ax, image, chances, texts)
    ax.set_xlabel("token")
    ax.set_ylabel("layer")
    figure = figure_of(ax)
    figure.colorbar(image, ax=ax, label=_LABEL)
    return figure


_Read = tuple[list[str], list[int], list[list[str]], Array]
"""Names of layers, positions of tokens; text and probability of the best token, each ``[layers, tokens]``."""


def _of_result(value: Any) -> _Read:
    """Return names of layers, positions, texts and chances (see ``_Read``) from a server's result."""
    try:
        result = LogitLensResult.model_validate(value)
    except ValidationError as error:
        raise VizError(f"this is no result of logit_lens: {error}") from error
    if result.tensors:
        raise VizError("the numbers of this lens are in a file: ask for fewer positions, layers or tokens")
    names = sorted(result.layers, key=int)
    tops = [[row.top[0] if row.top else None for row in result.layers[name]] for name in names]
    if not result.positions or any(len(row) != len(result.positions) for row in tops) or not tops:
        raise VizError(
            "a result of logit_lens has a row for each of its positions in each layer; this lacks some"
        )
    if any(top is None for row in tops for top in row):
        raise VizError(
            "the most likely token is drawn, and this lens has none: ask for it with top_k 1 or more"
        )
    texts = [[shown(top.token) if top else "" for top in row] for row in tops]
    chances = [
        [math.exp(top.logprob) if top and top.logprob is not None else math.nan for top in row]
        for row in tops
    ]
    return names, result.positions, texts, np.asarray(chances)


def _texts(decode: Decodes | Callable[[int], str]) -> Callable[[int], Any]:
    """Return a function from ids to texts; for a complete tokenizer, texts are those that a server shows."""
    if hasattr(decode, "get_vocab"):
        return TokenTexts(cast("Tokenizer", decode)).text
    return cast("Callable[[int], Any]", getattr(decode, "decode", decode))


def _of_logits(value: Any, decode: Decodes | Callable[[int], str] | None) -> _Read:
    """Return names of layers, positions, texts and chances (see ``_Read``) from logits."""
    logits = numbers(value, dimensions=3, shape="[layers, tokens, vocabulary]")
    if decode is None:
        raise VizError("logits have no texts: give `decode`, such as model.tokenizer")
    best = logits.argmax(-1)
    shifted = logits - logits.max(-1, keepdims=True)
    chances = 1 / np.exp(shifted).sum(-1)
    # A tokenizer is callable too, but takes texts.
    to_text = _texts(decode)
    texts = {int(token_id): shown(str(to_text(int(token_id)))) for token_id in np.unique(best)}
    num_layers, num_tokens = best.shape
    return (
        [str(layer) for layer in range(num_layers)],
        list(range(num_tokens)),
        [[texts[int(token_id)] for token_id in row] for row in best],
        chances,
    )


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
    columns = [shown(token_label) for token_label in labels(tokens, range(width), "tokens")]
    finite = np.abs(values[np.isfinite(values)])
    largest = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    size = min(3 + 0.5 * width, 24), min(1.6 + 0.22 * height, 18)  # in inches
    ax = axes_for(ax, width=size[0], height=size[1], label=label, columns=columns)
    # Symmetric, so that zero is always white.
    limits = (-largest, largest)
    image = draw_cells(ax, values, rows=rows, columns=columns, limits=limits, cmap="RdBu_r", is_rising=True)
    ax.set_xlabel("position patched")
    ax.set_ylabel("layer patched")
    figure = figure_of(ax)
    figure.colorbar(image, ax=ax, label=label)
    return figure
