"""The command ``nnsight-engine serve``.

Slow steps (importing vLLM, the bundled model, the engine) run behind a progress bar, after everything that
can be rejected quickly has been checked: invalid arguments, a port in use.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from app.addresses import is_loopback
from app.auth.given_keys import GivenKeys
from app.certificate_refresh import refresh_certificate
from app.command_error import CommandError, settings_error
from app.engine.local_traces import LocalTraceEngine
from app.engine.vllm_options import refuse_named, refuse_with_replicas
from app.http_options import HttpOptions, listening_options, log_options
from app.keys_command import has_keys
from app.listen_socket import listening_socket
from app.main import create_app, new_store
from app.model_argument import CONFIG, split_model
from app.observability.logs import is_json, limit_logs, start_logs
from app.process_environment import (
    engine_trace_options,
    environment_for_traces,
    set_engine_defaults,
    set_engine_log_level,
    vllm_key,
)
from app.server import DrainingServer, server_config
from app.settings import Settings
from app.storage.database import DatabaseError
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.garbage_collection import uncollected
from nnsight_engine.core.tap_choice import check_taps
from nnsight_engine.local_engine.process_channel import ProcessOptions
from nnsight_engine.modeling.bundled import (
    BUNDLED_MODEL_NAME,
    BundledModelError,
    bundled_model_path,
    intact_bundled_model,
)
from nnsight_engine.sandbox.confine import missing_namespaces
from nnsight_engine.vllm_backend.versions.check import check_version

logger = logging.getLogger(__name__)

_DEMO_AXIS: Final = 464
"""A dimension of the bundled model's residual stream along which steering has a readable effect."""

_COMPILE_COST: Final = (
    "--compile: on CPU the model is compiled anew at every start, which takes about a minute longer than the "
    "eager engine; decoding is then faster (benchmarks/results compares both)."
)


@dataclasses.dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command's arguments.

    Attributes:
        arguments: MODEL, if given, and vLLM's own options.
        compiles: Whether the model is compiled on a CPU.
        settings: Settings of the server that the command line overrides, by name.
        replicas: Fields of ``ModelOptions``; empty if this process serves itself.
    """

    arguments: Sequence[str]
    compiles: bool
    settings: Mapping[str, Any]
    replicas: Mapping[str, Any]


def run(options: ServeOptions) -> None:
    """Serve until the process is stopped.

    Raises:
        CommandError: The server cannot start, or its engine died too often.
    """
    console = Console(stderr=True, highlight=False)
    settings = _settings(options.settings)
    try:
        check_taps(settings.taps)
        model, arguments = split_model(options.arguments)
        (refuse_with_replicas if options.replicas else refuse_named)(arguments)
        set_engine_defaults()
        start_logs(settings)
        if options.replicas:
            _serve_replicas(model, arguments, options, settings, console)
        else:
            _serve(model, arguments, settings, console, compiles=options.compiles)
    except (BundledModelError, UnsupportedOptionError) as error:
        raise CommandError(str(error)) from error


def _serve(
    model: str | None, options: list[str], settings: Settings, console: Console, *, compiles: bool
) -> None:
    check_version(settings.vllm_version_check)
    # The bundled model's checksums are verified during the import: hashing releases the GIL.
    bundled = settings.bundled_model_dir
    with _progress(console) as progress, ThreadPoolExecutor(1) as beside:
        is_named = model is not None or CONFIG in options
        found = None if is_named else beside.submit(intact_bundled_model, cache_dir=bundled)
        progress.add_task("Importing vLLM", total=None)
        # Importing vLLM takes seconds, so it starts only after the progress bar is visible.
        with uncollected():
            arguments_module = importlib.import_module("app.engine.vllm_arguments")
            client_module = importlib.import_module("app.engine.vllm_client")
        if CONFIG in options:
            named = arguments_module.model_of_file(options[options.index(CONFIG) + 1])
            model = model or named
        if model is None:
            task = progress.add_task("Bundled model", total=None)
            reporter = _reporter(progress, task)
            intact = None if found is None else found.result()
            model = str(intact or bundled_model_path(cache_dir=bundled, progress=reporter))
            options = ["--served-model-name", BUNDLED_MODEL_NAME, *options]
    if compiles:
        console.print(_COMPILE_COST, markup=False, soft_wrap=True)
    args = arguments_module.parse([model, *options, *_trace_options(options, settings)], compiles=compiles)
    level = vars(args).get("log_level")  # absent if it is not given
    if level:
        set_engine_log_level(level)
    settings = _with_options_of_files(settings, args)
    args.host, args.port = settings.host, settings.port
    _run(args, settings, client_module, console)


def _with_options_of_files(settings: Settings, args: argparse.Namespace) -> Settings:
    """Return the settings with those that vLLM's parser has read, also from a file of options."""
    given: dict[str, Any] = {}
    if args.host:
        given["host"] = args.host
    if args.port != settings.port:
        given["port"] = args.port
    given = {name: value for name, value in given.items() if name not in settings.model_fields_set}
    if args.sse_keep_alive_interval:
        given["sse_keep_alive_s"] = args.sse_keep_alive_interval
    return settings.model_copy(update=given)


def _serve_replicas(
    model: str | None, arguments: list[str], options: ServeOptions, settings: Settings, console: Console
) -> None:
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
        {
            "models": [
                {"model": model, "arguments": [*arguments, *_server_options(options)], **options.replicas}
            ]
        },
        settings,
        console,
        with_keys=with_keys,
    )


def _server_options(options: ServeOptions) -> list[str]:
    """Return the server's own options, without the address, as arguments of a replica's command line."""
    names = {name: value for name, value in options.settings.items() if name not in {"host", "port"}}
    flags = [f"--{name.replace('_', '-')}" for name, value in names.items() if value is True]
    valued = [f"--{name.replace('_', '-')}={value}" for name, value in names.items() if value is not True]
    return [*flags, *valued, *(["--compile"] if options.compiles else [])]


def _trace_options(options: list[str], settings: Settings) -> list[str]:
    """Return vLLM's arguments for exporting spans to the server's collector, unless it is given its own."""
    name, *_ = found = engine_trace_options(settings) or [""]
    given = any(option.partition("=")[0] == name for option in options)
    return found if name and not given else []


def _settings(options: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**options)
    except ValidationError as error:
        raise settings_error(error, options) from error


def _check_callers(settings: Settings, given: GivenKeys | None = None) -> bool:
    """Return whether there are any keys, stored or given; without keys, require a loopback address.

    A server without keys admits every caller.

    Raises:
        CommandError: There are no keys and the address is reachable from other machines, or the database
            cannot be opened.
    """
    try:
        with_keys = bool(given) or asyncio.run(has_keys(settings))
    except DatabaseError as error:
        raise CommandError(str(error)) from error
    if not with_keys and not is_loopback(settings.host):
        raise CommandError(
            f"without keys the server serves this machine only and cannot listen on {settings.host}: create "
            "a key with `nnsight-engine keys create --tenant NAME --scopes completions,interventions`, give "
            "--api-key, or omit --host"
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
            f"sandboxes cannot have their own {', '.join(missing)} namespace here, and "
            "sandbox_needs_namespaces requires it: allow `unshare` in the container's seccomp profile and "
            "user namespaces in the kernel, see docs/deploying.md, or omit the setting"
        )


def _run(args: argparse.Namespace, settings: Settings, client_module: Any, console: Console) -> None:
    _check_sandbox(settings)
    http, listening = HttpOptions.of(args), listening_options(args)
    limit_logs(**log_options(args))
    given = GivenKeys(args.api_key or [key for key in [vllm_key()] if key])
    with_keys = _check_callers(settings, given)
    if "*" in http.allowed_origins and not with_keys:
        raise CommandError(
            "--allowed-origins '[\"*\"]' needs keys: without them every page that somebody on this machine "
            "opens could use the server; name the origins, or give --api-key"
        )
    store = new_store(settings)
    engine = client_module.VLLMEngineClient(args, settings, store)
    failures: list[str] = []

    def stop() -> None:
        failures.append("the engine did not start, or failed too often; its errors are above")
        server.should_exit = True

    app = create_app(
        settings,
        engine,
        store,
        on_engine_failure=stop,
        local=_local_engine(args, settings),
        given_keys=given,
        http=http,
    )
    app.root_path = args.root_path or ""
    config = server_config(app, settings, **listening)
    server = DrainingServer(config)
    # The socket is bound before the model is loaded, so that a port in use is reported at once.
    sock = listening_socket(config, stall_s=settings.client_stall_timeout_s)
    scheme = "https" if config.is_ssl else "http"
    url = f"unix:{args.uds}" if args.uds else f"{scheme}://{settings.host}:{sock.getsockname()[1]}"

    async def serve() -> None:
        announcing = asyncio.create_task(
            _log_ready(engine, url)
            if is_json(settings)
            else _announce(engine, url, console, with_keys=with_keys, with_page=settings.playground)
        )
        beside = [announcing]
        if args.enable_ssl_refresh and config.is_ssl:
            beside.append(asyncio.create_task(refresh_certificate(config), name="certificate"))
        await server.serve(sockets=[sock])
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop's
        runner.run(serve())
    if failures:
        raise CommandError(failures[0])


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
    who = "holders of a key" if with_keys else "this machine only, because there are no keys"
    page = f", playground at {url}/playground" if with_page else ""
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


__all__ = ["ServeOptions", "run"]
