"""Ways between a device and its host that nobody waits on.

Memory that the host may page out cannot be copied to or from while the device works: a copy waits for it.
What goes to the device goes through pinned memory, which torch keeps for the next time; what comes from it
comes into one piece of such memory, the same at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT: Final = 64
_LEAST_BYTES: Final = 1 << 20


def to_device(values: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host's values on a device; on the host's own, in the same memory."""
    host = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class HostArena:
    """Memory of the host that a step's values are copied into.

    Values are brought before the device is next waited for, and looked at behind that.

    Args:
        device: Where they come from.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold no memory yet."""
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._has_come = torch.cuda.Event() if is_cuda else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sources: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """How much memory there is."""
        return len(self._memory)

    def bring(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy a step's values, beside what the device does next, over those brought before.

        Returns:
            Where they will be, each contiguous and of its own shape, once ``wait`` has returned.
        """
        self._fit(sum(map(_aligned, values)))
        if self._stream is None or self._has_come is None:
            return self._copied(values)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = self._copied(values)
            self._has_come.record()
        # Nobody else may have their memory on the device before they are here.
        self._sources = list(values)
        return host

    def wait(self) -> None:
        """Wait until the values are here; they are, where the device was waited for since."""
        if self._has_come is not None:
            self._has_come.synchronize()
        self._sources = []

    def _fit(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            size = max(num_bytes, 2 * len(self._memory), _LEAST_BYTES)
            # What belongs to no inference may be changed in and out of one.
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
    """Return how many bytes a value takes, so that any may follow."""
    return -(-value.numel() * value.itemsize // _ALIGNMENT) * _ALIGNMENT
