"""The LoRA adapters of blocks that call modules themselves.

A call by a block has rows of its own, of which vLLM knows no adapter. It uses the adapter of the block's
request: the block's thread carries it, or the worker's thread while it makes the call for a block elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.vllm_backend.traces.errors import AdapterNotLoadedError

if TYPE_CHECKING:
    from torch import nn

NO_ADAPTER: Final = 0
"""The adapter id of a request that uses the model as it is; those of adapters are positive."""
NO_SLOT: Final = -1
"""The slot of the model as it is."""


class BlockAdapters:
    """The adapter of each thread's calls.

    Args:
        slots: Returns the id of the adapter in each of the engine's slots, None for an empty one.
    """

    def __init__(self, slots: Callable[[], Sequence[int | None]] = tuple) -> None:
        self._slots = slots
        self._thread = threading.local()

    def enter(self, adapter: int | None) -> int | None:
        """Set the adapter of this thread's further calls; return the one before.

        Args:
            adapter: Its id, or ``NO_ADAPTER``; None for the model's own calls.
        """
        before: int | None = getattr(self._thread, "adapter", None)
        self._thread.adapter = adapter
        return before

    def slot(self) -> int | None:
        """Return the slot of this thread's adapter, or ``NO_SLOT``; None for the model's own calls.

        Raises:
            AdapterNotLoadedError: The adapter is in no slot, since other requests are running.
        """
        adapter: int | None = getattr(self._thread, "adapter", None)
        if adapter is None:
            return None
        if adapter == NO_ADAPTER:
            return NO_SLOT
        slots = self._slots()
        if adapter not in slots:
            raise AdapterNotLoadedError.outside_step()
        return slots.index(adapter)


def block_adapters(model: nn.Module) -> BlockAdapters:
    """Return those of a loaded model; without effect if it takes no adapters."""
    found: BlockAdapters | None = getattr(getattr(model, "lora_manager", None), "block_adapters", None)
    return BlockAdapters() if found is None else found


def base_module(module: nn.Module) -> nn.Module:
    """Return the projection inside vLLM's wrapper for adapters, or the module itself."""
    base: Any = getattr(module, "base_layer", module)
    return module if base is None else base


__all__ = ["NO_ADAPTER", "NO_SLOT", "BlockAdapters", "base_module", "block_adapters"]
