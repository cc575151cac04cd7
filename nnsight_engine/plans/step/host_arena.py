"""Asynchronous copies between a device and its host.

A copy to or from pageable memory blocks the host until the device is done. So copies go through pinned
memory: to the device, torch caches it; from there, buffers are used again once their values have been read.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT: Final = 64
_MIN_BYTES: Final = 1 << 20


def to_device(values: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host's values on a device; on a CPU device they share memory."""
    host = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class HostCopy:
    """The values of one step, on their way to the host, valid within ``arrived``.

    ``sources``, on the device, must not be freed before the copies are done, behind which ``event`` is
    recorded. ``memory`` then goes back to ``free``, the arena's.
    """

    def __init__(
        self,
        values: list[torch.Tensor],
        sources: Sequence[torch.Tensor] = (),
        event: torch.cuda.Event | None = None,
        memory: torch.Tensor | None = None,
        free: deque[torch.Tensor] | None = None,
    ) -> None:
        self.values = values
        self._sources = sources
        self._event = event
        self._memory = memory
        self._free = free

    @contextlib.contextmanager
    def arrived(self) -> Iterator[None]:
        """Wait for the values; after the context their memory is used for others. Any thread may call it."""
        if self._event is not None:
            self._event.synchronize()
        yield
        self._sources = ()
        if self._free is not None and self._memory is not None:
            self._free.append(self._memory)
            self._memory = None

    def precede_writes(self) -> None:
        """Let later work on the current stream wait for the copies: it may change the sources."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class HostArena:
    """Copies values to the host, behind the device's current work and beside its later work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: deque[torch.Tensor] = deque()

    def start_copy(self, values: Sequence[torch.Tensor]) -> HostCopy:
        """Start copies of the device's values; does not wait for them, see ``HostCopy.arrived``."""
        memory = self._memory(sum(map(_aligned, values)))
        if self._stream is None:
            return HostCopy(_copied(values, memory), memory=memory, free=self._free)
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = _copied(values, memory, non_blocking=True)
            event.record()
        return HostCopy(host, list(values), event, memory, self._free)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """Return a free buffer, or a new one if that is too small, at least twice as large."""
        memory = self._free.popleft() if self._free else torch.empty(0, dtype=torch.uint8)
        if num_bytes <= len(memory):
            return memory
        size = max(num_bytes, 2 * len(memory), _MIN_BYTES)
        # Inference tensors may not be changed outside of inference mode; this memory is used in both.
        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)


def _copied(
    values: Sequence[torch.Tensor], memory: torch.Tensor, *, non_blocking: bool = False
) -> list[torch.Tensor]:
    """Copy values into parts of ``memory``, aligned; return these parts."""
    host, start = [], 0
    for value in values:
        piece = memory[start : start + value.numel() * value.itemsize]
        host.append(piece.view(value.dtype).view(value.shape).copy_(value, non_blocking=non_blocking))
        start += _aligned(value)
    return host


def _aligned(value: torch.Tensor) -> int:
    return -(-value.numel() * value.itemsize // _ALIGNMENT) * _ALIGNMENT
