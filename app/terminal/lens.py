"""``nnsight-engine lens``: the logit lens of every token of a prompt, as a coloured table.

A cell has the most likely token and its probability. The columns are the prompt's last tokens, as many as fit
the terminal's width, or all of them, split into several tables.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pydantic import ValidationError
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from api_schemas.results import LensToken, LogitLensResult
from app.terminal.server import JsonObject, Server
from app.terminal.text_display import visible
from nnsight_engine.remote_backend.errors import RemoteError

_NAME: Final = "lens"
_CELL: Final = 12
_GAP: Final = 1
_LABEL: Final = 6
_PERCENT: Final = 4
_COLD, _HOT = (24, 28, 38), (20, 150, 130)
_LIGHT_TEXT: Final = Color.from_rgb(245, 245, 245)
_DIM_TEXT: Final = Color.from_rgb(170, 175, 185)


async def lens(server: Server, prompt: str, layers: str, console: Console, *, show_all: bool) -> None:
    """Request the lens at every token of ``prompt`` and print it.

    Raises:
        RemoteError: The server refuses a request, or is not an NNsight Engine.
    """
    # On standard error, so that redirected output contains only the table.
    with Console(stderr=True).status("Reading the lens"):
        try:
            tokens, result = await _tokens(server, prompt), await _lens(server, prompt, layers)
        except (KeyError, IndexError, TypeError, ValidationError) as error:
            raise RemoteError(f"{server.url} answered without a lens; is it an NNsight Engine?") from error
    if result.tensors:
        raise RemoteError("The prompt is too long to print its lens; choose fewer layers.")
    print_lens(result, tokens, console, show_all=show_all)


async def _tokens(server: Server, prompt: str) -> list[str]:
    answer = await server.post("/v1/tokenize", {"prompt": prompt})
    return [str(token["text"]) for token in answer["tokens"]]


async def _lens(server: Server, prompt: str, layers: str) -> LogitLensResult:
    chosen: Any = [int(layers)] if layers.lstrip("-").isdecimal() else layers
    operation: JsonObject = {"op": "logit_lens", "layers": chosen, "top_k": 1, "name": _NAME}
    answer = await server.post(
        "/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "interventions": [operation | {"where": {"phase": "prompt"}}],
        },
    )
    found = answer["choices"][0]["interventions"]["results"][_NAME]
    return LogitLensResult.model_validate(found)


def print_lens(result: LogitLensResult, tokens: list[str], console: Console, *, show_all: bool) -> None:
    """Print a lens, the last layer at the top, for a terminal of the console's width.

    Args:
        result: By layer, a row for each position.
        tokens: The tokens of the prompt.
        console: The output.
        show_all: Whether tokens beyond the width follow in further tables.
    """
    room = max(1, (console.width - _LABEL) // (_CELL + _GAP))
    columns = list(range(len(result.positions)))
    groups = [columns[start : start + room] for start in range(0, len(columns), room)]
    if not show_all:
        groups = [columns[-room:]]
    for group in groups:
        console.print(_table(result, tokens, group))
    if not show_all and len(columns) > room:
        console.print(
            f"The last {room} of {len(columns)} tokens; --all shows every one, a wider window more.",
            style="dim",
        )


def _table(result: LogitLensResult, tokens: list[str], columns: list[int]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("layer", width=_LABEL - _GAP, justify="right", style="dim", no_wrap=True)
    for column in columns:
        position = result.positions[column]
        token = tokens[position] if position < len(tokens) else str(position)
        table.add_column(Text(visible(token), "bold"), width=_CELL, no_wrap=True, overflow="ellipsis")
    for layer in sorted(result.layers, key=int, reverse=True):
        rows = result.layers[layer]
        table.add_row(layer, *(_cell(rows[column].top[0]) for column in columns))
    return table


def _cell(token: LensToken) -> Text:
    if token.logprob is None:
        return Text(f"{visible(token.token)} ?", "dim")
    probability = math.exp(min(token.logprob, 0.0))
    text = Text(visible(token.token))
    text.truncate(_CELL - _PERCENT - 1, overflow="ellipsis", pad=True)
    text.append(f" {probability:>{_PERCENT}.0%}")
    text.stylize(heat(probability))
    return text


def heat(probability: float) -> Style:
    """Return a cell's style: the higher the probability, the brighter the background."""
    ground = [round(cold + (hot - cold) * probability**0.5) for cold, hot in zip(_COLD, _HOT, strict=True)]
    return Style(
        color=_LIGHT_TEXT if probability >= 0.1 else _DIM_TEXT,
        bgcolor=Color.from_rgb(*ground),
        bold=probability >= 0.5,
    )


__all__ = ["heat", "lens", "print_lens"]
