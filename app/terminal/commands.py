"""The command line of clients, ``chat``, ``lens`` and so on: options and the handling of errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console

from app.command_error import CommandError
from app.settings import ClientSettings
from app.terminal.batch import CONCURRENCY, Batch
from app.terminal.chat import Chat
from app.terminal.lens import lens as show_lens
from app.terminal.server import JsonObject, Server, own_server
from app.terminal.steering import Steering, SteeringRequest
from app.terminal.steering import steer as show_steered
from app.terminal.stored import KINDS, Kind, add, best_layer, export, show, train
from app.terminal.text_display import plain
from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.errors import RemoteError

T = TypeVar("T")

_NO_KEY: Final = frozenset({"missing_api_key", "invalid_api_key"})

COMMANDS: Final = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Use a running server. If it requires a key, set NNSIGHT_ENGINE_KEY.",
)


class Mode(StrEnum):
    ADD = "add"
    NORM_MATCH = "norm_match"
    PROJECT_OUT = "project_out"
    CLAMP = "clamp"
    REPLACE = "replace"


_PROMPT: Final = typer.Argument(help="The text that the model continues.")
_Url = Annotated[
    str | None, typer.Option(metavar="URL", help="The server's address, like http://127.0.0.1:8000.")
]
_VECTOR: Final = typer.Option(metavar="NAME", help="A vector stored on the server, `joy` or `joy@2`.")
_Layers = Annotated[
    list[str] | None,
    typer.Option(
        "--layer",
        metavar="LAYERS",
        help="12, 8:20 or *; may be given several times. By default the vector's best.",
    ),
]
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
def _reporting_errors() -> Iterator[None]:
    try:
        yield
    except (RemoteError, ValueError) as error:
        raise CommandError(_error_message(error)) from error


def _error_message(error: Exception) -> str:
    """Return the message for the terminal, with where to set a key if the server asks for one."""
    message = plain(str(error))
    if isinstance(error, RemoteError) and error.code in _NO_KEY:
        message += " Set the key as NNSIGHT_ENGINE_KEY, or as CONFIG.API.KEY."
    return message


def _server_at(url: str | None) -> Server:
    """Return the server at an address, or at the one of the settings, with the key of the settings."""
    try:
        settings = ClientSettings()
    except ValidationError as error:
        raise typer.BadParameter(str(error)) from error
    key = settings.key.get_secret_value() if settings.key is not None else CONFIG.API.KEY
    with _reporting_errors():
        return Server(url or settings.url or CONFIG.API.HOST, key)


async def _steering(
    server: Server, vector: str, layers: list[str] | None, scale: float, mode: Mode
) -> Steering:
    """Return the steering by a vector, at its best layer unless ``layers`` names others."""
    return Steering(vector, layers or [await best_layer(server, vector)], scale, mode.value)


def given_options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _run_with_server(server: Server, work: Coroutine[Any, Any, T]) -> T:
    """Await work on a server, and close the connection; raises CommandError for its errors."""

    async def working() -> T:
        async with server:
            return await work

    with _reporting_errors():
        return asyncio.run(working())


@COMMANDS.command()
def chat(
    vector: Annotated[str | None, _VECTOR] = None,
    layer: _Layers = None,
    scale: _Scale = 1.0,
    mode: _Mode = Mode.ADD,
    max_tokens: _OptionalMaxTokens = None,
    temperature: _OptionalTemperature = None,
    url: _Url = None,
) -> None:
    """Chat with the model, steered or not; /help lists the commands."""
    if vector is None and layer:
        raise typer.BadParameter("--layer needs --vector")
    server = _server_at(url)  # reports an invalid address before the first question
    steering = Steering(scale=scale, mode=mode.value)
    if vector is not None:
        steering = _run_with_server(server, _steering(server, vector, layer, scale, mode))
    options = given_options(max_tokens=max_tokens, temperature=temperature)
    with _reporting_errors():
        Chat(lambda: _server_at(url), options, steering, Console(highlight=False)).run()


@COMMANDS.command()
def lens(
    prompt: Annotated[str, _PROMPT],
    layers: Annotated[str, typer.Option(metavar="LAYERS", help="all, 12, 3:9 or -4:")] = "all",
    show_all: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--all", help="Show every token, in several tables.")
    ] = False,
    url: _Url = None,
) -> None:
    """Show the logit lens: what each layer would predict after each token."""
    server = _server_at(url)
    _run_with_server(server, show_lens(server, prompt, layers, Console(highlight=False), show_all=show_all))


@COMMANDS.command()
def steer(
    prompt: Annotated[str, _PROMPT] = "I think dogs are",
    vector: Annotated[str, _VECTOR] = "example-joy",
    layer: _Layers = None,
    scale: _Scale = 1.0,
    mode: _Mode = Mode.ADD,
    max_tokens: _MaxTokens = 60,
    is_chat: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--chat", help="PROMPT is a user's message, not a text to continue.")
    ] = False,
    url: _Url = None,
) -> None:
    """Show the model's text without and with a vector, side by side, with differences marked.

    Without arguments: the example of the bundled model.
    """
    # Greedy decoding, so that differences are caused by the steering, not by sampling.
    options: JsonObject = {"max_tokens": max_tokens, "temperature": 0}
    server = _server_at(url)

    async def run() -> None:
        steering = await _steering(server, vector, layer, scale, mode)
        request = SteeringRequest(prompt, options, steering.fields, [] if is_chat else None)
        await show_steered(server, request, str(steering), Console(highlight=False))

    _run_with_server(server, run())


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
    with _reporting_errors():
        batch = Batch(source, target, concurrency)

    async def run() -> None:
        async with _server_at(url) if url is not None else own_server(context.args) as server:
            await batch.run(server, console)

    with _reporting_errors():
        asyncio.run(run())
    if batch.num_failed:
        raise CommandError(f"{batch.num_failed} of {batch.num_requests} requests failed; {target} has why")


_Name = Annotated[str, typer.Argument(help="Its name in requests; an existing name gets a new version.")]
_Shared = Annotated[bool, typer.Option("--shared", help="For every tenant; needs the scope `admin`.")]
_SOURCES: Final = {
    "vectors": "a file: safetensors, .npz, GGUF or JSON",
    "detectors": "a safetensors file",
    "dictionaries": "a folder with cfg.json and sae_weights.safetensors, or a place on the Hub, from which "
    "the server downloads it: hf://OWNER/REPOSITORY/FOLDER, saelens://RELEASE/ID, neuronpedia://MODEL/SOURCE",
    "presets": "a JSON file: an exported preset, or a list of operations",
}


def _commands_of(kind: Kind) -> typer.Typer:
    commands = typer.Typer(
        add_completion=False, no_args_is_help=True, help=f"List, add and export {kind.plural} of the server."
    )

    @commands.command("list")
    def list_all(
        name: Annotated[str | None, typer.Argument(help="Only the versions of this name.")] = None,
        url: _Url = None,
    ) -> None:
        """List them, the newest first."""
        server = _server_at(url)
        _run_with_server(server, show(server, kind, name, Console(highlight=False)))

    @commands.command(
        "add", help=f"Add one, as the next version of its name. SOURCE: {_SOURCES[kind.plural]}."
    )
    def add_one(
        name: _Name,
        source: Annotated[str, typer.Argument()],
        shared: _Shared = False,  # noqa: FBT002 - a flag
        at: Annotated[
            str | None, typer.Option(help="The point of a vector's rows or of a dictionary.")
        ] = None,
        output_at: Annotated[str | None, typer.Option(help="The point that a transcoder writes.")] = None,
        url: _Url = None,
    ) -> None:
        server = _server_at(url)
        fields = given_options(shared=shared or None, at=at, output_at=output_at)
        _print_stored(kind, _run_with_server(server, add(server, kind, name, source, fields)))

    @commands.command("export")
    def export_one(
        name: Annotated[str, typer.Argument(help="`joy`, the newest version, or `joy@2`.")],
        target: Annotated[Path | None, typer.Option("-o", "--output", help="The file or folder.")] = None,
        url: _Url = None,
    ) -> None:
        """Write one to a file that can be added to any server, with where it comes from."""
        server = _server_at(url)
        typer.echo(_run_with_server(server, export(server, kind, name, target)))

    if kind.trains:

        @commands.command("train")
        def train_one(
            name: _Name,
            source: Annotated[
                Path, typer.Argument(help='JSON: {"positive": ["…"], "negative": ["…"]} and options.')
            ],
            url: _Url = None,
        ) -> None:
            """Train one on the server, from prompts."""
            server = _server_at(url)
            _print_stored(
                kind, _run_with_server(server, train(server, kind, name, source, Console(stderr=True)))
            )

    return commands


def _print_stored(kind: Kind, stored: JsonObject) -> None:
    typer.echo(f"The {kind.singular} {stored['name']}@{stored['version']} is stored.")
    for warning in stored.get("warnings", ()):
        typer.echo(plain(f"Warning: {warning}"), err=True)


for _kind in KINDS:
    COMMANDS.add_typer(_commands_of(_kind), name=_kind.plural)
