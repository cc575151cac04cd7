"""Which model a trace is meant for: its name, and a fingerprint of its shape.

A folder has another name on every machine, so two sides that loaded the same checkpoint from folders compare
what its config says of its shape.
"""

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
    """Return a hash of a model's shape, from its config of the transformers library."""
    text = config.get_text_config()
    shape = {name: getattr(text, name, None) for name in _FIELDS}
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def fingerprint_of_folder(folder: str) -> str:
    """Return the hash of the shape of a model in a folder here; nothing where there is no model."""
    from transformers import AutoConfig  # noqa: PLC0415 - asking for a server's status shall not load it

    try:
        config = AutoConfig.from_pretrained(folder)  # nosec B615 # a folder here
    except (OSError, ValueError):
        return ""
    return fingerprint_of(config)


def name_of(source: str) -> str:
    """Return what a server is to know a model by: its name, or a folder's whole path, which shows as one."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.is_dir() else source
