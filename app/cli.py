"""The command line; imports nothing heavy: a command's module is imported after its options are read."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from app.command_error import CommandError
from app.terminal.commands import COMMANDS as TERMINAL
from app.terminal.commands import given_options
from nnsight_engine.core.process import uncollected

_FAILED: Final = 1
_INTERRUPTED: Final = 130
"""The exit status that shells use for a command ended by Ctrl-C."""

_PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

_COMMANDS: Final = typer.Typer(
    no_args_is_help=True,
    help="A server for language models with OpenAI's API and access to their internals.",
)
_COMMANDS.add_typer(TERMINAL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status; errors are printed to standard error."""
    arguments = [
        "--help" if argument == "-h" else argument for argument in (sys.argv[1:] if argv is None else argv)
    ]
    try:
        status = _COMMANDS(arguments, prog_name="nnsight-engine", standalone_mode=False)
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):  # uvicorn raises it again after the shutdown is complete
        return _INTERRUPTED
    except typer.TyperException as error:
        _print_error(error.format_message())
        return error.exit_code
    except CommandError as error:
        _print_error(str(error))
        return _FAILED
    return int(status or 0)


def _print_error(message: str) -> None:
    if message:  # without a subcommand the help has already been printed
        console = Console(stderr=True, highlight=False)
        console.print(f"nnsight-engine: {message}", markup=False, soft_wrap=True)


def _version(is_wanted: bool) -> None:  # noqa: FBT001 - typer's signature of a callback
    if is_wanted:
        typer.echo(importlib.metadata.version("nnsight-engine"))
        raise typer.Exit


@_COMMANDS.callback()
def _root(
    version: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def _check_value(value: Any) -> Any:
    """Refuse an option in the place of another one's value, which is missing then."""
    if isinstance(value, str) and value.startswith("-"):
        raise typer.BadParameter(f"it needs a value, got the option {value}")
    return value


def _option(metavar: str, description: str) -> Any:
    return typer.Option(help=description, metavar=metavar, callback=_check_value, rich_help_panel="Options")


def _replica_option(description: str) -> Any:
    panel = "Replicas: several servers behind one address"
    return typer.Option(help=description, metavar="NUMBER", rich_help_panel=panel)


def _flags(context: typer.Context) -> list[str]:
    """Return the options of this command, beside vLLM's, for suggestions after typing errors."""
    return [flag for parameter in context.command.params for flag in parameter.opts]


@_COMMANDS.command(
    options_metavar="[MODEL] [OPTIONS] [VLLM OPTIONS]",
    context_settings=_PASSED_ON,
    epilog="nnsight-engine serve Qwen/Qwen3-0.6B --max-model-len 4096 --port 8001",
)
def serve(  # noqa: PLR0913 - one argument for each option
    context: typer.Context,
    *,
    host: Annotated[str | None, _option("ADDRESS", "The address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, _option("NUMBER", "The port to listen on; 8000 by default.")] = None,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="CPU: compile the model. Decoding is faster, but each start takes a minute longer.",
        ),
    ] = False,
    sandbox: Annotated[
        str | None, _option("process|off", "Where untrusted code runs; in a process by default.")
    ] = None,
    taps: Annotated[
        str | None,
        _option(
            "POINTS",
            "Points of the residual stream that can be read and changed inside the compiled model: all (the "
            "default), off, or points such as layers.4:20.output,layers.28.output. At others, steps run "
            "uncompiled.",
        ),
    ] = None,
    points: Annotated[
        str | None,
        _option(
            "any|strict",
            "Models that have points: any (the default: the residual stream of a model without a table is "
            "found by its structure, and proved at start) or strict (models with a table).",
        ),
    ] = None,
    intervention_graphs: Annotated[
        str | None,
        _option(
            "decode|off",
            "GPU: steps with interventions that have full CUDA graphs of their own: decode (the default) or "
            "off, which starts faster.",
        ),
    ] = None,
    local_engine: Annotated[
        bool,
        typer.Option(
            "--local-engine",
            help="Load the model a second time, in a process of its own, for traces of LanguageModel: "
            "gradients, calls inside a forward, sessions.",
        ),
    ] = False,
    local_engine_device: Annotated[
        str | None, _option("DEVICE", "cpu (the default), cuda or cuda:1.")
    ] = None,
    local_engine_dtype: Annotated[str | None, _option("DTYPE", "float32 or bfloat16, for example.")] = None,
    replicas: Annotated[
        int | None, _replica_option("Number of servers, run by Ray Serve: docs/replicas.md.")
    ] = None,
    max_replicas: Annotated[int | None, _replica_option("Most servers under load.")] = None,
    target_ongoing_requests: Annotated[
        float | None, _replica_option("Requests per server above which another one is started.")
    ] = None,
    replica_cpus: Annotated[float | None, _replica_option("Cores of each server.")] = None,
    replica_gpus: Annotated[float | None, _replica_option("GPUs of each server.")] = None,
) -> None:
    """Serve MODEL (a Hugging Face name or a folder), by default the bundled SmolLM2-135M-Instruct.

    MODEL comes before the options. Options of vllm serve are taken too, with a few exceptions: vllm serve
    --help=all lists them all, --help=max those with such a name. Settings of the server are environment
    variables, NNSIGHT_ENGINE_…, see docs/settings.md. A server without keys serves this machine only, see
    nnsight-engine keys --help.
    """
    checks = importlib.import_module("app.commands.start_checks")
    start = checks.check_start(
        checks.ServeOptions(
            arguments=context.args,
            compiles=compiles,
            settings=given_options(
                host=host,
                port=port,
                sandbox=sandbox,
                taps=taps,
                points=points,
                intervention_graphs=intervention_graphs,
                local_engine=local_engine or None,
                local_engine_device=local_engine_device,
                local_engine_dtype=local_engine_dtype,
            ),
            replicas=given_options(
                replicas=replicas,
                max_replicas=max_replicas,
                target_ongoing_requests=target_ongoing_requests,
                num_cpus=replica_cpus,
                num_gpus=replica_gpus,
            ),
        ),
        _flags(context),
    )
    with uncollected():
        command = importlib.import_module("app.commands.serve")
    command.run(start)


@_COMMANDS.command(
    options_metavar="MODEL [OPTIONS] [VLLM OPTIONS]",
    context_settings=_PASSED_ON,
    epilog="nnsight-engine check Qwen/Qwen3-0.6B --layers 0,14,-1 --json certificate.json",
)
def check(  # noqa: PLR0913 - one argument for each option
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder or a Hugging Face name.", callback=_check_value)],
    *,
    prompt: Annotated[str | None, _option("TEXT", "The prompt, of 4 to 256 tokens.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="0,4:6,-1 or *; by default the first, the middle and the last of each kind.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="A file for the certificate as JSON."),
    ] = None,
    revision: Annotated[str | None, _option("REVISION", "The model's revision on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own code.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            min=0,
            max=1,
            help="The largest relative difference; 0.001 in float32, more in others.",
        ),
    ] = None,
    transformers_device: Annotated[str, _option("DEVICE", "Where transformers' model runs, first.")] = "cpu",
) -> int:
    """Compare every point of MODEL on vLLM with transformers: values, changes, skipped layers.

    Both compute in float32 by default; --dtype changes vLLM's. Exits with 1 if a comparison differs or a
    change silently has no effect. Options of vllm serve are taken too; vllm serve --help=all lists them.
    """
    arguments = [*context.args, *(["--revision", revision] if revision else [])]
    importlib.import_module("app.commands.start_checks").check_arguments(model, arguments, _flags(context))
    command = importlib.import_module("app.commands.check")
    options = given_options(prompt=prompt, layers=layers, revision=revision, tolerance=tolerance)
    request = command.CheckRequest(
        model, trust_remote_code=trust_remote_code, device=transformers_device, **options
    )
    status: int = command.run(request, context.args, json_file)
    return status


@_COMMANDS.command(context_settings=_PASSED_ON, add_help_option=False, options_metavar="COMMAND [OPTIONS]")
def keys(context: typer.Context) -> None:
    """Create, list, limit, rotate and revoke the keys of this server."""
    importlib.import_module("app.commands.keys").run(context.args)


if __name__ == "__main__":
    sys.exit(main())
