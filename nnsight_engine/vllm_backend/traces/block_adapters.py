"""The LoRA adapters of blocks that call modules themselves.

vLLM knows no adapter of such a call's rows: it is that of the block's request, which the calling thread
carries.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from nnsight_engine.vllm_backend.traces.errors import AdapterNotLoadedError

if TYPE_CHECKING:
    from torch import nn

NO_ADAPTER: Final = 0
"""The adapter id of a request that uses the model as it is; those of adapters are positive."""
NO_SLOT: Final = -1
"""The slot of the model as it is."""


class BlockAdapters:
    """The adapter of each thread's calls; ``slots`` returns each engine slot's adapter id, None if empty."""

    def __init__(self, slots: Callable[[], Sequence[int | None]] = tuple) -> None:
        self._slots = slots
        self._thread = threading.local()

    @property
    def current(self) -> int | None:
        """The id of this thread's adapter, or ``NO_ADAPTER``; None for the model's own calls."""
        adapter: int | None = getattr(self._thread, "adapter", None)
        return adapter

    def enter(self, adapter: int | None) -> None:
        self._thread.adapter = adapter

    @contextlib.contextmanager
    def using(self, adapter: int | None) -> Iterator[None]:
        """Use an adapter for the module calls that this thread makes in the context."""
        adapter_before = self.current
        self.enter(adapter)
        try:
            yield
        finally:
            self.enter(adapter_before)

    def slot(self) -> int | None:
        """Return the slot of this thread's adapter, or ``NO_SLOT``; None for the model's own calls.

        Raises AdapterNotLoadedError if the adapter is in no slot, since other requests are running.
        """
        adapter = self.current
        if adapter is None:
            return None
        if adapter == NO_ADAPTER:
            return NO_SLOT
        slots = self._slots()
        if adapter not in slots:
            raise AdapterNotLoadedError.outside_step()
        return slots.index(adapter)


def block_adapters(model: nn.Module) -> BlockAdapters:
    """Return the adapters that the model's LoRA manager has for blocks; without LoRA, ones without effect."""
    # A stand-in of a module elsewhere, as in a sandbox, raises for attributes that only the module has.
    adapters: BlockAdapters | None = getattr(vars(model).get("lora_manager"), "block_adapters", None)
    return BlockAdapters() if adapters is None else adapters
