"""Identification of the model that a trace is meant for: its name, or a fingerprint of its config's shape."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

_FIELDS: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def fingerprint_of(config: Any) -> str:
    text = config.get_text_config()
    shape = {name: _stated(text, name) for name in _FIELDS}
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def _stated(text: Any, name: str) -> Any:
    """Return a field of a text config; a list where layers differ in it (Gemma 4), None if it is missing."""
    if name in (getattr(text, "per_layer_attributes", None) or ()):
        return [getattr(layer, name) for layer in text.per_layer_config]
    return getattr(text, name, None)


def fingerprint_of_folder(folder: str) -> str:
    """Return the shape hash of the model in a local folder; an empty string if there is no model."""
    from transformers import AutoConfig  # noqa: PLC0415 - status queries should not import transformers

    try:
        config = AutoConfig.from_pretrained(folder)  # nosec B615 # a local folder
    except (OSError, ValueError):
        return ""
    return fingerprint_of(config)


def name_of(source: str) -> str:
    """Return the name by which a server knows a model: its repository name, or a folder's absolute path."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.is_dir() else source
