"""Mistakes of the operator, found before vLLM, torch and the server are imported; others come later.

What is known of the model comes from the arguments of ``serve`` and from its config.json, without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app.addresses import is_loopback
from app.auth.keys import GivenKeys
from app.command_error import CommandError, read_settings
from app.commands.keys import has_keys
from app.engine.vllm_options import parse_recorded, refuse_named, refuse_with_replicas
from app.process_environment import cluster_address, may_exceed_max_model_len, uses_other_hub, vllm_key
from app.settings import Settings
from app.storage.database import DatabaseError
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.operator_choices import ALL_TAPS, check_taps, chosen_taps
from nnsight_engine.modeling.bundled import bundled_model_folder
from nnsight_engine.vllm_backend.cpu_plugin import check_vllm

CONFIG = "--config"

_CONFIG_FILE: Final = "config.json"
_OTHER_CONFIGS: Final = ("params.json", "*.gguf", "model_index.json")
"""Files of folders that vLLM reads without a config.json."""
_NAME: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_TIMEOUT_S: Final = 5.0
_MAX_LEN_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys from which vLLM takes a model's longest context."""


def split_model(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the model, first argument or ``--model``, and the options, first those of a file."""
    positional = arguments[0] if arguments and not arguments[0].startswith("-") else None
    option, options = _take_option("--model", arguments[1:] if positional is not None else arguments)
    file, options = _take_option(CONFIG, options)
    if positional is not None and option is not None:
        raise CommandError("MODEL is given twice, as the first argument and as --model")
    return positional or option, options if file is None else [CONFIG, file, *options]


def _take_option(name: str, options: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of an option, None if it is absent, and the options without it."""
    for index, option in enumerate(options):
        if option.startswith(f"{name}="):
            return option.removeprefix(f"{name}="), [*options[:index], *options[index + 1 :]]
        if option == name and index + 1 < len(options):
            return options[index + 1], [*options[:index], *options[index + 2 :]]
    return None, [*options]


def check_model(model: str, args: argparse.Namespace, taps: str) -> None:
    """Check that a model exists (CommandError) and that options and taps fit its config.json."""
    config = _find_config(model, args)
    if config and not args.hf_overrides and not args.hf_config_path:
        _check_fit(config, args, taps)


def _find_config(model: str, args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the content of config.json; empty if only vLLM can tell."""
    folder = Path(model)
    if folder.is_dir():
        return _config_of_folder(folder, args)
    if folder.exists():
        if folder.suffix == ".gguf":
            return {}
        raise CommandError(f"MODEL must be a folder or a Hugging Face name, and {model} is a file")
    if model.startswith(("http://", "https://")):
        raise CommandError(
            f"MODEL must be a folder or a Hugging Face name like Qwen/Qwen3-0.6B, not an address, got {model}"
        )
    if _NAME.fullmatch(model):
        return {} if uses_other_hub() else _config_of_hub(model, args)
    if ":" in model:  # an object store, or a file of a repository
        return {}
    raise CommandError(f"there is no folder {model}")


def _config_of_folder(folder: Path, args: argparse.Namespace) -> Mapping[str, Any]:
    file = folder / _CONFIG_FILE
    if file.is_file():
        return _parse_config(file)
    if args.hf_config_path or any(next(folder.glob(pattern), None) for pattern in _OTHER_CONFIGS):
        return {}
    raise CommandError(
        f"the folder {folder} has no {_CONFIG_FILE}: it must contain a model in Hugging Face's layout"
    )


def _config_of_hub(name: str, args: argparse.Namespace) -> Mapping[str, Any]:
    """Return config.json from the Hub or its cache; empty if only vLLM can tell, CommandError if none."""
    cached = try_to_load_from_cache(name, _CONFIG_FILE, revision=args.revision)
    if isinstance(cached, str):
        return _parse_config(Path(cached))
    at_revision = f" at revision {args.revision}" if args.revision else ""
    unknown = f"there is no folder {name}, and the Hugging Face Hub has no model {name}{at_revision}"
    token = args.hf_token if isinstance(args.hf_token, str) else None
    try:
        # Unlike a download, this request is not repeated when the network is down.
        get_hf_file_metadata(
            hf_hub_url(name, _CONFIG_FILE, revision=args.revision), token=token, timeout=_TIMEOUT_S
        )
        return _parse_config(Path(hf_hub_download(name, _CONFIG_FILE, revision=args.revision, token=token)))
    except GatedRepoError as error:
        raise CommandError(
            f"{name} is gated on the Hugging Face Hub: accept its terms there, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CommandError(f"{unknown}, or it is private: check the name, or set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise CommandError(unknown) from error
    except EntryNotFoundError:
        return {}  # vLLM knows other layouts
    except OfflineModeIsEnabled as error:
        raise CommandError(
            f"there is no folder {name}, and the cache of the Hugging Face Hub has no model "
            f"{name}{at_revision}: check the name, or download it without HF_HUB_OFFLINE"
        ) from error
    except HfHubHTTPError:
        return {}  # the Hub has a problem of its own, and vLLM tries longer
    except Exception as error:  # of the Hub's HTTP client, whichever it is
        raise CommandError(
            f"there is no folder {name}, no such model in the cache, and the Hugging Face Hub cannot be "
            f"reached ({error}): check the name and the network"
        ) from error


def _parse_config(file: Path) -> Mapping[str, Any]:
    """Return the content of a config.json; fields of a nested language model take precedence."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{file} must be a JSON object")
    text = config.get("text_config") or config.get("llm_config")
    return {**config, **text} if isinstance(text, dict) else config


def _check_fit(config: Mapping[str, Any], args: argparse.Namespace, taps: str) -> None:
    """Raise an error for taps, a context length or a number of ranks that the model does not allow."""
    layers = next(
        (config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None
    )
    if isinstance(layers, int):
        chosen_taps(taps, layers)
    longest = max((config[key] for key in _MAX_LEN_KEYS if isinstance(config.get(key), int)), default=None)
    is_scaled = "factor" in json.dumps([config.get(key) for key in ("rope_scaling", "rope_parameters")])
    if longest and not is_scaled and (args.max_model_len or 0) > longest and not may_exceed_max_model_len():
        raise CommandError(
            f"--max-model-len must be at most {longest}, the model's longest, got {args.max_model_len}"
        )
    heads, ranks = config.get("num_attention_heads"), args.tensor_parallel_size or 1
    if isinstance(heads, int) and ranks > 1 and heads % ranks:
        raise CommandError(
            f"--tensor-parallel-size must divide the model's {heads} attention heads, got {ranks}"
        )


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


def check_start(options: ServeOptions, own_flags: Iterable[str] = ()) -> Start:
    """Check arguments, environment, model and address; ``own_flags`` are suggested for typing errors."""
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
            check_vllm()
        start = Start(options, settings, model, arguments)
        if CONFIG in arguments:  # vLLM's parser reads the model and the address from it
            _check_file(arguments[arguments.index(CONFIG) + 1])
        else:
            _check_before_start(start, own_flags)
    except UnsupportedOptionError as error:
        raise CommandError(str(error)) from error
    return start


def check_arguments(model: str, arguments: Sequence[str], own_flags: Iterable[str] = ()) -> None:
    """Check the model and vLLM's options of a command that starts no server; raises CommandError."""
    try:
        check_vllm()
        args = parse_recorded(arguments, own_flags)
        check_model(model, args, ALL_TAPS)
    except UnsupportedOptionError as error:
        raise CommandError(str(error)) from error


def _check_before_start(start: Start, own_flags: Iterable[str]) -> None:
    """Check what the arguments alone tell: names, address, keys, model; raises CommandError."""
    settings = start.settings
    args = parse_recorded(start.arguments, own_flags)
    if not all((name or "").strip() for name in args.served_model_name or ()):
        raise CommandError("--served-model-name must not be empty")
    given_keys = GivenKeys(args.api_key or [key for key in [vllm_key()] if key])
    if not args.uds:
        check_address(settings)
    check_callers(settings, given_keys)
    model = start.model
    if model is None:
        bundled = bundled_model_folder(cache_dir=settings.bundled_model_dir)
        model = str(bundled) if bundled.is_dir() else None
    if model is not None and not (start.options.replicas and cluster_address()):  # on other machines then
        check_model(model, args, settings.taps)


def check_address(settings: Settings) -> None:
    """Raise CommandError if the server could not listen on its address."""
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


def check_callers(settings: Settings, given_keys: GivenKeys | None = None) -> bool:
    """Return whether there are any keys, stored or given; without them, require a loopback address."""
    try:
        with_keys = bool(given_keys) or asyncio.run(has_keys(settings))
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
