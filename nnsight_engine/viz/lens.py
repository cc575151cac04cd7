"""The logit lens as a heat map: layers up, tokens across, the most likely next token in each cell.

The method is from nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from pydantic import ValidationError

from api_schemas.results import LogitLensResult
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.viz.drawing import draw_cells, figure_of, place, write_cells
from nnsight_engine.viz.numbers import Array, VizError, as_json, labels, numbers, result_kind, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nnsight_engine.core.token_texts import Tokenizer


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
    columns = [shown(one) for one in labels(tokens, positions, "tokens")]
    height, width = chances.shape
    size = min(3 + 0.75 * width, 24), min(1.6 + 0.28 * height, 18)
    ax = place(ax, width=size[0], height=size[1], label=_LABEL, columns=columns)
    image = draw_cells(ax, chances, rows=rows, columns=columns, limits=(0, 1), cmap="viridis", is_rising=True)
    write_cells(ax, image, chances, texts)
    ax.set_xlabel("token")
    ax.set_ylabel("layer")
    figure = figure_of(ax)
    figure.colorbar(image, ax=ax, label=_LABEL)
    return figure


_Read = tuple[list[str], list[int], list[list[str]], Array]


def _of_result(value: Any) -> _Read:
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
    logits = numbers(value, dimensions=3, shape="[layers, tokens, vocabulary]")
    if decode is None:
        raise VizError("logits have no texts: give `decode`, such as model.tokenizer")
    best = logits.argmax(-1)
    shifted = logits - logits.max(-1, keepdims=True)
    chances = 1 / np.exp(shifted).sum(-1)
    # A tokenizer is callable too, but takes texts.
    to_text = _texts(decode)
    texts = {int(one): shown(str(to_text(int(one)))) for one in np.unique(best)}
    num_layers, num_tokens = best.shape
    return (
        [str(layer) for layer in range(num_layers)],
        list(range(num_tokens)),
        [[texts[int(one)] for one in row] for row in best],
        chances,
    )
