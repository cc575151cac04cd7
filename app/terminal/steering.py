"""``nnsight-engine steer``: the model's text without and with a vector, streamed side by side."""

from __future__ import annotations

import dataclasses
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from app.terminal.server import JsonObject, Server
from app.terminal.text_display import MARK, plain, with_differences

_SIDE_BY_SIDE: Final = 72
"""The minimum number of terminal columns for two texts side by side."""


@dataclasses.dataclass(slots=True)
class Steering:
    vector: str = ""
    layers: list[str] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    mode: str = "add"
    preset: str = ""

    def __str__(self) -> str:
        parts = [f"{self.vector} × {self.scale:g} at {', '.join(self.layers)}"] if self.vector else []
        return " and ".join([*parts, *([f"the preset {self.preset}"] if self.preset else [])])

    @property
    def fields(self) -> JsonObject:
        """The fields of a request that steer it, empty if nothing does."""
        fields: JsonObject = {}
        if self.vector:
            fields["interventions"] = [
                {
                    "op": "steer",
                    "at": [f"layers.{layer}.output" for layer in self.layers],
                    "vector": {"name": self.vector},
                    "scale": self.scale,
                    "mode": self.mode,
                }
            ]
        return {**fields, "preset": self.preset} if self.preset else fields


@dataclasses.dataclass(frozen=True, slots=True)
class SteeringRequest:
    """``history`` has a conversation's earlier messages; None for a text that the model continues."""

    prompt: str
    options: JsonObject
    steering: JsonObject
    history: list[JsonObject] | None = None

    @property
    def path(self) -> str:
        return "/v1/completions" if self.history is None else "/v1/chat/completions"

    def body(self, *, steered: bool) -> JsonObject:
        message: JsonObject = {"prompt": self.prompt}
        if self.history is not None:
            message = {"messages": [*self.history, {"role": "user", "content": self.prompt}]}
        return {**message, **self.options, **(self.steering if steered else {})}


class Comparison:
    """The two texts as received so far; rendered anew at every refresh of the screen."""

    def __init__(self, request: SteeringRequest, title: str) -> None:
        self.texts = ["", ""]
        self.done = [False, False]
        self._prefix = plain(request.prompt) if request.history is None else ""
        self._titles = ("baseline", title)
        self._marked: dict[tuple[str, str, bool], tuple[Text, Text]] = {}

    def draw(self, width: int) -> RenderableType:
        panels = [self._panel(number, text) for number, text in enumerate(self._with_differences())]
        if width < _SIDE_BY_SIDE:
            return Group(*panels)
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        return grid

    def summary(self) -> str:
        if self.texts[0] == self.texts[1]:
            return "Both are the same."
        if any(span.style == MARK for text in self._with_differences() for span in text.spans):
            return "What differs is marked."
        return "They differ only in whitespace or control characters, which are not marked."

    def _with_differences(self) -> tuple[Text, Text]:
        """Return both texts with their differences marked, compared only when they have changed."""
        baseline, steered = self.texts
        state = baseline, steered, all(self.done)
        if state not in self._marked:
            self._marked = {state: with_differences(baseline, steered, is_done=state[2])}
        return self._marked[state]

    def _panel(self, number: int, text: Text) -> Panel:
        content = Text(self._prefix, style="dim") + text
        parts: list[RenderableType] = [content]
        if not self.done[number]:
            parts.append(Spinner("dots"))
        return Panel(Group(*parts), title=Text(self._titles[number]), title_align="left")


async def steer(server: Server, request: SteeringRequest, title: str, console: Console) -> str:
    """Request both texts, show them as they arrive, and return the steered one.

    One after the other: in one batch, rounding can change a greedy text.
    """
    comparison = Comparison(request, title)

    async def follow(number: int, body: JsonObject) -> None:
        async for text in server.texts(request.path, body):
            comparison.texts[number] += text
        comparison.done[number] = True

    with Live(get_renderable=lambda: comparison.draw(console.width), console=console, transient=True):
        for number, is_steered in enumerate((False, True)):
            await follow(number, request.body(steered=is_steered))
    console.print(comparison.draw(console.width))
    console.print(comparison.summary())
    return comparison.texts[1]
