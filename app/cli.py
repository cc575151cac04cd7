"""The command line: ``nnsight-engine serve [MODEL] [any vLLM engine argument]``.

Slow steps (importing vLLM, the bundled model, the engine) run behind a progress bar, after everything that
can be rejected quickly has been checked: invalid arguments, a port in use.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from app.command import TERMINAL, run_terminal
from app.engine.local_traces import LocalTraceEngine
from app.engine.vllm_options import refuse_named
from app.hosts import is_loopback
from app.keys_command import has_keys
from app.keys_command import run as run_keys
from app.listen_socket import listening_socket
from app.main import create_app, new_store
from app.observability.logs import is_json, start_logs
from app.replicas.options import split_address, split_replicas
from app.server import DrainingServer, server_config
from app.settings import Settings, engine_trace_options, environment_for_traces, set_engine_defaults
from app.storage.database import DatabaseError
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.garbage_collection import uncollected
from nnsight_engine.core.sandbox_choice import check_sandbox
from nnsight_engine.core.tap_choice import check_taps
from nnsight_engine.local_engine.process_channel import ProcessOptions
from nnsight_engine.modeling.bundled import (
    BUNDLED_MODEL_NAME,
    BundledModelError,
    bundled_model_path,
    intact_bundled_model,
)
from nnsight_engine.sandbox.confine import missing_namespaces

logger = logging.getLogger(__name__)

USAGE: Final = """\
nnsight-engine serve [MODEL] [--port 8000] [--host 127.0.0.1] [--compile] [--local-engine]
                     [--replicas N] [any vLLM engine argument]
nnsight-engine keys create | adopt | list | limit | rotate | revoke
nnsight-engine chat | lens "PROMPT" | steer "PROMPT" --vector NAME --layer 12 --scale 4   [--url URL]

  MODEL      A Hugging Face name or a folder; the bundled SmolLM2-135M-Instruct without one.
             It comes before the options.
  --compile  CPU: serve with a compiled engine. Decoding is faster, and each start takes about a
             minute longer.
  --local-engine  Keep the model a second time, in a process of its own, for traces of LanguageModel:
             gradients, calls inside a forward, sessions. --local-engine-device says where, cpu by
             default; --local-engine-dtype in which type.
  --taps     Where the residual stream is tapped inside the compiled model: all (the default), off, or
             points such as layers.4:20.output,layers.28.output. Elsewhere steps run uncompiled.
  --replicas Serve N copies of the server behind one address, by Ray Serve: docs/replicas.md. Up to
             --max-replicas M while each has more than --target-ongoing-requests.
  keys       Who may use the server, and for what; without keys only this machine may. See
             nnsight-engine keys --help
  chat, lens, steer  Talk to a server that runs: docs/terminal.md, nnsight-engine lens --help
  --version  Print the version.

Examples:
  nnsight-engine serve
  nnsight-engine serve Qwen/Qwen3-0.6B --max-model-len 4096 --port 8001
Settings of the server itself are environment variables, NNSIGHT_ENGINE_…: see docs/settings.md.
vLLM's own arguments: vllm serve --help=all
"""

_USAGE_ERROR: Final = 2
_INTERRUPTED: Final = 130
"""The exit status that shells use for a command ended by Ctrl-C."""

_DEMO_AXIS: Final = 464
"""A dimension of the bundled model's residual stream along which steering has a readable effect."""

_OWN_OPTIONS: Final = {
    "--local-engine-device": "cpu, cuda or cuda:1, for example",
    "--local-engine-dtype": "float32 or bfloat16, for example",
    "--sandbox": "process or off",
    "--taps": "all, off or points such as layers.4:20.output",
}
"""This server's own options that take a value (unlike vLLM's), with a description of the value."""

_COMPILE_COST: Final = (
    "--compile: on CPU the model is compiled anew at every start, which takes about a minute longer than the "
    "eager engine; decoding is then faster (benchmarks/results compares both)."
)


class CommandError(Exception):
    """A command that cannot run; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True, highlight=False)
    if arguments == ["--version"]:
        console.print(importlib.metadata.version("nnsight-engine"))
        return 0
    if arguments and arguments[0] in {"keys", *TERMINAL}:
        return _keys(arguments[1:], console) if arguments[0] == "keys" else run_terminal(arguments)
    if not arguments or arguments[0] != "serve" or {"-h", "--help"} & set(arguments):
        console.print(USAGE, markup=False)
        return 0 if {"-h", "--help"} & set(arguments) else _USAGE_ERROR
    try:
        return _serve(arguments[1:], console)
    except (CommandError, BundledModelError, UnsupportedOptionError) as error:
        console.print(f"nnsight-engine: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:  # re-raised by uvicorn after the shutdown is complete
        return _INTERRUPTED


def _keys(arguments: list[str], console: Console) -> int:
    try:
        return run_keys(arguments, _settings())
    except CommandError as error:
        console.print(f"nnsight-engine: {error}", markup=False, soft_wrap=True)
        return 1


def _serve(arguments: list[str], console: Console) -> int:
    arguments, replicas = split_replicas(arguments)
    if replicas is not None:
        return _serve_replicas(arguments, replicas, console)
    arguments, chosen = split_options(arguments)
    settings = _settings().model_copy(update=chosen)
    _check_choices(settings)
    model, options = _split_model(arguments)
    refuse_named(options)
    set_engine_defaults()
    start_logs(settings)
    # The bundled model's checksums are verified during the import: hashing releases the GIL.
    bundled = settings.bundled_model_dir
    with _progress(console) as progress, ThreadPoolExecutor(1) as beside:
        found = None if model is not None else beside.submit(intact_bundled_model, cache_dir=bundled)
        progress.add_task("Importing vLLM", total=None)
        # Importing vLLM takes seconds, so it starts only after the progress bar is visible.
        with uncollected():
            arguments_module = importlib.import_module("app.engine.vllm_arguments")
            client_module = importlib.import_module("app.engine.vllm_client")
        if found is not None:
            task = progress.add_task("Bundled model", total=None)
            reporter = _reporter(progress, task)
            model = str(found.result() or bundled_model_path(cache_dir=bundled, progress=reporter))
            options = ["--served-model-name", BUNDLED_MODEL_NAME, *options]
    if "--compile" in options:
        console.print(_COMPILE_COST, markup=False, soft_wrap=True)
    args = arguments_module.parse([model, *options, *_trace_options(options, settings)])
    settings = settings.model_copy(
        update={"host": args.host or settings.host, "port": _port(options, args, settings)}
    )
    return _run(args, settings, client_module, console)


def _serve_replicas(arguments: list[str], replicas: dict[str, Any], console: Console) -> int:
    arguments, address = split_address(arguments)
    settings = _settings().model_copy(update=address)
    _check_choices(settings.model_copy(update=split_options(arguments)[1]))
    model, options = _split_model(arguments)
    set_engine_defaults()
    start_logs(settings)
    with_keys = _check_callers(settings)
    try:
        command = importlib.import_module("app.replicas.command")
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--replicas needs Ray Serve: pip install 'nnsight-engine[ray]' ({error})"
        ) from error
    if model is None:  # built once here instead of once per replica
        with _progress(console) as progress:
            reporter = _reporter(progress, progress.add_task("Bundled model", total=None))
            bundled_model_path(cache_dir=settings.bundled_model_dir, progress=reporter)
    command.run(
        {"models": [{"model": model, "arguments": options, **replicas}]},
        settings,
        console,
        with_keys=with_keys,
    )
    return 0


def _check_choices(settings: Settings) -> None:
    """Check what options may have set; raises UnsupportedOptionError."""
    check_taps(settings.taps)
    check_sandbox(settings.sandbox)


def _trace_options(options: list[str], settings: Settings) -> list[str]:
    """Return vLLM's arguments for exporting spans to the server's collector, unless it is given its own."""
    name, *_ = found = engine_trace_options(settings) or [""]
    given = any(option.partition("=")[0] == name for option in options)
    return found if name and not given else []


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        # Otherwise the location is the name of an environment variable with an alias.
        if name in Settings.model_fields:
            name = f"{Settings.model_config['env_prefix']}{name}".upper()
        raise CommandError(
            f"the variable {name} is wrong: {first['msg']}, got {first['input']!r}; see docs/settings.md"
        ) from error


def _check_callers(settings: Settings) -> bool:
    """Return whether any keys exist; without keys, require a loopback address.

    A server without keys admits every caller.

    Raises:
        CommandError: There are no keys and the address is reachable from other machines, or the database
            cannot be opened.
    """
    try:
        with_keys = asyncio.run(has_keys(settings))
    except DatabaseError as error:
        raise CommandError(str(error)) from error
    if not with_keys and not is_loopback(settings.host):
        raise CommandError(
            f"there are no keys, so the server listens to this machine alone and not on {settings.host}: "
            "make one with `nnsight-engine keys create --tenant NAME --scopes completions,interventions`, "
            "or leave --host out"
        )
    return with_keys


def _check_sandbox(settings: Settings) -> None:
    """Check that sandboxes have the namespaces that the operator requires.

    Raises:
        CommandError: Namespaces are missing.
    """
    if settings.sandbox != "process" or not settings.sandbox_needs_namespaces:
        return
    missing = missing_namespaces()
    if missing:
        raise CommandError(
            f"sandboxes would have no {', '.join(missing)} namespace of their own here, and "
            "sandbox_needs_namespaces asks for them: allow `unshare` in the container's seccomp profile and "
            "users' namespaces in the kernel, see docs/deploying.md, or leave the setting out"
        )


def _run(args: argparse.Namespace, settings: Settings, client_module: Any, console: Console) -> int:
    _check_sandbox(settings)
    with_keys = _check_callers(settings)
    store = new_store(settings)
    engine = client_module.VLLMEngineClient(args, settings, store)
    failures: list[str] = []

    def stop() -> None:
        failures.append("the engine did not start, or died too often; its errors are above")
        server.should_exit = True

    app = create_app(settings, engine, store, on_engine_failure=stop, local=_local_engine(args, settings))
    config = server_config(app, settings)
    server = DrainingServer(config)
    # The socket is bound before the model is loaded, so that a port in use is reported at once.
    sock = listening_socket(config, stall_s=settings.client_stall_timeout_s)
    port = sock.getsockname()[1]

    async def serve() -> None:
        url = f"http://{settings.host}:{port}"
        announcing = asyncio.create_task(
            _log_ready(engine, url)
            if is_json(settings)
            else _announce(engine, url, console, with_keys=with_keys, with_page=settings.playground)
        )
        await server.serve(sockets=[sock])
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop's
        runner.run(serve())
    if failures:
        raise CommandError(failures[0])
    return 0


def _local_engine(args: argparse.Namespace, settings: Settings) -> LocalTraceEngine | None:
    """Return the engine for traces of ``LanguageModel`` on the served checkpoint, or None if disabled."""
    if not settings.local_engine:
        return None
    options = ProcessOptions(
        model=args.model,
        revision=args.revision,
        trust_remote_code=bool(args.trust_remote_code),
        device=settings.local_engine_device,
        dtype=settings.local_engine_dtype,
        max_result_bytes=settings.max_trace_bytes,
        compresses=settings.compress_results,
    )
    return LocalTraceEngine(options, settings, environment_for_traces())


async def _log_ready(engine: Any, url: str) -> None:
    """Log that the engine is ready, in a machine-readable form."""
    await engine.started.wait()
    logger.setLevel(logging.INFO)
    logger.info("ready", extra={"model": engine.engine.spec.name, "url": url})


async def _announce(engine: Any, url: str, console: Console, *, with_keys: bool, with_page: bool) -> None:
    """Show progress while the engine loads, then print how to reach and try it."""
    with _progress(console) as progress:
        progress.add_task("Loading the engine", total=None)
        await engine.started.wait()
    spec = engine.engine.spec
    who = "whoever has a key" if with_keys else "this machine alone, there are no keys"
    page = f", a page to try it on at {url}/playground" if with_page else ""
    console.print(
        f"Ready for {who}: {spec.name} at {url}, docs at {url}/docs{page}.", markup=False, soft_wrap=True
    )
    console.print("Steer it:", _steering_line(url, spec, with_key=with_keys), markup=False, soft_wrap=True)


def _steering_line(url: str, spec: Any, *, with_key: bool = False) -> str:
    """Return a shell command that steers one dimension of the residual stream at the middle layer."""
    key = " -H 'authorization: Bearer '$NNSIGHT_ENGINE_KEY" if with_key else ""
    axis = _DEMO_AXIS if spec.hidden_size > _DEMO_AXIS else 1
    after = spec.hidden_size - axis - 1
    vector = f"'$(printf '0,%.0s' $(seq {axis}))1$(printf ',0%.0s' $(seq {after}))'"
    steer = (
        f'{{"op":"steer","at":"layers.{spec.num_layers // 2}.output","vector":[{vector}],'
        f'"mode":"norm_match","scale":0.3}}'
    )
    body = (
        f'{{"model":"{spec.name}","prompt":"I think dogs are","max_tokens":24,"temperature":0,'
        f'"interventions":[{steer}]}}'
    )
    return f"curl {url}/v1/completions{key} -H 'content-type: application/json' -d '{body}'"


def split_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split this server's own options from the arguments.

    Returns:
        The remaining arguments, and the settings that the options set.

    Raises:
        CommandError: An option lacks its value.
    """
    left: list[str] = []
    chosen: dict[str, Any] = {}
    given = iter(arguments)
    for argument in given:
        name, is_assigned, value = argument.partition("=")
        if name == "--local-engine" and not is_assigned:
            chosen["local_engine"] = True
        elif name in _OWN_OPTIONS:
            value = value if is_assigned else next(given, "")
            if not value or value.startswith("-"):
                raise CommandError(f"{name} takes a value: {_OWN_OPTIONS[name]}")
            chosen[name.removeprefix("--").replace("-", "_")] = value
        else:
            left.append(argument)
    return left, chosen


def _split_model(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the model, which is the first argument or absent, and the options."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if "--model" in arguments:
        raise CommandError("MODEL is given by its place: nnsight-engine serve MODEL [options]")
    return None, arguments


def _port(options: list[str], args: argparse.Namespace, settings: Settings) -> int:
    """Return the command line's port if given, else the setting; vLLM's parser has a default of its own."""
    given = any(option == "--port" or option.startswith("--port=") for option in options)
    return int(args.port) if given else settings.port


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _reporter(progress: Progress, task: Any) -> Any:
    def report(stage: str, fraction: float) -> None:
        progress.update(task, description=f"Bundled model: {stage}", completed=fraction, total=1.0)

    return report


if __name__ == "__main__":
    sys.exit(main())
