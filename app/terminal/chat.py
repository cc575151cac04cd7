"""``nnsight-engine chat``: a conversation, steered or not.

Ctrl-C cancels an answer, Ctrl-D ends the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from typing import Final

from rich.console import Console

from app.terminal.server import JsonObject, Server
from app.terminal.steering import Steering, SteeringRequest, steer
from app.terminal.stored import best_layer
from app.terminal.text_display import plain
from nnsight_engine.remote_backend.errors import RemoteError

HELP: Final = """\
/help                 this list
/vector NAME [LAYER]  steer with a stored vector, by default at its best layer; without NAME, with none
/scale NUMBER         the strength of the vector
/preset NAME          use a stored preset; without NAME, none
/compare              show each answer beside the baseline, or stop that
/reset                start a new conversation
Ctrl-C                cancel the current answer; its text so far stays in the conversation
Ctrl-D                end the conversation"""


class Chat:
    """A conversation with one server; connections are opened anew for each answer."""

    def __init__(
        self, connect: Callable[[], Server], options: JsonObject, steering: Steering, console: Console
    ) -> None:
        self.messages: list[JsonObject] = []
        self._connect = connect
        self._options = options
        self._steering = steering
        self._compares = False
        self._console = console
        self._notes = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Read lines and answer them until the end of the input."""
        if sys.stdin.isatty():
            self._notes.print("/help lists the commands; Ctrl-D ends the conversation.", style="dim")
            with contextlib.suppress(ImportError):  # enables line editing and history
                importlib.import_module("readline")
        while True:
            try:
                text = input("you: " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._notes.print("\nCtrl-D ends the conversation.", style="dim")
                continue
            self._send_message(text)

    def _send_message(self, text: str) -> None:
        if not text.startswith("/"):
            if text:
                self._answer(text)
            return
        command, *arguments = text.split()
        try:
            self._notes.print(self._command(command, arguments), markup=False, style="dim")
        except (RemoteError, ValueError) as error:
            self._notes.print(f"nnsight-engine: {plain(str(error))}", markup=False, soft_wrap=True)

    def _command(self, command: str, arguments: list[str]) -> str:
        """Do what a command says, and return what is printed; raises RemoteError, ValueError."""
        match command, arguments:
            case "/help", []:
                return HELP
            case "/reset", []:
                self.messages.clear()
                return "A new conversation begins."
            case "/vector", [] | [_] | [_, _]:
                layer = arguments[1:] or [asyncio.run(self._best_layer(vector)) for vector in arguments]
                self._steering.vector, self._steering.layers = "".join(arguments[:1]), layer
            case "/scale", [number]:
                self._steering.scale = _number(number)
            case "/preset", [] | [_]:
                self._steering.preset = "".join(arguments)
            case "/compare", []:
                self._compares = not self._compares
                return f"Answers are {'shown beside' if self._compares else 'shown without'} the baseline."
            case _:
                return f"There is no command {plain(' '.join([command, *arguments]))}.\n{HELP}"
        return f"Answers are steered by {self._steering}." if str(self._steering) else "Nothing steers."

    async def _best_layer(self, vector: str) -> str:
        async with self._connect() as server:
            return await best_layer(server, vector)

    def _answer(self, text: str) -> None:
        """Stream the answer; append question and answer to the conversation unless it is empty."""
        request = SteeringRequest(text, self._options, self._steering.fields, self.messages)
        pieces: list[str] = []
        try:
            asyncio.run(self._stream(request, pieces))
        except KeyboardInterrupt:
            self._notes.print("\nThe answer was cancelled.", style="dim")
        except RemoteError as error:
            self._notes.print(f"\nnnsight-engine: {plain(str(error))}", markup=False, soft_wrap=True)
            return
        if pieces:
            messages = request.body(steered=False)["messages"]
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    async def _stream(self, request: SteeringRequest, pieces: list[str]) -> None:
        """Print an answer as it arrives, and add its texts to ``pieces``, which remain if it is cancelled."""
        if self._compares and request.steering:
            async with self._connect() as server:
                pieces.append(await steer(server, request, str(self._steering), self._console))
            return
        waiting = self._notes.status("Thinking")
        async with self._connect() as server:
            waiting.start()
            try:
                body = request.body(steered=True)
                async with contextlib.aclosing(server.texts(request.path, body)) as texts:
                    async for text in texts:
                        waiting.stop()
                        pieces.append(text)
                        self._console.out(plain(text), end="", highlight=False)
            finally:
                waiting.stop()
        self._console.out("")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"/scale needs a number, got {text!r}")
    return number
