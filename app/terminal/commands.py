"""The command line of ``chat | lens | steer | run-batch``: options and the handling of errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console

from app.command_error import CommandError
from app.settings import ClientSettings
from app.terminal.batch import CONCURRENCY, Batch
from app.terminal.chat import Chat
from app.terminal.lens import lens as show_lens
from app.terminal.own_server import own_server
from app.terminal.server import JsonObject, Server
from app.terminal.steering import SteeringRequest
from app.terminal.steering import steer as show_steered
from app.terminal.text_display import plain
from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.errors import RemoteError

_NO_KEY: Final = frozenset({"missing_api_key", "invalid_api_key"})

COMMANDS: Final = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Use a running server. If it requires a key, set NNSIGHT_ENGINE_KEY.",
)


class Mode(StrEnum):
    """The effect of steering on a value, see docs/interventions.md."""

    ADD = "add"
    NORM_MATCH = "norm_match"
    PROJECT_OUT = "project_out"
    CLAMP = "clamp"
    REPLACE = "replace"


_Prompt = Annotated[str, typer.Argument(help="The text that the model continues.")]
_Url = Annotated[
    str | None, typer.Option(metavar="URL", help="The server's address, like http://127.0.0.1:8000.")
]
_Vector = Annotated[
    str, typer.Option(metavar="NAME", help="A vector stored on the server, `joy` or `joy@2`.")
]
_OptionalVector = Annotated[
    str | None, typer.Option(metavar="NAME", help="Steer with a vector stored on the server.")
]
_LAYER: Final = typer.Option("--layer", metavar="LAYERS", help="12, 8:20 or *; may be given several times.")
_Layers = Annotated[list[str], _LAYER]
_OptionalLayers = Annotated[list[str] | None, _LAYER]
_Scale = Annotated[float, typer.Option(metavar="NUMBER", help="The strength.")]
_Mode = Annotated[Mode, typer.Option(help="The effect of the vector on the value.")]
_MaxTokens = Annotated[int, typer.Option(metavar="NUMBER", help="The maximum number of generated tokens.")]
_OptionalMaxTokens = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="The maximum number of tokens of an answer.")
]
_OptionalTemperature = Annotated[
    float | None, typer.Option(metavar="NUMBER", help="0 selects the most likely token each time.")
]


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Raise CommandError for the errors of requests."""
    try:
        yield
    except (RemoteError, ValueError) as error:
        raise CommandError(_message(error)) from error
    except ExceptionGroup as group:  # of two concurrent requests; the first error is reported
        raise CommandError(_message(group.exceptions[0])) from group


def _message(error: Exception) -> str:
    message = plain(str(error))
    if isinstance(error, RemoteError) and error.code in _NO_KEY:
        message += " Set the key as NNSIGHT_ENGINE_KEY, or as CONFIG.API.KEY."
    return message


def _server(url: str | None) -> Server:
    """Return the server from the option, the environment variable or the library's configuration."""
    try:
        settings = ClientSettings()
    except ValidationError as error:
        raise typer.BadParameter(str(error)) from error
    key = settings.key.get_secret_value() if settings.key is not None else CONFIG.API.KEY
    with _reported():
        return Server(url or settings.url or CONFIG.API.HOST, key)


def _steer(vector: str, layers: list[str], scale: float, mode: Mode) -> JsonObject:
    points = [f"layers.{layer}.output" for layer in layers]
    return {"op": "steer", "at": points, "vector": {"name": vector}, "scale": scale, "mode": mode.value}


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that were given on the command line: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _wait(server: Server, work: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine, and close its connections."""

    async def working() -> None:
        async with server:
            await work

    with _reported():
        asyncio.run(working())


@COMMANDS.command()
def chat(
    vector: _OptionalVector = None,
    layer: _OptionalLayers = None,
    scale: _Scale = 1.0,
    mode: _Mode = Mode.ADD,
    max_tokens: _OptionalMaxTokens = None,
    temperature: _OptionalTemperature = None,
    url: _Url = None,
) -> None:
    """Chat with the model, steered or not; /help lists the commands."""
    if (vector is None) != (not layer):
        raise typer.BadParameter("--vector and --layer must be given together")
    options = given_options(max_tokens=max_tokens, temperature=temperature)
    if vector is not None and layer:
        options["interventions"] = [_steer(vector, layer, scale, mode)]
    _server(url)  # reports an invalid address before the first question
    with _reported():
        Chat(lambda: _server(url), options, Console(highlight=False)).run()


@COMMANDS.command()
def lens(
    prompt: _Prompt,
    layers: Annotated[str, typer.Option(metavar="LAYERS", help="all, 12, 3:9 or -4:")] = "all",
    show_all: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--all", help="Show every token, in several tables.")
    ] = False,
    url: _Url = None,
) -> None:
    """Show the logit lens: what each layer would predict after each token."""
    server = _server(url)
    _wait(server, show_lens(server, prompt, layers, Console(highlight=False), show_all=show_all))


@COMMANDS.command()
def steer(
    prompt: _Prompt,
    vector: _Vector,
    layer: _Layers,
    scale: _Scale = 1.0,
    mode: _Mode = Mode.ADD,
    max_tokens: _MaxTokens = 60,
    is_chat: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--chat", help="PROMPT is a user's message, not a text to continue.")
    ] = False,
    url: _Url = None,
) -> None:
    """Show the model's text without and with a vector, side by side, with differences marked."""
    # Greedy decoding, so that differences are caused by the steering, not by sampling.
    options: JsonObject = {"max_tokens": max_tokens, "temperature": 0}
    request = SteeringRequest(prompt, is_chat, options, [_steer(vector, layer, scale, mode)])
    title = f"{vector} × {scale:g} at {', '.join(layer)}"
    server = _server(url)
    _wait(server, show_steered(server, request, title, Console(highlight=False)))


@COMMANDS.command(
    options_metavar="-i FILE -o FILE [MODEL] [OPTIONS] [VLLM OPTIONS]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_batch(
    context: typer.Context,
    *,
    source: Annotated[
        Path,
        typer.Option(
            "-i", "--input-file", metavar="FILE", exists=True, dir_okay=False, help="A request on each line."
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "-o", "--output-file", metavar="FILE", dir_okay=False, help="The answers, in the same order."
        ),
    ],
    concurrency: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Requests under way at once.")
    ] = CONCURRENCY,
    url: _Url = None,
) -> None:
    """Answer the requests of a file, in the format of OpenAI's batches; bodies may have interventions.

    Without --url a server is started for the run, with MODEL and options as for serve.
    """
    if url is not None and context.args:
        raise typer.BadParameter(f"a server at --url takes no model or options, got {context.args[0]!r}")
    console = Console(stderr=True, highlight=False)
    with _reported():
        batch = Batch(source, target, concurrency)

    async def run() -> None:
        async with _server(url) if url is not None else own_server(context.args) as server:
            await batch.run(server, console)

    with _reported():
        asyncio.run(run())
    if batch.num_failed:
        raise CommandError(f"{batch.num_failed} of {batch.num_requests} requests failed; {target} has why")


__all__ = ["COMMANDS", "given_options"]
