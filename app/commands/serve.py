"""``nnsight-engine serve``; slow imports run behind a progress bar, after ``start_checks``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from app.auth.keys import GivenKeys
from app.command_error import CommandError
from app.commands.start_checks import CONFIG, ServeOptions, Start, check_callers
from app.engine.process_engines import LocalTraceEngine
from app.main import create_app, new_store
from app.observability.logs import limit_logs, start_logs
from app.process_environment import (
    engine_trace_options,
    environment_for_traces,
    set_engine_defaults,
    set_engine_log_level,
    vllm_key,
)
from app.server.http_options import HttpOptions, listening_options, log_options
from app.server.sockets import listening_socket
from app.server.uvicorn import DrainingServer, refresh_certificate, server_config
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.process import uncollected
from nnsight_engine.local_engine.trace_process import ProcessOptions
from nnsight_engine.modeling.bundled import (
    BUNDLED_MODEL_NAME,
    BundledModelError,
    bundled_model_path,
    intact_bundled_model,
    is_bundled_model,
)
from nnsight_engine.sandbox.confine import missing_namespaces

logger = logging.getLogger(__name__)

_STEERED: Final = {
    "prompt": "I think dogs are",
    "max_tokens": 24,
    "temperature": 0,
    "interventions": [{"op": "steer", "at": "layers.12.output", "vector": "example-joy"}],
}
"""A request that a stored example of the bundled model steers."""
_READ: Final = {
    "prompt": "The Eiffel Tower is in the city of",
    "max_tokens": 1,
    "interventions": [{"op": "logit_lens", "top_k": 1, "where": {"positions": [-1]}}],
}
"""A request that works with every model: the token that each layer would predict."""

_COMPILE_COST: Final = (
    "--compile: on CPU the model is compiled anew at every start, which takes about a minute longer than the "
    "eager engine; decoding is then faster (benchmarks/results compares both)."
)


def run(start: Start) -> None:
    """Serve until the process is stopped; CommandError if it cannot start, or its engine died too often."""
    console = Console(stderr=True, highlight=False)
    try:
        set_engine_defaults()
        start_logs(start.settings)
        if start.options.replicas:
            _serve_replicas(start, console)
        else:
            _serve_alone(start, console)
    except (BundledModelError, CommandError, UnsupportedOptionError) as error:
        if start.settings.log_format == "json":  # this line too, then
            logger.error("%s", error)  # noqa: TRY400 - one line
            raise CommandError("") from error
        raise CommandError(str(error)) from error


def _serve_alone(start: Start, console: Console) -> None:
    """Find the model while vLLM is imported, parse vLLM's options, and run one server."""
    model, options, settings, compiles = start.model, start.arguments, start.settings, start.options.compiles
    # The bundled model's checksums are verified during the import: hashing releases the GIL.
    bundled = settings.bundled_model_dir
    with _progress_bar(console) as progress, ThreadPoolExecutor(1) as executor:
        is_named = model is not None or CONFIG in options
        bundled_check = None if is_named else executor.submit(intact_bundled_model, cache_dir=bundled)
        progress.add_task("Importing vLLM", total=None)
        # Importing vLLM takes seconds, so it starts only after the progress bar is visible.
        with uncollected():
            arguments_module = importlib.import_module("app.engine.vllm_arguments")
            client_module = importlib.import_module("app.engine.vllm_client")
        if CONFIG in options:
            model_in_file = arguments_module.model_of_file(options[options.index(CONFIG) + 1])
            model = model or model_in_file
        if model is None:
            task = progress.add_task("Bundled model", total=None)
            reporter = _reporter(progress, task)
            intact = None if bundled_check is None else bundled_check.result()
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
    _run_server(args, settings, client_module, console)


def _with_options_of_files(settings: Settings, args: argparse.Namespace) -> Settings:
    """Return the settings with those that vLLM's parser has read, also from a file of options."""
    changes: dict[str, Any] = {}
    if args.host:
        changes["host"] = args.host
    if args.port != settings.port:
        changes["port"] = args.port
    changes = {name: value for name, value in changes.items() if name not in settings.model_fields_set}
    if args.sse_keep_alive_interval:
        changes["sse_keep_alive_s"] = args.sse_keep_alive_interval
    return settings.model_copy(update=changes)


def _serve_replicas(start: Start, console: Console) -> None:
    """Run several servers by Ray Serve; needs the extra ``ray``."""
    model, options, settings = start.model, start.options, start.settings
    with_keys = check_callers(settings)
    try:
        command = importlib.import_module("app.replicas.command")
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--replicas needs Ray Serve: pip install 'nnsight-engine[ray]' ({error})"
        ) from error
    if model is None:  # built once here instead of once per replica
        with _progress_bar(console) as progress:
            reporter = _reporter(progress, progress.add_task("Bundled model", total=None))
            bundled_model_path(cache_dir=settings.bundled_model_dir, progress=reporter)
    command.run(
        {
            "models": [
                {
                    "model": model,
                    "arguments": [*start.arguments, *_server_options(options)],
                    **options.replicas,
                }
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
    """Return vLLM's options to export spans where this server does, unless the operator gave their own."""
    trace_options = engine_trace_options(settings)
    if not trace_options:
        return []
    flag = trace_options[0]
    is_given = any(option.partition("=")[0] == flag for option in options)
    return [] if is_given else trace_options


def _check_sandbox(settings: Settings) -> None:
    if settings.sandbox != "process" or not settings.sandbox_needs_namespaces:
        return
    missing = missing_namespaces()
    if missing:
        raise CommandError(
            f"sandboxes cannot have their own {', '.join(missing)} namespace here, and "
            "sandbox_needs_namespaces requires it: allow `unshare` in the container's seccomp profile and "
            "user namespaces in the kernel, see docs/deploying.md, or omit the setting"
        )


def _run_server(args: argparse.Namespace, settings: Settings, client_module: Any, console: Console) -> None:
    """Serve until a signal or the engine's failure, which raises CommandError; ``args`` are vLLM's."""
    _check_sandbox(settings)
    http, listening = HttpOptions.of(args), listening_options(args)
    limit_logs(**log_options(args))
    given_keys = GivenKeys(args.api_key or [key for key in [vllm_key()] if key])
    with_keys = check_callers(settings, given_keys)
    if "*" in http.allowed_origins and not with_keys:
        raise CommandError(
            "--allowed-origins '[\"*\"]' needs keys: without them every page that somebody on this machine "
            "opens could use the server; name the origins, or give --api-key"
        )
    store = new_store(settings)
    engine = client_module.VLLMEngineClient(args, settings, store)
    failures: list[str] = []

    def stop(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    app = create_app(
        settings,
        engine,
        store,
        on_engine_failure=stop,
        local=_local_engine(args, settings),
        given_keys=given_keys,
        http=http,
    )
    app.root_path = args.root_path or ""
    config = server_config(app, settings, **listening)
    server = DrainingServer(config)
    # Bound before the model is loaded, so that another process cannot take it in the meantime.
    sock = listening_socket(config, stall_s=settings.client_stall_timeout_s)
    scheme = "https" if config.is_ssl else "http"
    url = f"unix:{args.uds}" if args.uds else f"{scheme}://{settings.host}:{sock.getsockname()[1]}"

    async def serve() -> None:
        announcing = asyncio.create_task(
            _log_ready(engine, url)
            if settings.log_format == "json"
            else _announce(engine, url, settings, console, with_keys=with_keys)
        )
        tasks = [announcing]
        if args.enable_ssl_refresh and config.is_ssl:
            tasks.append(asyncio.create_task(refresh_certificate(config), name="certificate"))
        await server.serve(sockets=[sock])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop's
        runner.run(serve())
    if failures:
        raise CommandError(failures[0])


def _local_engine(args: argparse.Namespace, settings: Settings) -> LocalTraceEngine | None:
    """Return the engine for traces of LanguageModel, not started; None unless ``local_engine`` is set."""
    if not settings.local_engine:
        return None
    options = ProcessOptions(
        model=args.model,
        revision=args.revision,
        trust_remote_code=bool(args.trust_remote_code),
        device=settings.local_engine_device,
        dtype=settings.local_engine_dtype,
        max_result_bytes=settings.max_trace_bytes,
        compresses=True,
    )
    return LocalTraceEngine(options, settings, environment_for_traces())


async def _log_ready(engine: Any, url: str) -> None:
    await engine.started.wait()
    logger.setLevel(logging.INFO)
    logger.info("ready", extra={"model": engine.engine.spec.name, "url": url})


async def _announce(engine: Any, url: str, settings: Settings, console: Console, *, with_keys: bool) -> None:
    """Print where the server is, and a command to try, once its engine has started."""
    with _progress_bar(console) as progress:
        progress.add_task("Loading the engine", total=None)
        await engine.started.wait()
    spec = engine.engine.spec
    callers = "holders of a key" if with_keys else "this machine only, because there are no keys"
    page = f", playground at {url}/playground" if settings.playground else ""
    source = engine.served().source
    is_bundled = settings.examples and is_bundled_model(source, cache_dir=settings.bundled_model_dir)
    console.print(
        f"Ready for {callers}: {spec.name} at {url}, docs at {url}/docs{page}.", markup=False, soft_wrap=True
    )
    line = _demo_line(url, spec.name, is_bundled=is_bundled, with_key=with_keys)
    console.print("Steer it:" if is_bundled else "Read it:", line, markup=False, soft_wrap=True)


def _demo_line(url: str, name: str, *, is_bundled: bool, with_key: bool) -> str:
    """Return a shell command that shows more than a plain server can: a stored vector, or else the lens."""
    demo: dict[str, Any] = {"model": name, **(_STEERED if is_bundled else _READ)}
    key = ' -H "Authorization: Bearer $NNSIGHT_ENGINE_KEY"' if with_key else ""
    return f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(demo)}'"


def _progress_bar(console: Console) -> Progress:
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
    """Return a function that shows the progress of making the bundled model, stage and fraction."""

    def report(stage: str, fraction: float) -> None:
        progress.update(task, description=f"Bundled model: {stage}", completed=fraction, total=1.0)

    return report
