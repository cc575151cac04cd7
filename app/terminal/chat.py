"""``nnsight-engine chat``: a conversation, steered or not.

Ctrl-C cancels an answer, Ctrl-D ends the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Final

from rich.console import Console

from app.terminal.server import JsonObject, Server
from app.terminal.text_display import plain
from nnsight_engine.remote_backend.errors import RemoteError

HELP: Final = """\
/help   this list
/reset  start a new conversation
Ctrl-C  cancel the current answer; its text so far stays in the conversation
Ctrl-D  end the conversation"""


class Chat:
    """A conversation with one server.

    Args:
        connect: Opens connections to the server, anew for each answer.
        options: The fields of every request beside the messages.
        console: Prints the answers.
    """

    def __init__(self, connect: Callable[[], Server], options: JsonObject, console: Console) -> None:
        self.messages: list[JsonObject] = []
        self._connect = connect
        self._options = options
        self._console = console
        self._notes = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Read and answer messages until the end of input."""
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
        if text == "/reset":
            self.messages.clear()
            self._notes.print("A new conversation begins.", style="dim")
        elif text == "/help":
            self._notes.print(HELP, markup=False)
        elif text.startswith("/"):
            self._notes.print(f"There is no command {plain(text)}.\n{HELP}", markup=False)
        elif text:
            self._answer(text)

    def _answer(self, text: str) -> None:
        """Stream the answer; append question and answer to the conversation unless it is empty."""
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            asyncio.run(self._stream(messages, pieces))
        except KeyboardInterrupt:
            self._notes.print("\nThe answer was cancelled.", style="dim")
        except RemoteError as error:
            self._notes.print(f"\nnnsight-engine: {plain(str(error))}", markup=False, soft_wrap=True)
            return
        if pieces:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    async def _stream(self, messages: list[JsonObject], pieces: list[str]) -> None:
        body = {**self._options, "messages": messages}
        waiting = self._notes.status("Thinking")
        async with self._connect() as server:
            waiting.start()
            try:
                async with contextlib.aclosing(server.texts("/v1/chat/completions", body)) as texts:
                    async for text in texts:
                        waiting.stop()
                        pieces.append(text)
                        self._console.out(plain(text), end="", highlight=False)
            finally:
                waiting.stop()
        self._console.out("")


__all__ = ["HELP", "Chat"]
