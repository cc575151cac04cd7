"""``nnsight-engine lens``: the logit lens of every token of a prompt, as a coloured table.

The columns are the prompt's last tokens, as many as fit the terminal's width, or all of them, split into
several tables. Where not all fit, the colours alone show the probabilities, so that twice as many do.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pydantic import ValidationError
from rich.cells import cell_len
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
_TOKEN: Final = 7
"""The most columns of a token."""
_GAP: Final = 1
_LABEL: Final = 6
_PERCENT: Final = 5
"""The columns of a probability, with a space."""
_COLD, _HOT = (24, 28, 38), (20, 150, 130)
_LIGHT_TEXT: Final = Color.from_rgb(245, 245, 245)
_DIM_TEXT: Final = Color.from_rgb(170, 175, 185)


async def lens(server: Server, prompt: str, layers: str, console: Console, *, show_all: bool) -> None:
    """Print the logit lens of a prompt; ``layers`` is a number, a range or ``all``; raises RemoteError."""
    # On standard error, so that redirected output contains only the table.
    with Console(stderr=True).status("Reading the lens"):
        try:
            tokens, result = (
                await _request_tokens(server, prompt),
                await _request_lens(server, prompt, layers),
            )
        except (KeyError, IndexError, TypeError, ValidationError) as error:
            raise RemoteError(f"{server.url} answered without a lens; is it an NNsight Engine?") from error
    if result.tensors:
        raise RemoteError("The prompt is too long to print its lens; choose fewer layers.")
    print_lens(result, tokens, console, show_all=show_all)


async def _request_tokens(server: Server, prompt: str) -> list[str]:
    answer = await server.post("/v1/tokenize", {"prompt": prompt})
    return [str(token["text"]) for token in answer["tokens"]]


async def _request_lens(server: Server, prompt: str, layers: str) -> LogitLensResult:
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
    result = answer["choices"][0]["interventions"]["results"][_NAME]
    return LogitLensResult.model_validate(result)


def print_lens(result: LogitLensResult, tokens: list[str], console: Console, *, show_all: bool) -> None:
    """Print the last tokens that fit the terminal, or all of them in several tables."""
    columns = [_Column(result, tokens, index) for index in range(len(result.positions))]
    room = console.width - _LABEL
    # Without colours the numbers have to stay.
    has_numbers = console.color_system is None or sum(column.width + _PERCENT for column in columns) <= room
    groups = _groups(columns, room, _PERCENT if has_numbers else 0)
    for group in groups if show_all else groups[-1:]:
        console.print(_table(result, group, has_numbers=has_numbers))
    if not show_all and len(groups) > 1:
        console.print(
            f"The last {len(groups[-1])} of {len(columns)} tokens; --all shows every one, "
            "a wider window more.",
            style="dim",
        )


class _Column:
    """The column of one token: its text, the most likely token of each layer, and its width."""

    def __init__(self, result: LogitLensResult, tokens: list[str], index: int) -> None:
        position = result.positions[index]
        self.title = visible(tokens[position] if position < len(tokens) else str(position))
        self.cells = {layer: rows[index].top[0] for layer, rows in result.layers.items()}
        texts = [self.title, *(visible(cell.token) for cell in self.cells.values())]
        self.width = _GAP + min(_TOKEN, max(map(cell_len, texts)))


def _groups(columns: list[_Column], room: int, extra: int) -> list[list[_Column]]:
    """Split the columns into tables that fit ``room``, the last one full; ``extra`` widens each column."""
    groups: list[list[_Column]] = [[]]
    room_left = room
    for column in reversed(columns):
        if column.width + extra > room_left and groups[0]:
            groups.insert(0, [])
            room_left = room
        groups[0].insert(0, column)
        room_left -= column.width + extra
    return groups


def _table(result: LogitLensResult, columns: list[_Column], *, has_numbers: bool) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("layer", width=_LABEL - _GAP, justify="right", style="dim", no_wrap=True)
    extra = _PERCENT if has_numbers else 0
    for column in columns:
        width = column.width - _GAP + extra
        table.add_column(Text(column.title, "bold"), width=width, no_wrap=True, overflow="ellipsis")
    for layer in sorted(result.layers, key=int, reverse=True):
        table.add_row(
            layer,
            *(_cell(column.cells[layer], column.width - _GAP, has_numbers=has_numbers) for column in columns),
        )
    return table


def _cell(token: LensToken, width: int, *, has_numbers: bool) -> Text:
    """Return a token cut to ``width``, coloured by its probability, which follows if ``has_numbers``."""
    if token.logprob is None:
        return Text(f"{visible(token.token)} ?", "dim")
    probability = math.exp(min(token.logprob, 0.0))
    text = Text(visible(token.token))
    text.truncate(width, overflow="ellipsis", pad=True)
    if has_numbers:
        text.append(f"{probability:>{_PERCENT}.0%}")
    text.stylize(heat(probability))
    return text


def heat(probability: float) -> Style:
    """Return the colours of a probability; the square root tells small ones apart."""
    ground = [round(cold + (hot - cold) * probability**0.5) for cold, hot in zip(_COLD, _HOT, strict=True)]
    return Style(
        color=_LIGHT_TEXT if probability >= 0.1 else _DIM_TEXT,
        bgcolor=Color.from_rgb(*ground),
        bold=probability >= 0.5,
    )
