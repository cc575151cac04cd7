"""Asynchronous copies between a device and its host.

A copy to or from pageable host memory blocks the host until the device is done. Copies to the device
therefore go through pinned memory, which torch caches for reuse; copies from the device go into one pinned
buffer, the same at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class HostArena:
    """Host memory that a step's values are copied into.

    Copies start before the next synchronization with the device; values are read after it.

    Args:
        device: The device that the values are copied from.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._copied_event = torch.cuda.Event() if is_cuda else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sources: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Size of the host memory."""
        return len(self._memory)

    def start_copy(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start copying a step's values to the host, concurrently with the device's next work.

        They overwrite the values of the previous call.

        Returns:
            Host tensors, each contiguous and of the value's shape; valid once ``wait`` has returned.
        """
        self._fit(sum(map(_aligned, values)))
        if self._stream is None or self._copied_event is None:
            return self._copied(values)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = self._copied(values)
            self._copied_event.record()
        # The device memory must not be reused before the copies are done.
        self._sources = list(values)
        return host

    def wait(self) -> None:
        """Block until the values have arrived; return at once if the device was synchronized since."""
        if self._copied_event is not None:
            self._copied_event.synchronize()
        self._sources = []

    def _fit(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            size = max(num_bytes, 2 * len(self._memory), _MIN_BYTES)
            # Inference tensors may not be changed outside of inference mode; this buffer is used in both.
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _copied(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        host, start = [], 0
        is_beside = self._stream is not None
        for value in values:
            place = self._memory[start : start + value.numel() * value.itemsize]
            host.append(place.view(value.dtype).view(value.shape).copy_(value, non_blocking=is_beside))
            start += _aligned(value)
        return host


def _aligned(value: torch.Tensor) -> int:
    """Return a value's size in bytes, rounded up so that a value of any dtype may follow."""
    return -(-value.numel() * value.itemsize // _ALIGNMENT) * _ALIGNMENT
