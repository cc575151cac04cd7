"""The model in the arguments of ``serve``, and the facts that its config.json tells without vLLM."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
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

from app.command_error import CommandError
from app.process_environment import may_exceed_max_model_len, uses_other_hub
from nnsight_engine.core.tap_choice import chosen_taps

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
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    option, options = _taken("--model", arguments[1:] if first is not None else arguments)
    file, options = _taken(CONFIG, options)
    if first is not None and option is not None:
        raise CommandError("MODEL is given twice, as the first argument and as --model")
    return first or option, options if file is None else [CONFIG, file, *options]


def _taken(name: str, options: Sequence[str]) -> tuple[str | None, list[str]]:
    for index, one in enumerate(options):
        if one.startswith(f"{name}="):
            return one.removeprefix(f"{name}="), [*options[:index], *options[index + 1 :]]
        if one == name and index + 1 < len(options):
            return options[index + 1], [*options[:index], *options[index + 2 :]]
    return None, [*options]


def check_model(model: str, args: argparse.Namespace, taps: str) -> None:
    """Check that a model exists (CommandError) and that options and taps fit its config.json."""
    config = _config(model, args)
    if config and not args.hf_overrides and not args.hf_config_path:
        _check_fit(config, args, taps)


def _config(model: str, args: argparse.Namespace) -> Mapping[str, Any]:
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
        return _parsed(file)
    if args.hf_config_path or any(next(folder.glob(one), None) for one in _OTHER_CONFIGS):
        return {}
    raise CommandError(
        f"the folder {folder} has no {_CONFIG_FILE}: it must contain a model in Hugging Face's layout"
    )


def _config_of_hub(name: str, args: argparse.Namespace) -> Mapping[str, Any]:
    cached = try_to_load_from_cache(name, _CONFIG_FILE, revision=args.revision)
    if isinstance(cached, str):
        return _parsed(Path(cached))
    at = f" at revision {args.revision}" if args.revision else ""
    unknown = f"there is no folder {name}, and the Hugging Face Hub has no model {name}{at}"
    token = args.hf_token if isinstance(args.hf_token, str) else None
    try:
        # Unlike a download, this request is not repeated when the network is down.
        get_hf_file_metadata(
            hf_hub_url(name, _CONFIG_FILE, revision=args.revision), token=token, timeout=_TIMEOUT_S
        )
        return _parsed(Path(hf_hub_download(name, _CONFIG_FILE, revision=args.revision, token=token)))
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
            f"there is no folder {name}, and the cache of the Hugging Face Hub has no model {name}{at}: "
            "check the name, or download it without HF_HUB_OFFLINE"
        ) from error
    except HfHubHTTPError:
        return {}  # the Hub has a problem of its own, and vLLM tries longer
    except Exception as error:  # of the Hub's HTTP client, whichever it is
        raise CommandError(
            f"there is no folder {name}, no such model in the cache, and the Hugging Face Hub cannot be "
            f"reached ({error}): check the name and the network"
        ) from error


def _parsed(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{file} must be a JSON object")
    text = config.get("text_config") or config.get("llm_config")
    return {**config, **text} if isinstance(text, dict) else config


def _check_fit(config: Mapping[str, Any], args: argparse.Namespace, taps: str) -> None:
    layers = next(
        (config[one] for one in ("num_hidden_layers", "n_layer", "n_layers") if one in config), None
    )
    if isinstance(layers, int):
        chosen_taps(taps, layers)
    longest = max((config[one] for one in _MAX_LEN_KEYS if isinstance(config.get(one), int)), default=None)
    is_scaled = "factor" in json.dumps([config.get(one) for one in ("rope_scaling", "rope_parameters")])
    if longest and not is_scaled and (args.max_model_len or 0) > longest and not may_exceed_max_model_len():
        raise CommandError(
            f"--max-model-len must be at most {longest}, the model's longest, got {args.max_model_len}"
        )
    heads, ranks = config.get("num_attention_heads"), args.tensor_parallel_size or 1
    if isinstance(heads, int) and ranks > 1 and heads % ranks:
        raise CommandError(
            f"--tensor-parallel-size must divide the model's {heads} attention heads, got {ranks}"
        )


__all__ = ["CONFIG", "check_model", "split_model"]
