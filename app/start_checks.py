"""Mistakes of the operator, found before vLLM, torch and the server are imported; others come later."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.addresses import is_loopback
from app.auth.given_keys import GivenKeys
from app.command_error import CommandError, read_settings
from app.engine.recorded_parser import parse_recorded
from app.engine.vllm_options import refuse_named, refuse_with_replicas
from app.keys_command import has_keys
from app.model_argument import CONFIG, check_model, split_model
from app.process_environment import cluster_address, vllm_key
from app.settings import Settings
from app.storage.database import DatabaseError
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.tap_choice import ALL_TAPS, check_taps
from nnsight_engine.modeling.bundled import bundled_model_folder
from nnsight_engine.vllm_backend.cpu_plugin import check_runner
from nnsight_engine.vllm_backend.versions.check import check_version, is_tested_version


@dataclasses.dataclass(frozen=True, slots=True)
class ServeOptions:
    """``arguments`` are MODEL, if given, and vLLM's options; ``replicas`` are fields of ``ModelOptions``."""

    arguments: Sequence[str]
    compiles: bool
    settings: Mapping[str, Any]
    replicas: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A server that may be started; ``model`` is None for the bundled one or that of a file of options."""

    options: ServeOptions
    settings: Settings
    model: str | None
    arguments: list[str]


def check_start(options: ServeOptions, own: Iterable[str] = ()) -> Start:
    """Check arguments, environment, model and address; ``own`` options are suggested for typing errors."""
    settings = read_settings(options.settings)
    try:
        check_taps(settings.taps)
        model, arguments = split_model(options.arguments)
        (refuse_with_replicas if options.replicas else refuse_named)(arguments)
        if not options.replicas and importlib.util.find_spec("vllm") is None:
            raise CommandError(
                "serve needs vLLM: pip install 'nnsight-engine[cpu]', or [gpu] on a machine with GPUs"
            )
        if not options.replicas:
            check_version(settings.vllm_version_check)
            check_runner()
        start = Start(options, settings, model, arguments)
        if CONFIG in arguments:  # vLLM's parser reads the model and the address from it
            _check_file(arguments[arguments.index(CONFIG) + 1])
        else:
            _check_all(start, own)
    except UnsupportedOptionError as error:
        raise CommandError(str(error)) from error
    return start


def check_arguments(model: str, arguments: Sequence[str], own: Iterable[str] = ()) -> None:
    """Check the model and vLLM's options of a command that starts no server; raises CommandError."""
    try:
        check_runner()
        args = parse_recorded(arguments, own, is_complete=is_tested_version())
        check_model(model, args, ALL_TAPS)
    except UnsupportedOptionError as error:
        raise CommandError(str(error)) from error


def _check_all(start: Start, own: Iterable[str]) -> None:
    settings = start.settings
    args = parse_recorded(start.arguments, own, is_complete=is_tested_version())
    if not all((name or "").strip() for name in args.served_model_name or ()):
        raise CommandError("--served-model-name must not be empty")
    given = GivenKeys(args.api_key or [key for key in [vllm_key()] if key])
    if not args.uds:
        check_address(settings)
    check_callers(settings, given)
    model = start.model
    if model is None:
        bundled = bundled_model_folder(cache_dir=settings.bundled_model_dir)
        model = str(bundled) if bundled.is_dir() else None
    if model is not None and not (start.options.replicas and cluster_address()):  # on other machines then
        check_model(model, args, settings.taps)


def check_address(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.host, settings.port))
        except OSError as error:
            raise CommandError(
                f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}; choose "
                "others with --host and --port"
            ) from error


def check_callers(settings: Settings, given: GivenKeys | None = None) -> bool:
    """Return whether there are any keys, stored or given; without them, require a loopback address."""
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


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise CommandError(f"{CONFIG} must be a file of options, and there is no file {path}")


__all__ = ["ServeOptions", "Start", "check_address", "check_arguments", "check_callers", "check_start"]
