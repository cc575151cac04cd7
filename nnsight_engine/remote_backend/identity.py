"""Which model a block was written against: what tells two of them apart without a look at their weights."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

_FIELDS: Final = (
    "architectures",
    "hidden_size",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def fingerprint_of(config: Any) -> str:
    """Return a digest of a model's shape, equal for a client's copy and a server's.

    Args:
        config: The model's, of the transformers library.
    """
    text = config.get_text_config()
    shape = {name: getattr(text, name, None) for name in _FIELDS}
    return hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()


__all__ = ["fingerprint_of"]
