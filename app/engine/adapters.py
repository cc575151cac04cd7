"""LoRA adapters that are loaded and unloaded at run time, on vLLM's routes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import weakref
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from api_schemas.fields import NAME_PATTERN, NAME_RULE
from app.process_environment import ADAPTER_UPDATES, may_update_adapters
from nnsight_engine.vllm_backend.request_parts import is_adapter_folder
from nnsight_engine.vllm_backend.tracing_async_llm import TracingAsyncLLM

logger = logging.getLogger(__name__)


class AdapterLocks:
    """A lock for each name, kept while it is used; vLLM keeps one for every name ever asked for."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._locks)


class AdapterModels(OpenAIServingModels):
    """vLLM's list of models, whose adapters are held in the engine's memory while they are listed.

    vLLM's own answers advise `load_inplace`, name the server's folders, and are 500 for files that are wrong.
    """

    engine_client: TracingAsyncLLM

    async def load_lora_adapter(
        self, request: LoadLoRAAdapterRequest, base_model_name: str | None = None
    ) -> str:
        """List an adapter, after all workers have loaded and checked it; raises ApiError."""
        name = request.lora_name
        async with self.lora_resolver_lock[name]:
            if name in self.lora_requests or self.is_base_model(name):
                kind = "an adapter" if name in self.lora_requests else "the model"
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"{name!r} is already the name of {kind}: choose another one, or unload the adapter "
                    "first; running requests end with the one that they began with.",
                    "lora_name",
                )
            adapter = LoRARequest(name, self.lora_id_counter.inc(1), request.lora_path)
            if base_model_name is not None and self.is_base_model(base_model_name):
                adapter.base_model_name = base_model_name
            await self.engine_client.hold_adapter(adapter)
            self.lora_requests[name] = adapter
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload_lora_adapter(self, request: UnloadLoRAAdapterRequest) -> str:
        """Drop an adapter, which running requests keep; ApiError ``model_not_found`` for an unknown one."""
        name = request.lora_name
        async with self.lora_resolver_lock[name]:
            adapter = self.lora_requests.pop(name, None)
            if adapter is None:
                raise ApiError(
                    ErrorCode.MODEL_NOT_FOUND,
                    f"No adapter is called {clip(name)!r}; GET /v1/models lists them, with a `parent`.",
                    "lora_name",
                )
            self.engine_client.release_adapter(adapter)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def show_available_models(self) -> ModelList:
        """Return vLLM's list, without folders of the server."""
        listed = await super().show_available_models()
        for card in listed.data:
            if card.root is not None and Path(card.root).is_absolute():
                card.root = card.id
        return listed


def check_adapter_request(fields: MutableMapping[str, Any], *, takes_adapters: bool) -> None:
    """Check the body of a request to load or unload an adapter; raises ApiError.

    Its folder becomes an absolute path.
    """
    if not may_update_adapters():
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"This server loads adapters at its start only, --lora-modules. With {ADAPTER_UPDATES}=1 it also "
            "loads and unloads them at run time.",
        )
    if not takes_adapters:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "This server takes no adapters: its operator has to start it with --enable-lora.",
        )
    if fields.get("load_inplace"):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "`load_inplace` is not supported: the adapter of running requests would change. Unload it and "
            "load the other one under its name; running requests end with the one that they began with.",
            "load_inplace",
        )
    name, path = fields.get("lora_name"), fields.get("lora_path")
    if isinstance(name, str) and path is not None:  # to be loaded
        _check_name(name)
    if isinstance(path, str):
        folder = os.path.abspath(os.path.expanduser(path))
        if not is_adapter_folder(folder):
            raise ApiError(
                ErrorCode.NOT_FOUND,
                f"There is no adapter at {clip(path)!r} on the server: it must be a folder there, with "
                "adapter_config.json and the weights. Download one of a repository first.",
                "lora_path",
            )
        fields["lora_path"] = folder


def _check_name(name: str) -> None:
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"The name of an adapter has {NAME_RULE}, got {excerpt(name)}; what follows a colon in "
            "`model` is a preset.",
            "lora_name",
        )


async def load_again(models: AdapterModels, adapters: Iterable[LoRARequest]) -> None:
    """Load the adapters of the engine before into a new one; one that fails is logged, and listed no more."""
    for adapter in adapters:
        request = LoadLoRAAdapterRequest(lora_name=adapter.lora_name, lora_path=adapter.lora_path)
        try:
            await models.load_lora_adapter(request, adapter.base_model_name)
        except ApiError as error:
            logger.error("the adapter %r is lost: %s", adapter.lora_name, error.message)  # noqa: TRY400 - no fault
