"""LoRA adapters that are loaded and unloaded at run time, by vLLM's own handlers."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from app.process_environment import ADAPTER_UPDATES, may_update_adapters
from nnsight_engine.vllm_backend.adapter_requests import is_adapter_folder

logger = logging.getLogger(__name__)


class AdapterLocks:
    """A lock for each name, kept while it is used.

    vLLM keeps one for every model name that any client has asked for.
    """

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        """Return the lock of a name."""
        return self._locks.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        """Return the number of locks in use."""
        return len(self._locks)


def check_adapter_request(fields: MutableMapping[str, Any]) -> None:
    """Check a request to load or unload an adapter; its folder becomes an absolute path.

    Raises:
        ApiError: The operator has not allowed such requests, or the adapter would change while it is used.
    """
    if not may_update_adapters():
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"This server loads adapters at its start only, --lora-modules. With {ADAPTER_UPDATES}=1 it also "
            "loads and unloads them at run time.",
        )
    if fields.get("load_inplace"):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "`load_inplace` is not supported: the adapter of running requests would change. Unload it and "
            "load the other one under its name; running requests end with the one that they began with.",
            "load_inplace",
        )
    name, path = fields.get("lora_name"), fields.get("lora_path")
    if isinstance(name, str) and ":" in name:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "The name of an adapter has no colon: what follows one in `model` is a preset.",
            "lora_name",
        )
    if isinstance(path, str):
        folder = str(Path(path).expanduser().absolute())
        if not is_adapter_folder(folder):
            raise ApiError(
                ErrorCode.NOT_FOUND,
                f"There is no adapter at {clip(path)!r} on the server: it must be a folder there, with "
                "adapter_config.json and the weights. Download one of a repository first.",
                "lora_path",
            )
        fields["lora_path"] = folder


async def load_again(models: OpenAIServingModels, adapters: Iterable[LoRARequest]) -> None:
    """Load the adapters of an engine that has died into the one in its place."""
    for one in adapters:
        answer = await models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=one.lora_name, lora_path=one.lora_path)
        )
        if isinstance(answer, ErrorResponse):
            logger.error("the adapter %r is lost: %s", one.lora_name, answer.error.message)


__all__ = ["AdapterLocks", "check_adapter_request", "load_again"]
