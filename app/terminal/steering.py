"""``nnsight-engine steer``: what the model writes without and with a vector, side by side as it comes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from app.terminal.server import JsonObject, Server
from app.terminal.showing import MARK, plain, with_differences

_SIDE_BY_SIDE: Final = 72
"""Columns of a terminal that has room for two texts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a model is to write.

    Attributes:
        prompt: The text, or what a person says in a chat.
        is_chat: Which of the two.
        options: Sampling options of the request.
        steers: The operations that steer.
    """

    prompt: str
    is_chat: bool
    options: JsonObject
    steers: list[JsonObject]

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, *, steered: bool) -> JsonObject:
        """Return the request, with or without the steering."""
        given: JsonObject = {"prompt": self.prompt}
        if self.is_chat:
            given = {"messages": [{"role": "user", "content": self.prompt}]}
        return {**given, **self.options, **({"interventions": self.steers} if steered else {})}


class Comparison:
    """Two texts as far as they have come; drawn anew whenever the screen is."""

    def __init__(self, asked: Asked, title: str) -> None:
        """Begin with nothing."""
        self.texts = ["", ""]
        self.done = [False, False]
        self._prefix = "" if asked.is_chat else plain(asked.prompt)
        self._titles = ("baseline", title)
        self._marked: dict[tuple[str, str, bool], tuple[Text, Text]] = {}

    def draw(self, width: int) -> RenderableType:
        """Return both texts for a terminal of this many columns."""
        panels = [self._panel(number, text) for number, text in enumerate(self._with_differences())]
        if width < _SIDE_BY_SIDE:
            return Group(*panels)
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        return grid

    def summary(self) -> str:
        """Say in a sentence how the texts differ, once they are complete."""
        if self.texts[0] == self.texts[1]:
            return "Both are the same."
        if any(span.style == MARK for text in self._with_differences() for span in text.spans):
            return "What differs is marked."
        return "They differ only in whitespace or control characters, which are not marked."

    def _with_differences(self) -> tuple[Text, Text]:
        """Return both texts with marks; they are compared only when one has changed."""
        baseline, steered = self.texts
        state = baseline, steered, all(self.done)
        if state not in self._marked:
            self._marked = {state: with_differences(baseline, steered, is_done=state[2])}
        return self._marked[state]

    def _panel(self, number: int, text: Text) -> Panel:
        shown = Text(self._prefix, style="dim") + text
        parts: list[RenderableType] = [shown]
        if not self.done[number]:
            parts.append(Spinner("dots"))
        return Panel(Group(*parts), title=Text(self._titles[number]), title_align="left")


async def steer(server: Server, asked: Asked, title: str, console: Console) -> None:
    """Ask for both texts at the same time, and show them as they come.

    Raises:
        RemoteError: The server refuses one, or breaks off.
    """
    shown = Comparison(asked, title)

    async def follow(number: int, body: JsonObject) -> None:
        async for text in server.texts(asked.path, body):
            shown.texts[number] += text
        shown.done[number] = True

    with Live(get_renderable=lambda: shown.draw(console.width), console=console, transient=True):
        async with asyncio.TaskGroup() as group:
            for number, is_steered in enumerate((False, True)):
                group.create_task(follow(number, asked.body(steered=is_steered)))
    console.print(shown.draw(console.width))
    console.print(shown.summary())


__all__ = ["Asked", "Comparison", "steer"]
