"""Requests with a LoRA adapter, before they are sent to the engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError, ErrorCode

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def is_adapter_folder(path: str) -> bool:
    """Return whether a path is a folder with an adapter's configuration and weights."""
    has_weights = any(Path(path, name).exists() for name in _WEIGHTS)
    return has_weights and Path(path, "adapter_config.json").exists()


def check_files(adapter: LoRARequest) -> None:
    """Check that the files of an adapter are still there.

    The engine may have dropped its weights for those of other adapters, and would die if it could not read
    them again.

    Raises:
        ApiError: ``model_not_found``: they are not.
    """
    if not is_adapter_folder(adapter.lora_path):
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The files of the adapter {adapter.lora_name!r} have been removed from the server; its operator "
            "has to unload it, and to load it from another folder.",
            "model",
        )


def salt_of_adapter(adapter: LoRARequest, salt: str | None, secret: str) -> str:
    """Return the prefix cache salt of a request with an adapter.

    vLLM keeps apart adapters of different names or paths only. The same may be loaded again with other
    weights, and has another id then.

    Args:
        adapter: The adapter.
        salt: The request's own ``cache_salt``.
        secret: The engine's secret, see ``call.salted``.
    """
    parts = [secret, f"adapter {adapter.lora_int_id}", salt or ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


__all__ = ["check_files", "is_adapter_folder", "salt_of_adapter"]
